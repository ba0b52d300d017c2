"""A study as it looks the morning after: its folder with a journal written record by record, at chosen times.

``python -m tests.hpcjobs.night FOLDER`` makes one to look at.
"""

from __future__ import annotations

import heapq
import math
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import distribution_to_json

from hpcjobs.config import ClusterConfig, RunConfig, StudyConfig, StudyFile
from hpcjobs.journal_records import encode
from hpcjobs.load import write_study_file
from hpcjobs.paths import StudyPaths
from hpcjobs.sampling import distribution

BEGIN = datetime(2026, 5, 4, 22, 0, tzinfo=timezone.utc)
SPACE = {
    "min_lr": {"type": "loguniform", "min": 1e-6, "max": 1e-4},
    "max_lr": {"type": "loguniform", "min": 1e-3, "max": 5e-2},
    "momentum": {"type": "uniform", "min": 0.8, "max": 0.98},
    "weight_decay": {"type": "loguniform", "min": 1e-5, "max": 5e-3},
    "box": {"type": "uniform", "min": 5.0, "max": 10.0},
    "cls": {"type": "uniform", "min": 0.2, "max": 4.0},
    "batch_size": {"type": "categorical", "values": [16, 32, 64]},
}
RUNNING, COMPLETE, PRUNED, FAIL, WAITING = range(5)


class Journal:
    """Collects records in the order of time, then writes them."""

    def __init__(self) -> None:
        self.events: list[tuple[float, int, dict[str, Any]]] = []

    def add(self, moment: float, op_code: int, **content: Any) -> None:
        heapq.heappush(self.events, (moment, len(self.events), {"op_code": op_code, "worker_id": "night", **content}))

    def state(self, moment: float, trial: int, state: int, value: float | None = None) -> None:
        times = {RUNNING: {"datetime_start": _stamp(moment)}, WAITING: {}}
        ended = {"datetime_complete": _stamp(moment)}
        values = None if value is None else [value]
        self.add(moment, 6, trial_id=trial, state=state, values=values, **times.get(state, ended))

    def attribute(self, moment: float, trial: int, name: str, value: Any) -> None:
        self.add(moment, 8, trial_id=trial, user_attr={name: value})

    def write(self, path: Path) -> None:
        ordered = [heapq.heappop(self.events)[2] for _ in range(len(self.events))]
        path.write_bytes(b"".join(encode(record, n) for n, record in enumerate(ordered)))


def _stamp(moment: float) -> str:
    return (BEGIN + timedelta(seconds=moment)).isoformat(timespec="microseconds")


def make_night(folder: Path, *, nodes: int = 2, workers: int = 8, trials: int = 120, seed: int = 0) -> StudyPaths:
    """A study of seven parameters: some trials pruned, some failed, one node's trials lost and recovered, some handed
    back."""
    random = np.random.default_rng(seed)
    paths = StudyPaths(folder)
    study = StudyConfig.model_validate(
        {"parameters": SPACE, "trials": trials, "epochs": 15, "pruner": {"name": "median"}, "fixed": {"hsv_h": 0.015}}
    )
    cluster = ClusterConfig(name="mi300x", cores_per_node=96)
    file = StudyFile(name="experiment1", study=study, run=RunConfig(nodes=nodes), cluster=cluster, value_name="mAP")
    defaults = {"min_lr": 1e-4, "max_lr": 1e-2, "momentum": 0.937, "weight_decay": 5e-4, "box": 7.5, "cls": 0.5}
    write_study_file(paths, file.model_copy(update={"defaults": {**defaults, "batch_size": 32}}))
    journal = Journal()
    journal.add(-10, 0, study_name="experiment1", directions=[2])
    for _ in range(trials):
        journal.add(-9, 4, study_id=0, datetime_start=None, state=WAITING,
                    distributions={}, params={}, user_attrs={}, system_attrs={}, value=None, values=None,
                    intermediate_values={})  # fmt: skip
    free = [(20.0 * node + 5 * random.random(), node, worker) for node in range(nodes) for worker in range(workers)]
    heapq.heapify(free)
    queue: list[tuple[int, Any, float]] = [(number, None, 0.0) for number in range(trials)]
    made = trials
    while queue:
        moment, node, worker = heapq.heappop(free)
        number, before, waits_since = queue.pop(0)
        moment = max(moment, waits_since + 1.0)
        fate, ended, params = _run(journal, random, moment, node, worker, number, before, trials)
        if fate in ("lost", "handed back"):
            if fate == "lost":
                _recover(journal, ended, number, made, params)
                queue.insert(0, (made, params, ended))
                made += 1
            else:
                queue.insert(0, (number, params, ended))
        heapq.heappush(free, (ended + (90.0 if fate == "lost" else 1.0), node, worker))
    journal.write(paths.journal)
    return paths


def _run(
    journal: Journal, random: np.random.Generator, moment: float, node: int, worker: int, number: int, before: Any,
    trials: int,
) -> tuple[str, float, dict[str, Any]]:  # fmt: skip
    """One stretch of work; returns how and when it ended, and the trial's parameters."""
    element = f"4711_{node}"
    owner = {"job": "4711", "task": str(node), "step": str(worker), "node": f"gpu{node + 1:02d}", "host": "h",
             "pid": 1, "start": "x", "token": f"{element}-{worker}", "element": element, "worker": worker}  # fmt: skip
    journal.attribute(moment, number, "hpcjobs:owner", owner)
    journal.state(moment, number, RUNNING)
    params = before or {name: _draw(random, space) for name, space in SPACE.items()}
    study = StudyConfig.model_validate({"parameters": SPACE})
    for name, value in params.items() if before is None else ():
        space = distribution(study.parameters[name])
        journal.add(moment, 5, trial_id=number, param_name=name, distribution=distribution_to_json(space),
                    param_value_internal=space.to_internal_repr(value))  # fmt: skip
    epoch_s = 20.0 * (1 + 0.2 * random.random()) * (1.4 if params["batch_size"] == 16 else 1.0)
    peak = _peak(params) + 0.004 * random.normal()
    fate = "completed"
    if params["batch_size"] == 64 and params["box"] > 9.3:
        fate = "out of GPU memory"
    elif params["max_lr"] > 0.045:
        fate = "diverged"
    elif before is None and number % 37 == 20:
        fate = "lost"
    elif before is None and number % 41 == 30:
        fate = "handed back"
    elif peak < 0.47 and number > trials // 8:
        fate = "pruned"
    epochs = {"completed": 15, "out of GPU memory": 0, "diverged": 2, "pruned": 6}.get(fate, 7)
    for epoch in range(1, epochs + 1):
        value = peak * (1 - math.exp(-epoch / 4.5)) + 0.006 * random.normal()
        journal.add(moment + epoch * epoch_s, 7, trial_id=number, step=epoch, intermediate_value=value)
    ended = moment + epochs * epoch_s + (8.0 if epochs < 15 else 1.0)
    if fate in ("completed", "pruned"):
        figures = {"precision": 1.47 * value, "recall": 0.69, "map50": 1.31 * value, "images_per_s": 14000 / epoch_s}
        journal.attribute(ended, number, "hpcjobs:result", {"figures": figures, "attempts": 1})
        journal.state(ended, number, COMPLETE if fate == "completed" else PRUNED, value)
    elif fate == "handed back":
        journal.state(ended, number, WAITING)
    else:
        kind = "worker died" if fate == "lost" else fate
        message = {"lost": "the worker ended with signal 9", "diverged": "ArithmeticError: the loss is not finite",
                   }.get(fate, "OutOfMemoryError: HIP out of memory. Tried to allocate 512 MiB")  # fmt: skip
        journal.attribute(ended, number, "hpcjobs:failure", {"class": kind, "message": message, "traceback": ""})
        journal.state(ended, number, FAIL)
    return fate, ended, params


def _recover(journal: Journal, moment: float, number: int, successor: int, params: dict[str, Any]) -> None:
    study = StudyConfig.model_validate({"parameters": SPACE})
    spaces = {name: distribution(space) for name, space in study.parameters.items()}
    journal.add(
        moment, 4, study_id=0, datetime_start=None, state=WAITING, value=None,
        values=None, distributions={name: distribution_to_json(space) for name, space in spaces.items()},
        params={name: spaces[name].to_internal_repr(value) for name, value in params.items()}, user_attrs={},
        system_attrs={"failed_trial": number, "retry_history": [number]}, intermediate_values={"1": 0.1},
    )  # fmt: skip


def _draw(random: np.random.Generator, space: dict[str, Any]) -> Any:
    if space["type"] == "categorical":
        return int(random.choice(space["values"]))
    low, high = space["min"], space["max"]
    if space["type"] == "loguniform":
        return float(math.exp(random.uniform(math.log(low), math.log(high))))
    return float(random.uniform(low, high))


def _peak(params: dict[str, Any]) -> float:
    loss = 0.02 * math.log10(params["max_lr"] / 1.2e-2) ** 2 * 8 + 3 * (params["momentum"] - 0.93) ** 2
    return 0.577 - loss - 0.004 * (params["cls"] - 0.8) ** 2 - 0.01 * abs(math.log10(params["weight_decay"] / 6e-4))


if __name__ == "__main__":
    print(make_night(Path(sys.argv[1]), workers=int(sys.argv[2]) if len(sys.argv) > 2 else 8).folder)
