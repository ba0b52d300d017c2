"""Entry: the results of a study: a complete configuration with the best parameters, all trials, a summary."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.text import Text

from hpcjobs.budget import FAILURE, HISTORY, RESULT, Counts, count
from hpcjobs.config import Choice, StudyFile
from hpcjobs.errors import UserError, run_entry
from hpcjobs.failures import writable
from hpcjobs.owners import OWNER
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.progress import best_trial, ordered_by_value
from hpcjobs.study import OpenStudy, open_study
from hpcjobs.text import counted
from hpcjobs.trial_files import read_curves
from hpcjobs.trial_table import TrialTable

TRIALS_SHOWN = 15

_EXAMPLES = """\
example:
  python -m hpcjobs.collect runs/experiment1
  python -m autospeed_model.train --data packed --config runs/experiment1/results/best_params.yaml
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.collect",
        description="Write FOLDER/results: best_params.yaml, trials.csv, curves.csv and summary.json,\n"
        "also while the study runs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    paths = StudyPaths(parser.parse_args(arguments).folder)
    study = open_study(paths)
    console = Console(highlight=False)
    show(study, console)
    place = paths.results if paths.results.exists() else paths.folder
    if not os.access(place, os.W_OK):
        raise UserError(
            f"{place}: you cannot write there, so this is all; allowed: a study of your own, or a copy of it"
        )
    best = collect(study)
    if best is None:
        counts = count(study)
        console.print(
            f"No trial has completed{' yet' if counts.left else ''} ({counts.running} running, "
            f"{counts.waiting} waiting, {counts.failed} failed): there are no best parameters."
        )
        return 1
    lines = (
        f"\nbest parameters  {paths.best_params}\nall trials       {paths.trials_csv}\nsummary          {paths.summary}"
    )
    console.print(lines, soft_wrap=True)
    if study.file.study.objective.startswith("autospeed_model."):
        data = f" --data {shlex.quote(str(study.file.run.data))}" if study.file.run.data else ""
        command = f"python -m autospeed_model.train{data} --config {shlex.quote(str(paths.best_params))}"
        console.print(f"train with them  {command}", soft_wrap=True)
    return 0


def collect(study: OpenStudy) -> FrozenTrial | None:
    """Write the result files; returns the best trial, or None before one has completed."""
    best = best_trial(study)
    if best is not None:
        # quoted so that readers of YAML 1.1 and of 1.2 find the same values
        text = yaml.safe_dump(configuration(study.file, best), sort_keys=False, allow_unicode=True)
        write_atomically(study.paths.best_params, text)
    write_atomically(study.paths.trials_csv, trials_csv(study))
    write_atomically(study.paths.curves_csv, _csv(read_curves(study), ["trial", "step", "value"]))
    write_atomically(study.paths.summary, json.dumps(summary(study, best), indent=2, default=str) + "\n")
    return best


def configuration(file: StudyFile, trial: FrozenTrial) -> dict[str, Choice]:
    """The complete configuration of a trial: what the objective declares, what the study fixes, what was found."""
    changed = (trial.user_attrs.get(RESULT) or {}).get("changed", {})
    values: dict[str, Choice] = {**file.defaults, **file.study.fixed, **changed, **trial.params}
    if "epochs" in file.defaults:
        values["epochs"] = file.study.epochs
    return values


def _row(trial: FrozenTrial) -> dict[str, Any]:
    result = trial.user_attrs.get(RESULT) or {}
    failure = trial.user_attrs.get(FAILURE) or {}
    owner = trial.user_attrs.get(OWNER) or {}
    history = trial.system_attrs.get(HISTORY) or []
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.values[0] if trial.values else None,
        **{f"param_{name}": value for name, value in trial.params.items()},
        **{f"changed_{name}": value for name, value in result.get("changed", {}).items()},
        **{f"figure_{name}": value for name, value in result.get("figures", {}).items()},
        "epochs": len(trial.intermediate_values),
        "started": trial.datetime_start.isoformat(timespec="seconds") if trial.datetime_start else None,
        "ended": trial.datetime_complete.isoformat(timespec="seconds") if trial.datetime_complete else None,
        "duration_s": round(trial.duration.total_seconds(), 1) if trial.duration else None,
        "attempts": result.get("attempts"),
        "continues": history[-1] if history else None,
        "failure": failure.get("class"),
        "message": failure.get("message"),
        "node": owner.get("node"),
        "element": owner.get("element"),
        "worker": owner.get("worker"),
    }


def trials_csv(study: OpenStudy) -> str:
    """All trials as CSV, one line each; parameters and figures have columns of their own."""
    rows = [_row(trial) for trial in study.trials()]
    front = ["number", "state", "value"]
    names = dict.fromkeys(name for row in rows for name in row if name not in front)
    special = sorted((name for name in names if name.startswith(("param_", "figure_", "changed_"))), reverse=True)
    return _csv(rows, [*front, *special])


def _csv(rows: list[dict[str, Any]], front: list[str]) -> str:
    """Rows as text, the columns ``front`` first."""
    columns = dict.fromkeys([*front, *(name for row in rows for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return writable(text.getvalue())


def summary(study: OpenStudy, best: FrozenTrial | None) -> dict[str, Any]:
    """What a program wants to know of a study's outcome."""
    counts: Counts = count(study)
    found = None
    if best is not None:
        figures = (best.user_attrs.get(RESULT) or {}).get("figures", {})
        found = {"number": best.number, "value": best.values[0], "params": best.params, "figures": figures}
    return {
        "study": study.file.name,
        "objective": study.file.study.objective,
        "direction": study.file.study.direction,
        "value_name": study.file.value_name,
        "epochs": study.file.study.epochs,
        "budget": counts.budget,
        "finished": counts.left == 0,
        "counts": asdict(counts),
        "best": found,
    }


def show(study: OpenStudy, console: Console) -> None:
    """The best completed trials as a table, pruned ones only where none has completed, then what failed."""
    everything = [trial for trial in study.trials() if trial.values]
    completed = [trial for trial in everything if trial.state == TrialState.COMPLETE]
    trials = ordered_by_value(completed or everything, study.file.study.direction)
    counts = count(study)
    ended = f"{counts.finished} of {counts.budget} trials have ended"
    title = f"{study.file.name}: {ended}, {counts.pruned} of them pruned, {counts.failed} failed"
    if trials:
        names = list(study.file.study.parameters)
        console.print(
            TrialTable(title, trials[:TRIALS_SHOWN], study.file.value_name, names, study.paths.trials_csv.name)
        )
    if len(trials) > TRIALS_SHOWN:
        console.print(
            f"and {counted(len(trials) - TRIALS_SHOWN, 'more trial')} in {study.paths.trials_csv.name}", style="dim"
        )
    if counts.failures:
        lines = _failures(study, counts)
        console.print(
            Text("\n".join([*lines, f"tracebacks are in {study.paths.logs}"]), style="yellow"), soft_wrap=True
        )


def _failures(study: OpenStudy, counts: Counts) -> list[str]:
    """One line for each class of failure, with what the last trial of it said: a person looks there first."""
    said = {}
    for trial in study.trials():
        failure = trial.user_attrs.get(FAILURE) or {}
        message = str(failure.get("message") or "").partition("\n")[0]
        if message:
            said[failure.get("class")] = f": trial {trial.number}: {message}"
    return [f"{number} x {kind}{said.get(kind, '')}" for kind, number in sorted(counts.failures.items())]


if __name__ == "__main__":
    sys.exit(run_entry(main))
