"""What came of the final trainings: figures of each setting over its seeds, as table, files and pictures."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hpcjobs.budget import RESULT, predecessor
from hpcjobs.errors import UserError
from hpcjobs.final_plan import BEST, DEFAULT, SEED, FinalPlan
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.study import OpenStudy
from hpcjobs.text import counted, number_text

# figures between 0 and 1 that people read in percent
PERCENT = {"precision": "P %", "recall": "R %", "map50": "mAP50 %", "map": "mAP %"}
NOT_QUALITY = {"images_per_s"}
SAMPLES = "samples.png"


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds of a setting; ``deviation`` is the sample's, 0 for one seed."""

    mean: float
    deviation: float
    values: list[float]

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, values)


@dataclass(frozen=True)
class FinalResults:
    """``figures[setting][figure]`` over the seeds that completed; ``failed`` trainings are missing there."""

    figures: dict[str, dict[str, Spread]]
    failed: int

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for own in self.figures.values() for name in own if name not in NOT_QUALITY))

    def gain(self, name: str) -> float | None:
        """How much better the optimised parameters are in the mean."""
        if any(name not in self.figures.get(setting, {}) for setting in (BEST, DEFAULT)):
            return None
        return self.figures[BEST][name].mean - self.figures[DEFAULT][name].mean

    def beyond_spread(self, name: str) -> bool:
        """Whether the two settings' means lie further apart than both deviations together."""
        gain = self.gain(name)
        both = sum(self.figures[setting][name].deviation for setting in (BEST, DEFAULT)) if gain is not None else 0.0
        return gain is not None and abs(gain) > both

    @classmethod
    def read(cls, path: Path) -> FinalResults:
        """What :meth:`as_dict` was written to.

        Raises:
            UserError: the file is damaged.
        """
        try:
            found = json.loads(path.read_bytes())
            figures = {
                setting: {name: Spread(**spread) for name, spread in own.items()}
                for setting, own in found["figures"].items()
            }
            return cls(figures, found["failed"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path}: found no results of final trainings ({type(error).__name__}: {error}); allowed: what "
                "hpcjobs.final writes; remove the file, and call python -m hpcjobs.final again: it trains nothing anew"
            ) from None

    def as_dict(self) -> dict[str, Any]:
        gains = {name: self.gain(name) for name in self.names}
        return {
            "figures": {s: {name: asdict(spread) for name, spread in own.items()} for s, own in self.figures.items()},
            "gains": {name: gain for name, gain in gains.items() if gain is not None},
            "failed": self.failed,
        }


def completed(study: OpenStudy) -> list[FrozenTrial]:
    return study.trials((TrialState.COMPLETE,))


def _reported(trial: FrozenTrial) -> dict[str, float]:
    reported: dict[str, float] = (trial.user_attrs.get(RESULT) or {}).get("figures", {})
    return reported


def results_of(study: OpenStudy, plan: FinalPlan) -> FinalResults:
    """The figures of all trainings that completed. The objective's value is one of them, the first, unless a reported
    figure of quality is the same number in each training."""
    trainings = [(setting, trial) for trial in completed(study) if (setting := plan.setting_of(trial.params))]
    names = {name for _, trial in trainings for name in _reported(trial)} - NOT_QUALITY
    held = any(all(_reported(trial).get(name) == trial.values[0] for _, trial in trainings) for name in names)
    value_name = "value" if study.file.value_name in NOT_QUALITY else study.file.value_name
    collected: dict[str, dict[str, list[float]]] = {setting: {} for setting in plan.settings}
    for setting, trial in trainings:
        reported = _reported(trial)
        if not held:
            others = {name: number for name, number in reported.items() if name != value_name}
            reported = {value_name: trial.values[0], **others}
        for name, number in reported.items():
            collected[setting].setdefault(name, []).append(number)
    figures = {
        setting: {name: Spread.of(values) for name, values in own.items()} for setting, own in collected.items() if own
    }
    continued = {predecessor(trial) for trial in study.trials()}
    failed = sum(trial.number not in continued for trial in study.trials((TrialState.FAIL,)))
    return FinalResults(figures, failed)


def title_of(results: FinalResults) -> str:
    seeds = [max(len(spread.values) for spread in own.values()) for own in results.figures.values()]
    number = counted(max(seeds), "seed") if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)} seeds"
    return f"tested once on data that no trial has seen; {number} each"


def rows_of(results: FinalResults) -> list[list[str]]:
    """Mean and deviation of every figure over the seeds, with a header; the last row is the gain, if both settings have
    figures. A gain in brackets is smaller than the deviations together."""
    names = results.names
    rows = [["parameters", *(PERCENT.get(name, name) for name in names)]]
    for setting in (DEFAULT, BEST):
        own = results.figures.get(setting)
        if own:
            rows.append([setting, *(_cell(name, own.get(name)) for name in names)])
    if any(results.gain(name) is not None for name in names):
        rows.append(["gain", *(_gain_cell(results, name) for name in names)])
    return rows


def table_of(results: FinalResults) -> Table:
    """The rows for a terminal."""
    header, *rows = rows_of(results)
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right", no_wrap=True)
    for row in rows:
        if row[0] == "gain":
            table.add_section()
        table.add_row(*row)
    return table


def _gain_cell(results: FinalResults, name: str) -> str:
    gain = results.gain(name)
    if gain is None:
        return ""
    text = f"{100 * gain:+.1f}" if name in PERCENT else f"{gain:+.4g}"
    return text if results.beyond_spread(name) else f"({text})"


def _cell(name: str, spread: Spread | None) -> str:
    if spread is None:
        return ""
    if name in PERCENT:
        return f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}"
    return f"{number_text(spread.mean)} ± {number_text(spread.deviation)}"


def write_results(study: OpenStudy, plan: FinalPlan, results: FinalResults, where: StudyPaths) -> None:
    """Write ``final.json`` and the pictures of samples into the searched study's results."""
    write_atomically(where.final, json.dumps(results.as_dict(), indent=2) + "\n")
    for setting in plan.settings:
        own = [trial for trial in completed(study) if plan.setting_of(trial.params) == setting]
        for trial in sorted(own, key=lambda trial: trial.params[SEED])[:1]:
            picture = study.paths.trial(trial.number) / SAMPLES
            if picture.exists():
                where.figures.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(picture, where.figures / f"samples-{setting}.png")
