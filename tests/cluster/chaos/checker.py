"""Proves from the journal that a study lost nothing, and holds it against the diary of its objective.

The journal is read twice: by stock Optuna and by the rules of ``ledger``. Both must agree on every trial.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tests.cluster.chaos.chaos_objective import STEPS, ending, expected
from tests.cluster.chaos.ledger import ENDED, Ledger

_OPTUNA_STATES = [TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.WAITING]


@dataclass
class Verdict:
    """``wrong``: what was found against each claim, empty lists where it holds; ``figures``: how much was looked at."""

    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    figures: dict[str, float] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)  # from the last line that the interrupted run wrote
    after_end_s: list[float] = field(default_factory=list)  # from the end of its process, where that was known to end

    @property
    def holds(self) -> bool:
        return not any(self.wrong.values())


CLAIMS = (
    "stock Optuna reads the same",
    "budget exact",
    "finished trials lost",
    "reports lost",
    "numbers run twice",
    "trials with two owners",
    "curves broken",
    "trials recovered more than once",
    "wrong endings",
    "runs that nobody went on with",
    "checkpoints not used",
    "faults not accounted for",
)


def check(
    journal: Path, diary_folder: Path, *, budget: int, fixed: dict[str, float], epochs: int,
    ends: Iterable[tuple[int, float]] = (),
) -> Verdict:  # fmt: skip
    """Check one study after its end. ``fixed``: the parameters that the study did not search; ``ends``: of workers."""
    verdict = Verdict(wrong={claim: [] for claim in CLAIMS})
    ledger = Ledger(journal)
    diary = read_diary(diary_folder)
    compare_with_optuna(ledger, stock_trials(journal), verdict)
    check_budget(ledger, budget, verdict)
    check_owners(ledger, verdict)
    check_curves(ledger, fixed, epochs, verdict)
    check_acknowledged(ledger, diary, verdict)
    check_runs(ledger, diary, ends, verdict)
    count = [trial.state for trial in ledger.trials]
    verdict.figures |= {
        "budget": budget,
        "completed": count.count(1),
        "pruned": count.count(2),
        "failed by themselves": sum(t.state == 3 and not ledger.successors(t.number) for t in ledger.trials),
        "recovered": sum(len(ledger.successors(t.number)) > 0 for t in ledger.trials),
        "claims": ledger.claims,
        "late records refused": ledger.refused,
        "finishes acknowledged": sum(line["what"] == "finished" for line in diary),
        "reports acknowledged": sum(line["what"] == "reported" for line in diary),
    }
    return verdict


def stock_trials(journal: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return storage.get_all_trials(storage.get_all_studies()[0]._study_id)


def read_diary(folder: Path) -> list[dict[str, Any]]:
    """All lines in the order of their time, which is of one clock for the whole machine."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["t"])


def compare_with_optuna(ledger: Ledger, trials: list[FrozenTrial], verdict: Verdict) -> None:
    wrong = verdict.wrong["stock Optuna reads the same"]
    if [trial.number for trial in trials] != list(range(len(ledger.trials))):
        wrong.append(f"{len(trials)} trials instead of {len(ledger.trials)}")
    for ours, theirs in zip(ledger.trials, trials, strict=False):
        values = theirs.values[0] if theirs.values else None
        mine = (_OPTUNA_STATES[ours.state], ours.params, ours.reports, ours.value)
        if mine != (theirs.state, theirs.params, theirs.intermediate_values, values):
            wrong.append(f"trial {ours.number}: {mine}, Optuna has {theirs}")


def check_budget(ledger: Ledger, budget: int, verdict: Verdict) -> None:
    """Each trial that was asked for ends once: it, or the last one of those that continue it."""
    wrong = verdict.wrong["budget exact"]
    if ledger.asked != budget:
        wrong.append(f"{ledger.asked} trials were made, {budget} were asked for")
    for trial in ledger.trials:
        after = ledger.successors(trial.number)
        if len(after) > 1:
            verdict.wrong["trials recovered more than once"].append(f"trial {trial.number}")
        if trial.state not in ENDED:
            wrong.append(f"trial {trial.number} has not ended")
        if after and trial.state != 3:
            wrong.append(f"trial {trial.number} ended, and again as trial {after[0].number}")


def check_owners(ledger: Ledger, verdict: Verdict) -> None:
    verdict.wrong["trials with two owners"] += ledger.violations


def check_curves(ledger: Ledger, fixed: dict[str, float], epochs: int, verdict: Verdict) -> None:
    """Every report and value is that of an undisturbed run: no step was lost, doubled or done at another rate."""
    for trial in ledger.trials:
        if not trial.params:
            continue
        _, values = expected({**fixed, **trial.params}, epochs)
        for step, value in trial.reports.items():
            if value != values[step - 1]:
                verdict.wrong["curves broken"].append(f"trial {trial.number}, epoch {step}: {value}")
        if trial.state == 1 and (trial.value != values[-1] or set(trial.reports) != set(range(1, epochs + 1))):
            verdict.wrong["curves broken"].append(f"trial {trial.number}: ended with {trial.value}")
        if trial.state in ENDED and not ledger.successors(trial.number):
            found = {1: "complete", 2: "pruned", 3: "failed"}[trial.state]
            if found != ending(trial.params["x"]):
                why = trial.failure["message"] if trial.failure else ""
                verdict.wrong["wrong endings"].append(f"trial {trial.number} is {found}: {why}")


def check_acknowledged(ledger: Ledger, diary: list[dict[str, Any]], verdict: Verdict) -> None:
    """What the journal told a worker is in the file."""
    for line in diary:
        trial = ledger.trials[line["number"]]
        if line["what"] == "finished":
            state = _OPTUNA_STATES[trial.state].name
            if state != line["state"] or (line["value"] is not None and trial.value != line["value"]):
                verdict.wrong["finished trials lost"].append(f"trial {trial.number}: {line}, the journal has {state}")
        elif line["what"] == "reported":
            late = (trial.number, line["epoch"]) in ledger.late_reports
            if not late and trial.reports.get(line["epoch"]) != line["value"]:
                verdict.wrong["reports lost"].append(str(line))


def check_runs(
    ledger: Ledger, diary: list[dict[str, Any]], ends: Iterable[tuple[int, float]], verdict: Verdict
) -> None:
    """One process at a time works under a trial's number; an interrupted run is gone on with."""
    runs: dict[int, list[list[dict[str, Any]]]] = defaultdict(list)
    open_runs: dict[int, list[dict[str, Any]]] = {}
    for line in diary:
        if line["what"] == "begin":
            open_runs[line["pid"]] = []
            runs[line["number"]].append(open_runs[line["pid"]])
        open_runs[line["pid"]].append(line)
    for number, its_runs in runs.items():
        for first, second in itertools.pairwise(its_runs):
            if first[-1]["t"] > second[0]["t"]:
                verdict.wrong["numbers run twice"].append(f"trial {number}: {first[-1]} after {second[0]}")
    ends_of = defaultdict(list)
    for pid, t in ends:
        ends_of[pid].append(t)
    for its_runs in runs.values():
        for run in its_runs:
            _check_run(ledger, runs, run, ends_of[run[0]["pid"]], verdict)
    if verdict.recoveries_s:
        verdict.figures |= {
            "runs interrupted": len(verdict.recoveries_s),
            "recovery, median s": round(statistics.median(verdict.recoveries_s), 1),
            "recovery, longest s": round(max(verdict.recoveries_s), 1),
        }
    if verdict.after_end_s:
        verdict.figures |= {
            "after the worker's end, median s": round(statistics.median(verdict.after_end_s), 1),
            "after the worker's end, longest s": round(max(verdict.after_end_s), 1),
        }


def _check_run(
    ledger: Ledger, runs: dict[int, Any], run: list[dict[str, Any]], ends: list[float], verdict: Verdict
) -> None:
    if run[-1]["what"] == "finished":
        return
    last, number = run[-1]["t"], run[0]["number"]
    begun = [each[0] for n in lineage(ledger, number) for each in runs.get(n, []) if each[0]["t"] > last]
    if begun:
        following = min(begun, key=lambda line: line["t"])
        verdict.recoveries_s.append(following["t"] - last)
        # it may have stood still for long, or waited for the journal, before it ended
        ended = min((t for t in ends if t > last), default=math.inf)
        if ended < following["t"]:
            verdict.after_end_s.append(following["t"] - ended)
        reported = [line["epoch"] for line in run if line["what"] == "reported"]
        # what was reported under a number that somebody else went on with already is not part of what goes on
        saved = STEPS * max((e for e in reported if (number, e) not in ledger.late_reports), default=0)
        if following["step"] < max(saved, run[0]["step"]):
            verdict.wrong["checkpoints not used"].append(f"trial {number}: {saved} steps were saved, then {following}")
    elif not any(ledger.trials[n].state in ENDED and not ledger.successors(n) for n in lineage(ledger, number)):
        verdict.wrong["runs that nobody went on with"].append(f"trial {number}")


def lineage(ledger: Ledger, number: int) -> list[int]:
    """The trial and all that continue it."""
    numbers = [number]
    while after := ledger.successors(numbers[-1]):
        numbers.append(after[0].number)
    return numbers
