"""Record learning curves of real trainings for benchmarks/search.py.

Trains AutoSpeed with parameters drawn from a study file's search space, the defaults first, and writes one JSON line a
training: its parameters, the mAP after every pass over the data, and how long a pass took. A failed training is a line
too, with as many passes as it had. Several processes share a device; each takes the next training that is not recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Row = dict[str, Any]


def draw(space: dict[str, dict[str, Any]], count: int, seed: int) -> list[dict[str, float]]:
    """``count`` settings of a search space of floats: the defaults (an empty mapping), then a scrambled lattice.

    The lattice (a Kronecker sequence on the roots of x^(d+1) = x + 1) fills seven dimensions more evenly than random
    numbers do, and its first n points are even, too: a recording that is cut short is still a fair one, and the same
    command goes on with it.
    """
    names = list(space)
    root = 2.0
    for _ in range(64):
        root = (1.0 + root) ** (1.0 / (len(names) + 1))
    steps = (1.0 / root) ** np.arange(1, len(names) + 1)
    shift = np.random.default_rng(seed).random(len(names))
    points = (shift + np.arange(count - 1)[:, None] * steps) % 1.0
    settings: list[dict[str, float]] = [{}]
    for point in points:
        values = {}
        for name, unit in zip(names, point, strict=True):
            low, high = float(space[name]["min"]), float(space[name]["max"])
            if space[name]["type"] == "loguniform":
                values[name] = math.exp(math.log(low) + unit * (math.log(high) - math.log(low)))
            else:
                values[name] = low + unit * (high - low)
        settings.append(values)
    return settings


def train(
    data: Path, settings: dict[str, float], fixed: dict[str, Any], passes: int, device: str, weights: Path | None = None
) -> Row:
    """One training with ``settings``, and ``fixed`` for what is not among them; the row says how far it came. It begins
    with new weights, or those of a file."""
    from autospeed_model.errors import DivergedError
    from autospeed_model.hyperparameters import from_flat_mapping
    from autospeed_model.packed import PackedDataset
    from autospeed_model.runtime import Runtime
    from autospeed_model.trainer import Callback, Record, Trainer

    maps: list[float] = []
    seconds: list[float] = []

    class Recorder(Callback):
        def on_epoch(self, trainer: Trainer, record: Record) -> None:
            maps.append(round(record["map"], 5))
            seconds.append(round(record["train_s"], 3))

    dataset = PackedDataset(data)
    values = {"compile": "never", **fixed, **settings, "epochs": passes}
    parameters, options, runtime = from_flat_mapping(values, "settings")
    splits = dataset.split("train"), dataset.split("tune_val")
    failure = None
    try:
        trainer = Trainer(*splits, parameters, options, Runtime.of(runtime, device))
        if weights is not None:
            trainer.start_from(weights)
        trainer.fit(Recorder())
    except DivergedError as error:
        failure = str(error)
    return {"params": settings, "map": maps, "pass_s": sorted(seconds)[len(seconds) // 2] if seconds else None} | (
        {"failure": failure} if failure else {}
    )


def _process(given: argparse.Namespace, settings: list[dict[str, float]], counter: Any, lock: Any) -> None:
    while time.time() < given.deadline:
        with lock:
            number = counter.value
            counter.value += 1
        if number >= len(settings):
            return
        if number in given.recorded:
            continue
        row = train(given.data, settings[number], given.fixed, given.passes, given.device, given.weights)
        with lock, given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"number": number, **row}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--study", type=Path, default=Path("configs/studies/experiment1.yaml"))
    parser.add_argument("--count", type=int, default=200, help="trainings, the defaults' among them")
    parser.add_argument("--passes", type=int, default=30, help="passes over the data of each training")
    parser.add_argument("--weights", type=Path, help="begin each training with these weights (best.pt, last.pt)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no training after so long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="the same in all trainings")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/data/curves.jsonl"))
    given = parser.parse_args()
    given.deadline = time.time() + given.seconds
    given.fixed = dict(setting.split("=", 1) for setting in given.set)
    lines = given.out.read_text(encoding="utf-8").splitlines() if given.out.exists() else []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.recorded = {json.loads(line)["number"] for line in lines}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    space = yaml.safe_load(given.study.read_text(encoding="utf-8"))
    settings = draw(space, given.count, seed=0)
    context = multiprocessing.get_context("spawn")
    counter, lock = context.Value("i", 0), context.Lock()
    processes = [
        context.Process(target=_process, args=(given, settings, counter, lock)) for _ in range(given.processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
