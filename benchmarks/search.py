"""How many epochs and hours two ways of searching need to the same best value, by replaying learning curves.

The published way: Optuna's TPE as it was then, nothing pruned, 100 trials of 5 epochs. Ours: the defaults first, TPE
that learns from running trials, asynchronous halving (:data:`OURS`). A replay asks the samplers and pruners of a study,
with so many simulated workers, and answers with curves instead of trainings. Both ways see the same curves. The target
of each seed is what the published way had found at its end; what counts for ours are all epochs that its workers had
trained, those of pruned and running trials too, when a trial came to its end with that value.

``--curves`` names what benchmarks/record_curves.py wrote: a trial gets the curve of the recorded training whose
parameters are nearest to its own. Without it curves are made up (saturating, noisy, with a cliff where training
diverges; for each seed others): that shows how the two ways differ, and is no statement about AutoSpeed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import optuna
import yaml
from optuna.trial import TrialState
from rich.console import Console
from rich.table import Table

from benchmarks.record_curves import read_rows, read_study
from hpcjobs.budget import is_baseline
from hpcjobs.config import StudyConfig
from hpcjobs.errors import UserError, run_entry
from hpcjobs.sampling import make_pruner, make_sampler, suggest

EPOCHS = 5
BUDGET = 500  # epochs: the published study's 100 trials of 5
WORKERS = (8, 63, 256)
DEFAULTS = {"min_lr": 1e-4, "max_lr": 1e-2, "momentum": 0.937, "weight_decay": 5e-4, "box": 7.5, "cls": 0.5, "dfl": 1.5}
PUBLISHED = {"trials": 100, "pruner": {"name": "none"}}
OURS = {
    "trials": 100,
    "pruner": {"name": "asha", "options": {"reduction_factor": 2, "first_reduction_factor": 8}},
}
# Two trainings never report the same to the last digit, and halving lets ties pass: replayed reports before the last
# one differ by at most this.
NO_TIES = 1e-7
Curve = Callable[[dict[str, Any], np.random.Generator], tuple[list[float], float]]


class Recorded:
    """Curves of real trainings; a question is answered with the one whose parameters are nearest."""

    def __init__(self, path: Path, space: dict[str, dict[str, Any]]) -> None:
        rows = read_rows(path)
        passes = max((len(row["map"]) for row in rows), default=0)
        if passes < EPOCHS:
            raise UserError(
                f"{path}: curves of {passes} passes; allowed: at least {EPOCHS}, one for each epoch replayed"
            )
        self._space = space
        self._rows = [row["map"] for row in rows]
        self._passes_per_epoch = passes // EPOCHS
        # the parameters do not change how long a pass takes; what the machine did beside it would
        pass_s = statistics.median(row["pass_s"] for row in rows if row["map"])
        self._epoch_s = self._passes_per_epoch * pass_s
        self._points = np.array([unit({**DEFAULTS, **row["params"]}, space) for row in rows])
        self.what = f"{len(rows)} recorded trainings, an epoch being {self._passes_per_epoch} passes"

    def __call__(self, params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        """The value after each epoch, short where the training diverged, and the seconds of an epoch."""
        nearest = int(np.argmin(((self._points - unit(params, self._space)) ** 2).sum(axis=1)))
        values = self._rows[nearest][self._passes_per_epoch - 1 :: self._passes_per_epoch][:EPOCHS]
        early = np.array(values[: EPOCHS - 1]) + NO_TIES * rng.random(len(values[: EPOCHS - 1]))
        return [*early.tolist(), *values[EPOCHS - 1 :]], self._epoch_s


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
    """Curves that saturate. Where the best parameters lie, how much each one matters and how it changes the speed of
    learning follow from the seed; every trial and every epoch has noise."""

    def __init__(self, space: dict[str, dict[str, Any]], seed: int) -> None:
        rng = np.random.default_rng(1000 + seed)
        self._space = space
        self._weights = 7.2 * rng.dirichlet(np.full(len(space), 0.5))
        self._best = rng.uniform(0.2, 0.8, len(space))
        self._speeds = 0.35 * rng.normal(size=len(space))

    def __call__(self, params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        at = dict(zip(self._space, unit(params, self._space), strict=True))
        if at["max_lr"] + 0.6 * at["momentum"] > 1.45:
            return [], 20.0
        place = np.array(list(at.values()))
        epochs = np.arange(1, EPOCHS + 1)
        speed = 0.6 * math.exp(float(self._speeds @ (place - 0.5)))
        rise = (1 - np.exp(-speed * epochs)) / (1 - math.exp(-speed * EPOCHS)) * (1 - np.exp(-0.9 * epochs))
        height = 0.6 * math.exp(-float((self._weights * (place - self._best) ** 2).sum()))
        return list(height * rise + 0.01 * rng.normal() + 0.008 * rng.normal(size=EPOCHS)), 20.0


@dataclass(frozen=True)
class Moment:
    """A trial came to its end with ``value``: after so many epochs of all trials, and so many seconds."""

    epochs: float
    seconds: float
    value: float


@dataclass(frozen=True)
class Replay:
    """What a study found, and what it had spent when its last trial ended."""

    found: list[Moment]
    epochs: int
    seconds: float
    duplicates: int

    @property
    def best(self) -> float:
        return max((moment.value for moment in self.found), default=-math.inf)

    def reached(self, target: float) -> Moment:
        """When the first trial ended with the target; never, if none did."""
        return next((m for m in self.found if m.value >= target), Moment(math.inf, math.inf, target))


@dataclass
class Running:
    """A trial that a simulated worker is at."""

    trial: optuna.Trial
    params: dict[str, Any]
    values: list[float]
    epoch_s: float
    epoch: int = 0

    def goes_on(self, study: optuna.Study) -> bool:
        """Report the epoch that has just ended; ends the trial if it was the last, or it diverged or is pruned."""
        if self.epoch > len(self.values):
            study.tell(self.trial, state=TrialState.FAIL)
            return False
        self.trial.report(self.values[self.epoch - 1], self.epoch)
        if self.epoch == EPOCHS:
            study.tell(self.trial, self.values[-1])
            return False
        if not is_baseline(self.trial._cached_frozen_trial) and self.trial.should_prune():
            study.tell(self.trial, state=TrialState.PRUNED)
            return False
        return True


def published_sampler(config: StudyConfig, number: int) -> optuna.samplers.BaseSampler:
    """TPE with the defaults of Optuna 4: each parameter for itself, no constant liar."""
    seed = int(np.random.SeedSequence([config.seed or 0, number]).generate_state(1)[0])
    return optuna.samplers.TPESampler(seed=seed, multivariate=False, constant_liar=False)


def replay(
    way: dict[str, Any],
    curve: Curve,
    space: dict[str, Any],
    workers: int,
    seed: int,
    sampler: Callable[[StudyConfig, int], optuna.samplers.BaseSampler] = make_sampler,
    starts: Sequence[dict[str, float]] = (),
) -> Replay:
    """One study with simulated workers, from its first trial to the end of its last; the first take ``starts``."""
    config = StudyConfig.model_validate({**way, "parameters": space, "epochs": EPOCHS, "seed": seed})
    rng = np.random.default_rng(seed)
    study = optuna.create_study(direction="maximize", pruner=make_pruner(config))
    for values in starts:
        study.enqueue_trial(values)
    found: list[Moment] = []
    begun = epochs = duplicates = 0
    now = 0.0
    # a little apart at the start: real workers never begin at the same moment
    events: list[tuple[float, int, Running | None]] = [(float(rng.random()), worker, None) for worker in range(workers)]
    heapq.heapify(events)
    while events:
        now, worker, running = heapq.heappop(events)
        if running is not None:
            epochs += 1
            running.epoch += 1
            if not running.goes_on(study):
                if running.epoch == EPOCHS == len(running.values):
                    found.append(Moment(epochs, now, running.values[-1]))
                running = None
        if running is None:
            if begun == config.trials:
                continue
            study.sampler = sampler(config, begun)
            begun += 1
            trial = study.ask()
            params = suggest(trial, config)
            duplicates += any(other is not None and other.params == params for _, _, other in events)
            running = Running(trial, params, *curve(params, rng))
        heapq.heappush(events, (now + running.epoch_s * (0.9 + 0.2 * float(rng.random())), worker, running))
    return Replay(found, epochs, now, duplicates)


def foretold(curve: Curve) -> Curve:
    """Trials that have their last value from the first epoch on, as if an oracle told pruner and sampler."""

    def constant(params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        values, epoch_s = curve(params, rng)
        return (values[-1:] * EPOCHS if len(values) == EPOCHS else values), epoch_s

    return constant


def both_ways(
    curve: Curve, space: dict[str, Any], workers: int, seed: int, oracle: bool = False, way: dict[str, Any] = OURS
) -> tuple[Replay, Replay]:
    """The published way and ours, for which an ``oracle`` may tell how trials end."""
    starts = [{name: DEFAULTS[name] for name in space}]
    return (
        replay(PUBLISHED, curve, space, workers, seed, published_sampler),
        replay(way, foretold(curve) if oracle else curve, space, workers, seed, starts=starts),
    )


def compare(
    curves: Callable[[int], Curve],
    space: dict[str, Any],
    numbers: list[int],
    seeds: int,
    console: Console,
    what: str,
    oracle: bool = False,
    way: dict[str, Any] = OURS,
) -> dict[str, Any]:
    """Replay both ways for every number of workers and seed; print and return the medians, and the value that ours
    found as a share of theirs, in the mean."""
    table = Table(title=f"{what}; medians of {seeds} seeds")
    for name in ("workers", "epochs: published", "ours", "fewer", "hours: published", "ours", "fewer", "reached by"):
        table.add_column(name, justify="right")
    for name in ("all of ours: epochs", "value"):
        table.add_column(name, justify="right")
    results: dict[str, Any] = {}
    for workers in numbers:
        pairs = [both_ways(curves(seed), space, workers, seed, oracle, way) for seed in range(seeds)]
        moments = [ours.reached(theirs.best) for theirs, ours in pairs]
        hours = statistics.median(theirs.seconds for theirs, _ in pairs) / 3600
        our_epochs = statistics.median(moment.epochs for moment in moments)
        our_hours = statistics.median(moment.seconds for moment in moments) / 3600
        our_total = statistics.median(ours.epochs for _, ours in pairs)
        shares = [ours.best / theirs.best for theirs, ours in pairs if ours.found and theirs.found and theirs.best]
        share = statistics.mean(shares) if shares else None
        hits = sum(moment.epochs < math.inf for moment in moments)
        results[str(workers)] = {
            "published_epochs": BUDGET, "published_hours": hours,
            "our_epochs": our_epochs if our_epochs < math.inf else None,
            "our_hours": our_hours if our_hours < math.inf else None,
            "reached": hits, "seeds": seeds, "our_total_epochs": our_total, "value_share": share,
            "duplicates": sum(ours.duplicates for _, ours in pairs),
        }  # fmt: skip
        table.add_row(
            str(workers), str(BUDGET), *_beside(BUDGET, our_epochs, "g"), f"{hours:.3f}",
            *_beside(hours, our_hours, ".3f"), f"{hits} of {seeds}", f"{our_total:g}",
            "-" if share is None else f"{share:.1%}",
        )  # fmt: skip
    console.print(table)
    console.print(f"duplicates among running trials of ours: {sum(row['duplicates'] for row in results.values())}")
    return results


def _beside(theirs: float, ours: float, number: str) -> tuple[str, str]:
    """A median of ours, and how many times less it is; a median of infinity: most seeds never reached the target."""
    return (f"{ours:{number}}", f"{theirs / ours:.1f}x") if ours < math.inf else ("-", "-")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--curves", type=Path, help="JSON lines of benchmarks/record_curves.py (default: made-up curves)"
    )
    parser.add_argument("--study", type=Path, default=Path("configs/studies/experiment1.yaml"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="default: 8 63 256")
    parser.add_argument(
        "--oracle", action="store_true", help="ours knows after a trial's first epoch how it ends: what bounds it"
    )
    parser.add_argument(
        "--pruner", type=yaml.safe_load, metavar="YAML", help="ours, as in a study file, instead of asha"
    )
    parser.add_argument("--json", type=Path, help="also write the medians here")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    space, _ = read_study(given.study)
    console = Console(width=140)
    curves: Callable[[int], Curve]
    if given.curves:
        recorded = Recorded(given.curves, space)
        curves, what = lambda seed: recorded, recorded.what
    else:
        curves, what = lambda seed: MadeUp(space, seed), "made-up curves"
    what += ", an oracle for ours" if given.oracle else ""
    way = {**OURS, "pruner": given.pruner} if given.pruner else OURS
    results = compare(curves, space, given.workers, given.seeds, console, what, given.oracle, way)
    if given.json:
        given.json.write_text(json.dumps({"curves": str(given.curves or "made up"), **results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
