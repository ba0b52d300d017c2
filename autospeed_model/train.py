"""One training: ``python -m autospeed_model.train --data OUT --epochs 3``."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from autospeed_model import checkpoint
from autospeed_model.accelerator import prepare_process
from autospeed_model.errors import UserError, run_entry
from autospeed_model.hyperparameters import from_flat_mapping
from autospeed_model.logs import Checkpoints, CsvLog, ProgressBar, StopOnSignal, Stopped, TensorBoardLog
from autospeed_model.packed import PackedDataset
from autospeed_model.profiling import WARMUP, Profile
from autospeed_model.runtime import add_runtime_arguments, runtime_from
from autospeed_model.trainer import Callback, Trainer
from autospeed_model.upstream import load_upstream

EXAMPLES = """examples:
  python -m autospeed_model.train --data prepared --epochs 30
  python -m autospeed_model.train --data prepared --config best_params.yaml --set max_lr=0.005 --out runs/tuned
  python -m autospeed_model.train --data prepared --out runs/tuned --resume
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.train",
        description="Train AutoSpeed on a prepared dataset; evaluate it on the validation split after\nevery epoch.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder to write to (default runs/train)")
    parser.add_argument("--config", type=Path, help="YAML file of parameters, such as a study's best_params.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="one parameter; overrides --config; repeatable"
    )
    parser.add_argument("--epochs", type=int, help="passes over the training images (default 30)")
    parser.add_argument("--train-split", default="train", help="split to train on (default train)")
    parser.add_argument("--validation-split", default="tune_val", help="split to evaluate on (default tune_val)")
    parser.add_argument("--resume", action="store_true", help="go on from --out's checkpoint, with its parameters")
    parser.add_argument("--overwrite", action="store_true", help="replace a training that is in --out already")
    parser.add_argument("--weights", type=Path, help="start from the weights of another training (best.pt, last.pt)")
    parser.add_argument("--upstream", type=Path, help="start from a checkpoint of the public AutoSpeed project")
    parser.add_argument("--tensorboard", action=argparse.BooleanOptionalAction, default=True, help="write its log")
    parser.add_argument("--profile", action="store_true", help="write a PyTorch profiler trace of a few updates")
    add_runtime_arguments(parser)
    return parser.parse_args(arguments)


def read_parameters(config: Path | None, settings: list[str]) -> dict[str, Any]:
    """The flat mapping of a YAML file, overridden by ``NAME=VALUE`` settings.

    :raises UserError: for an unreadable file, one that is no mapping, or a setting without ``=``.
    """
    values: dict[str, Any] = {}
    if config is not None:
        try:
            content = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{config}: not readable ({error})") from error
        except yaml.YAMLError as error:
            raise UserError(f"{config}: no valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"{config}: needed is a mapping of parameter names to values")
        from_flat_mapping(content, str(config))
        values.update(content)
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise UserError(f"--set {setting}: write it as NAME=VALUE, such as max_lr=0.005")
        from_flat_mapping({name: value}, "--set")
        values[name] = value
    return values


def make_writable(folder: Path) -> None:
    """Make the folder of a training now: the first epoch must not be lost because it cannot be saved."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: you cannot write there; choose another --out")


def make_trainer(given: argparse.Namespace) -> Trainer:
    """The trainer that the command line asks for, with its first or its restored weights."""
    starts = [name for name in ("resume", "weights", "upstream") if getattr(given, name)]
    if len(starts) > 1:
        found = " and ".join(f"--{name}" for name in starts)
        raise UserError(f"found {found}; allowed is one of them: each says where the weights come from")
    path = given.out / "checkpoint.pt"
    values = read_parameters(given.config, given.set)
    if given.epochs is not None:
        values["epochs"] = given.epochs
    if given.resume:
        saved = checkpoint.load(path, checkpoint.TRAINING)
        with checkpoint.reading(path):
            values = {**saved["hyperparameters"], **saved["options"], **values}
    elif path.exists() and not given.overwrite:
        raise UserError(f"{path} exists; go on with --resume, replace it with --overwrite, or choose another --out")
    hyperparameters, options, runtime = from_flat_mapping(values, str(given.config or "parameters"))
    data = PackedDataset(given.data)
    splits = data.split(given.train_split), data.split(given.validation_split)
    make_writable(given.out)
    trainer = Trainer(*splits, hyperparameters, options, runtime_from(given, runtime))
    if given.resume:
        trainer.restore(path)
    elif given.upstream is not None:
        load_upstream(trainer.network, given.upstream)
        trainer.average.network.load_state_dict(trainer.network.state_dict())
    elif given.weights is not None:
        trainer.start_from(given.weights)
    return trainer


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    prepare_process()
    console = Console()
    trainer = make_trainer(given)
    kept = Checkpoints(given.out)
    stop = StopOnSignal(kept.save)
    if trainer.finished:
        console.print(f"{kept.path}: all {trainer.options.epochs} epochs are done")
        return 0
    console.print(
        f"epochs to train: {trainer.options.epochs - trainer.epoch}, each of {trainer.steps_per_epoch} steps of "
        f"{trainer.batch_size} images on {trainer.runtime.device}, into {given.out}",
        highlight=False,
        soft_wrap=True,
    )
    bar = ProgressBar(console)
    callbacks: list[Callback] = [kept, CsvLog(given.out / "metrics.csv"), bar, stop]
    if given.tensorboard:
        callbacks.append(TensorBoardLog(given.out / "tensorboard"))
    profile = Profile(given.out / "profile.json", trainer.runtime) if given.profile else None
    if profile is not None:
        callbacks.append(profile)
    stop.install()
    recording: AbstractContextManager[object] = profile or nullcontext()
    try:
        with bar, recording:
            trainer.fit(*callbacks)
    except Stopped as stopped:
        print(f"{stopped}; go on with --resume --out {given.out}", file=sys.stderr)
        return 128 + stopped.number
    if profile is not None and not profile.path.exists():
        console.print(f"no profile: the training had fewer than {WARMUP + 1} updates")
    best = max(trainer.history, key=lambda record: record["map"])
    console.print(
        f"best mAP {best['map']:.4f} after epoch {best['epoch']:.0f}: {given.out / 'best.pt'}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
