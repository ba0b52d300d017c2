"""Measure a network on a split: ``python -m autospeed_model.evaluate --data OUT --weights best.pt``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from autospeed_model.accelerator import prepare_process
from autospeed_model.checkpoint import load_network
from autospeed_model.errors import UserError, run_entry
from autospeed_model.evaluation import Evaluator
from autospeed_model.hyperparameters import RuntimeOptions
from autospeed_model.network import AutoSpeed
from autospeed_model.packed import PackedDataset
from autospeed_model.runtime import add_runtime_arguments, runtime_from
from autospeed_model.text import counted
from autospeed_model.upstream import load_upstream


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.evaluate",
        description="Precision, recall and average precision of a network on one split of\na prepared dataset.",
        epilog="example:\n  python -m autospeed_model.evaluate --data prepared --weights runs/train/best.pt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--weights", type=Path, help="best.pt, last.pt or checkpoint.pt of a training")
    parser.add_argument("--upstream", type=Path, help="instead of --weights: a checkpoint of the public project")
    parser.add_argument("--size", default="n", help="size of the --upstream network (default n)")
    parser.add_argument("--split", default="evaluation", help="train, tune_val or evaluation (default)")
    parser.add_argument("--batch-size", type=int, default=32, help="images at a time (default 32)")
    add_runtime_arguments(parser)
    given = parser.parse_args(arguments)
    prepare_process()
    if (given.weights is None) == (given.upstream is None):
        raise UserError("give either --weights or --upstream")
    if given.batch_size < 1:
        raise UserError(f"--batch-size is {given.batch_size}; it must be at least 1")
    runtime = runtime_from(given, RuntimeOptions())
    data = PackedDataset(given.data)
    if given.weights is not None:
        network = load_network(given.weights)
    else:
        network = AutoSpeed(data.height, data.width, given.size).eval()
        load_upstream(network, given.upstream)
    if (network.height, network.width) != (data.height, data.width):
        raise UserError(
            f"{given.data} has images of {data.height} x {data.width}, "
            f"the network is for {network.height} x {network.width}"
        )
    split = data.split(given.split)
    if not len(split):
        raise UserError(f"{given.data}: the split '{given.split}' has no image: nothing to measure")
    # A graph would not pay for itself in one pass.
    figures = Evaluator(runtime.place(network), split, given.batch_size, runtime).run()
    text = "  ".join(f"{name} {value:.4f}" for name, value in figures.to_mapping().items())
    Console().print(f"{given.split} ({counted(len(split), 'image')})  {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
