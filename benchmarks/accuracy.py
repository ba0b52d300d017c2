"""Does speed cost accuracy? ``python benchmarks/accuracy.py --data OUT``.

Trains with the plain runtime (fp32, not compiled, no graphs) and with the fast one from the same seeds, and prints the
mAP of every training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from autospeed_model.accelerator import prepare_process
from autospeed_model.errors import UserError, run_entry
from autospeed_model.hyperparameters import Hyperparameters, RuntimeOptions, TrainingOptions
from autospeed_model.packed import PackedDataset
from autospeed_model.runtime import Runtime
from autospeed_model.trainer import Trainer


def train(data: PackedDataset, runtime: Runtime, seed: int, given: argparse.Namespace) -> float:
    """The mAP of the last epoch's averaged weights."""
    options = TrainingOptions(epochs=given.epochs, seed=seed, size=given.size)
    hyperparameters = Hyperparameters.from_mapping(dict(item.partition("=")[::2] for item in given.set))
    trainer = Trainer(data.split("train"), data.split("evaluation"), hyperparameters, options, runtime)
    return trainer.fit()["map"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/accuracy.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", default="n")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a hyper-parameter")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    if given.seeds < 1:
        raise UserError(f"--seeds is {given.seeds}; allowed is any number above 0")
    prepare_process()
    data = PackedDataset(given.data)
    runtimes = {"plain": Runtime(given.device), "fast": Runtime.of(RuntimeOptions(), given.device)}
    found: dict[str, list[float]] = {}
    for name, runtime in runtimes.items():
        found[name] = [train(data, runtime, seed, given) for seed in range(given.seeds)]
        spread = statistics.stdev(found[name]) if given.seeds > 1 else 0.0
        values = "  ".join(f"{value:.4f}" for value in found[name])
        print(f"{name:6} mAP {values}   mean {statistics.mean(found[name]):.4f}, deviation {spread:.4f}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
