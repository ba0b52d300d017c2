"""Record learning curves of real trainings for benchmarks/search.py.

Trains AutoSpeed with parameters drawn from a study file's search space, the defaults first, and writes one JSON line a
training as it ends: its parameters, the mAP after every pass over the data, and what took how long. A failed training
is a line too, with as many passes as it had. Several processes share a device; each takes the next training that is not
recorded, so that the same command goes on where a recording was cut off.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]

# A process that has died is replaced, each so often.
REPLACEMENTS = 3
# After the time is over, running trainings may end within so many seconds.
GRACE_S = 20.0
TOLD_EVERY_S = 10.0


def read_study(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Search space and fixed values of a study file, which may be the mapping of parameters alone."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    space, fixed = (content["parameters"], content.get("fixed", {})) if "parameters" in content else (content, {})
    for entry in space.values():
        entry.update({key: float(entry[key]) for key in ("min", "max")})  # YAML 1.1 reads 1e-6 as text
    return space, fixed


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
        for name, unit in zip(names, point.tolist(), strict=True):
            low, high = float(space[name]["min"]), float(space[name]["max"])
            if space[name]["type"] == "loguniform":
                values[name] = math.exp(math.log(low) + unit * (math.log(high) - math.log(low)))
            else:
                values[name] = low + unit * (high - low)
        settings.append(values)
    return settings


def train(data: Path, settings: dict[str, float], fixed: dict[str, Any], passes: int, device: str) -> Row:
    """One training with ``settings``, and ``fixed`` for what is not among them; the row says how far it came.

    ``pass_s`` is the median over the passes but the first, in which graphs are captured; ``first_pass_s`` that one;
    ``setup_s`` what came before it. None of them holds an evaluation, whose median is ``eval_s``.
    """
    from autospeed_model.errors import DivergedError
    from autospeed_model.hyperparameters import from_flat_mapping
    from autospeed_model.packed import PackedDataset
    from autospeed_model.runtime import Runtime
    from autospeed_model.trainer import Callback, Record, Trainer

    started = time.monotonic()
    records: list[Record] = []
    ends: list[float] = []

    class Recorder(Callback):
        def on_epoch(self, trainer: Trainer, record: Record) -> None:
            records.append(record)
            ends.append(time.monotonic())

    dataset = PackedDataset(data)
    values = {"compile": "never", **fixed, **settings, "epochs": passes}
    parameters, options, runtime = from_flat_mapping(values, "settings")
    splits = dataset.split("train"), dataset.split("tune_val")
    trainer = Trainer(*splits, parameters, options, Runtime.of(runtime, device))
    begun = time.monotonic()
    failure = {}
    try:
        trainer.fit(Recorder())
    except DivergedError as error:
        failure = {"failure": str(error)}
    seconds = [record["train_s"] for record in records]
    waits = [end - before - spent for before, end, spent in zip([begun, *ends], ends, seconds, strict=False)]
    return {
        "params": settings,
        "map": [round(record["map"], 5) for record in records],
        "pass_s": _median(seconds[1:] or seconds),
        "first_pass_s": _median(seconds[:1]),
        "eval_s": _median(waits[1:] or waits),
        "setup_s": round(begun - started, 3),
        **failure,
    }


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def read_rows(path: Path) -> list[Row]:
    """The lines of a recording; one that was cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def end_last_line(path: Path) -> None:
    """A line that was cut short must not take the next one with it."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def append(path: Path, row: Row) -> None:
    """Add a line in one write, so that processes need no lock that a dying one could keep."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(row) + "\n").encode())
    finally:
        os.close(handle)


def _process(given: argparse.Namespace, settings: list[dict[str, float]], counter: Any) -> None:
    from autospeed_model.accelerator import prepare_process

    prepare_process()
    while time.time() < given.deadline:
        with counter.get_lock():
            number = counter.value
            counter.value += 1
        if number >= len(settings):
            return
        if number in given.recorded:
            continue
        row = train(given.data, settings[number], given.fixed, given.passes, given.device)
        append(given.out, {"number": number, **row, "side_by_side": given.processes, "at": round(time.time(), 2)})
        _release()


def _release() -> None:
    """Give back what the last training held: a trainer is a circle, with graphs and their memory in it."""
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def shared_device(given: argparse.Namespace) -> Iterator[None]:
    """Processes that share a GPU run side by side through NVIDIA's service, where it works, as a study's workers do."""
    if not given.device.startswith("cuda") or given.processes == 1:
        yield
        return
    from hpcjobs.mps import shared_gpus

    with tempfile.TemporaryDirectory(prefix="mps-") as folder, shared_gpus(Path(folder)) as shared:
        tell(f"MPS: {'yes' if shared else 'no, processes take turns'}")
        yield


def end_with_parent_on_sigterm() -> None:
    """Let whoever ends this process end those that it has started, too: they are ended at an exit, not by a signal."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def record(given: argparse.Namespace, settings: list[dict[str, float]]) -> None:
    """Keep the processes going until all is recorded or the time is over; what has died is replaced."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    counter = context.Value("i", 0)
    running: list[Any] = []
    left = (1 + REPLACEMENTS) * given.processes

    def start() -> None:
        nonlocal left
        left -= 1
        running.append(context.Process(target=_process, args=(given, settings, counter), daemon=True))
        running[-1].start()

    for _ in range(given.processes):
        start()
    told = time.time()
    while running and time.time() < given.deadline + GRACE_S:
        time.sleep(0.2)
        for process in [one for one in running if not one.is_alive()]:
            running.remove(process)
            if process.exitcode and left and time.time() < given.deadline:
                tell(f"a process ended with code {process.exitcode}: another one takes its place")
                start()
        if time.time() - told >= TOLD_EVERY_S:
            told = time.time()
            rows = read_rows(given.out)
            last = rows[-1]["map"][-1:] if rows else []
            tell(f"{len(rows)} of {len(settings)} recorded, {len(running)} processes, last mAP {last}")
    for process in running:
        process.kill()
        process.join()
    tell(f"{len(read_rows(given.out))} of {len(settings)} recorded")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--study", type=Path, default=ROOT / "configs/studies/experiment1.yaml")
    parser.add_argument("--count", type=int, default=240, help="trainings, the defaults' among them")
    parser.add_argument("--passes", type=int, default=30, help="passes over the data of each training")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no training after so long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="the same in all trainings")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; what they hold is not trained again")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    given.deadline = time.time() + given.seconds
    space, fixed = read_study(given.study)
    given.fixed = fixed | dict(setting.split("=", 1) for setting in given.set)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    end_last_line(given.out)
    given.recorded = {row["number"] for row in read_rows(given.out)}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_with_parent_on_sigterm()
    with shared_device(given):
        record(given, draw(space, given.count, seed=0))
    return int(not read_rows(given.out))


if __name__ == "__main__":
    sys.exit(main())
