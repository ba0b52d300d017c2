"""How many epochs and hours two ways of searching need to the same best value, by replaying learning curves.

The published way: TPE with its defaults, nothing pruned, 100 trials of 5 epochs. Ours: the defaults first, multivariate
TPE with constant liar, asynchronous halving. A replay asks the samplers and pruners of a study, with so many simulated
workers, and answers with curves instead of trainings: a trial gets the curve of the recorded training whose parameters
are nearest to its own. Both ways see the same curves; the target of each seed is what the published way had found at
its end.

``--curves`` names what benchmarks/record_curves.py wrote. Without it curves are made up (saturating, noisy, with a
cliff where training diverges): that shows how the two ways differ, and is no statement about AutoSpeed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.trial import TrialState
from rich.console import Console
from rich.table import Table

from hpcjobs.config import StudyConfig
from hpcjobs.sampling import make_pruner, make_sampler, suggest

EPOCHS = 5
BUDGET = 500  # epochs: the published study's 100 trials of 5
LONGEST = 3 * BUDGET
WORKERS = (8, 63, 256)
DEFAULTS = {"min_lr": 1e-4, "max_lr": 1e-2, "momentum": 0.937, "weight_decay": 5e-4, "box": 7.5, "cls": 0.5, "dfl": 1.5}
PUBLISHED = {"sampler": {"name": "tpe"}, "pruner": {"name": "none"}}
OURS = {
    "sampler": {"name": "tpe", "options": {"constant_liar": True, "multivariate": True}},
    "pruner": {"name": "asha", "options": {"min_resource": 1, "reduction_factor": 3}},
}
Curve = Callable[[dict[str, Any], np.random.Generator], tuple[list[float], float]]


class Recorded:
    """Curves of real trainings; a question is answered with the one whose parameters are nearest."""

    def __init__(self, path: Path, space: dict[str, dict[str, Any]]) -> None:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self._space = space
        self._rows = [row for row in rows if row["map"]]
        passes = max(len(row["map"]) for row in self._rows)
        self._passes_per_epoch = passes // EPOCHS
        self._points = np.array([self._unit({**DEFAULTS, **row["params"]}) for row in self._rows])
        self.what = f"{len(self._rows)} recorded trainings, an epoch being {self._passes_per_epoch} passes"

    def __call__(self, params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        """The value after each epoch, short where the training diverged, and the seconds of an epoch."""
        row = self._rows[int(np.argmin(((self._points - self._unit(params)) ** 2).sum(axis=1)))]
        values = row["map"][self._passes_per_epoch - 1 :: self._passes_per_epoch][:EPOCHS]
        return values, self._passes_per_epoch * row["pass_s"]

    def _unit(self, params: dict[str, Any]) -> np.ndarray:
        return unit(params, self._space)


def unit(params: dict[str, Any], space: dict[str, dict[str, Any]]) -> np.ndarray:
    """Parameters in the unit cube of their ranges; what lies outside is at the border."""
    place = []
    for name, entry in space.items():
        value, low, high = float(params[name]), float(entry["min"]), float(entry["max"])
        if entry["type"] == "loguniform":
            value, low, high = math.log(value), math.log(low), math.log(high)
        place.append(min(1.0, max(0.0, (value - low) / (high - low))))
    return np.array(place)


class MadeUp:
    """Curves that saturate, whose height and speed depend on the parameters, with noise in every epoch."""

    what = "made-up curves"

    def __init__(self, space: dict[str, dict[str, Any]]) -> None:
        self._space = space

    def __call__(self, params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        at = unit(params, self._space)
        names = list(self._space)
        rate, momentum = at[names.index("max_lr")], at[names.index("momentum")]
        weights = np.array([0.02, 0.35, 0.12, 0.08, 0.04, 0.2, 0.06])[: len(at)]
        centre = np.array([0.6, 0.55, 0.7, 0.6, 0.5, 0.2, 0.5])[: len(at)]
        height = 0.6 - float((weights * (at - centre) ** 2).sum())
        speed = 0.5 + 0.9 * rate
        if rate + 0.6 * momentum > 1.45:
            return [], 20.0
        noise = 0.008 * rng.normal(size=EPOCHS)
        values = [height * (1 - math.exp(-speed * epoch)) + noise[epoch - 1] for epoch in range(1, EPOCHS + 1)]
        return values, 20.0


@dataclass(frozen=True)
class Progress:
    """The best value so far: after so many epochs of all trials together, and so many seconds."""

    epochs: float
    seconds: float
    value: float


@dataclass
class Running:
    """A trial that a simulated worker is at."""

    trial: optuna.Trial
    values: list[float]
    epoch_s: float
    epoch: int = 0

    def goes_on(self, study: optuna.Study, found: list[Progress], epochs: int, now: float) -> bool:
        """Report the epoch that has just ended; ends the trial if it was the last, or it diverged or is pruned."""
        if self.epoch > len(self.values):
            study.tell(self.trial, state=TrialState.FAIL)
            return False
        value = self.values[self.epoch - 1]
        self.trial.report(value, self.epoch)
        if self.epoch == EPOCHS:
            study.tell(self.trial, value)
            found.append(Progress(epochs, now, max(value, found[-1].value) if found else value))
            return False
        if self.trial.should_prune():
            study.tell(self.trial, state=TrialState.PRUNED)
            return False
        return True


def replay(
    way: dict[str, Any], curve: Curve, space: dict[str, Any], workers: int, seed: int, target: float | None = None
) -> list[Progress]:
    """One study with simulated workers. The published way runs its 100 trials; with a ``target`` the study begins with
    the defaults and goes on until a trial reaches it, at most for :data:`LONGEST` epochs."""
    config = StudyConfig.model_validate({**way, "parameters": space, "epochs": EPOCHS, "seed": seed})
    rng = np.random.default_rng(seed)
    study = optuna.create_study(direction="maximize", pruner=make_pruner(config))
    if target is not None:
        study.enqueue_trial(DEFAULTS)
    found: list[Progress] = []
    # a little apart at the start: real workers never begin at the same moment
    events: list[tuple[float, int, Running | None]] = [(float(rng.random()), worker, None) for worker in range(workers)]
    heapq.heapify(events)
    epochs = 0
    while events:
        now, worker, running = heapq.heappop(events)
        if running is not None:
            epochs += 1
            running.epoch += 1
            if not running.goes_on(study, found, epochs, now):
                running = None
        if target is not None and ((found and found[-1].value >= target) or epochs >= LONGEST):
            break
        if running is None:
            if target is None and len(study.trials) >= BUDGET // EPOCHS:
                continue
            study.sampler = make_sampler(config, len(study.trials))
            trial = study.ask()
            running = Running(trial, *curve(suggest(trial, config), rng))
        heapq.heappush(events, (now + running.epoch_s * (0.9 + 0.2 * float(rng.random())), worker, running))
    return found


def reached(progress: list[Progress], target: float) -> Progress:
    """The moment at which the target was reached; never, if it was not."""
    if progress and progress[-1].value >= target:
        return progress[-1]
    return Progress(math.inf, math.inf, target)


def compare(curve: Curve, space: dict[str, Any], numbers: list[int], seeds: int, console: Console) -> dict[str, Any]:
    """Replay both ways for every number of workers and seed; print and return the medians."""
    table = Table(title=f"{getattr(curve, 'what', '')}; medians of {seeds} seeds")
    for name in ("workers", "epochs: published", "ours", "fewer", "hours: published", "ours", "fewer", "reached"):
        table.add_column(name, justify="right")
    results: dict[str, Any] = {}
    for workers in numbers:
        published_s, ours = [], []
        for seed in range(seeds):
            theirs = replay(PUBLISHED, curve, space, workers, seed)
            published_s.append(theirs[-1].seconds)
            ours.append(reached(replay(OURS, curve, space, workers, seed, theirs[-1].value), theirs[-1].value))
        hours = statistics.median(published_s) / 3600
        our_epochs = statistics.median(step.epochs for step in ours)
        our_hours = statistics.median(step.seconds for step in ours) / 3600
        hits = sum(step.epochs < math.inf for step in ours)
        results[str(workers)] = {
            "published_epochs": BUDGET, "published_hours": hours, "our_epochs": our_epochs, "our_hours": our_hours,
            "reached": hits, "seeds": seeds,
        }  # fmt: skip
        table.add_row(
            str(workers), str(BUDGET), f"{our_epochs:g}", f"{BUDGET / our_epochs:.1f}x", f"{hours:.3f}",
            f"{our_hours:.3f}", f"{hours / our_hours:.1f}x", f"{hits} of {seeds}",
        )  # fmt: skip
    console.print(table)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--curves", type=Path, help="JSON lines of benchmarks/record_curves.py (default: made-up curves)"
    )
    parser.add_argument("--study", type=Path, default=Path("configs/studies/experiment1.yaml"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="default: 8 63 256")
    parser.add_argument("--json", type=Path, help="also write the medians here")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    space = yaml.safe_load(given.study.read_text(encoding="utf-8"))
    for entry in space.values():
        entry.update({key: float(entry[key]) for key in ("min", "max")})
    curve: Curve = Recorded(given.curves, space) if given.curves else MadeUp(space)
    results = compare(curve, space, given.workers, given.seeds, Console(width=110))
    if given.json:
        given.json.write_text(json.dumps({"curves": str(given.curves or "made up"), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
