"""Entry: a study as one HTML page with its figures, also while it runs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from hpcjobs.errors import UserError, run_entry
from hpcjobs.final_plan import declared_final
from hpcjobs.final_results import FinalResults
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.report_data import ReportData
from hpcjobs.report_style import Painter, require_matplotlib, style
from hpcjobs.study import OpenStudy, open_study

_EXAMPLES = """\
example:
  python -m hpcjobs.report runs/experiment1
  then open runs/experiment1/results/report.html in a browser; the figures lie beside it in results/figures
"""


# pictures that hpcjobs.final leaves
_OF_FINAL = (
    (
        "",
        "final",
        "Trained on all training data, tested once on data that no trial has seen. On the left what the trainings "
        "reported before the test, such as a loss with its sign turned.",
    ),
    (
        "",
        "samples-default",
        "Default parameters: true boxes on the left, detections with their confidence on the right.",
    ),
    ("", "samples-optimised", "Optimised parameters: true boxes on the left, detections on the right."),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.report",
        description="Write FOLDER/results/report.html, one file with everything in it,\nand its figures as PNGs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    options = parser.parse_args(arguments)
    study = open_study(StudyPaths(options.folder))
    require_matplotlib()
    place = study.paths.results if study.paths.results.exists() else study.paths.folder
    if not os.access(place, os.W_OK):
        raise UserError(f"{place}: you cannot write there; allowed: a study of your own, or a copy of it (cp -r)")
    console = Console(highlight=False, soft_wrap=True)
    try:
        with_final = declared_final(study.file) is not None
    except UserError as error:
        with_final = False
        console.print(f"note: whether there is a final training cannot be told: {error}", style="yellow", markup=False)
    write_report(study, with_final=with_final)
    console.print(f"report     {study.paths.report}\nfigures    {study.paths.figures}")
    console.print(f"dashboard  {dashboard_command(study.paths)}")
    return 0


def write_report(study: OpenStudy, *, with_final: bool) -> None:
    """Write the page and its figures. ``with_final``: the objective names a function for a final training.

    Raises:
        UserError: matplotlib is not installed.
    """
    from hpcjobs import report_search, report_work
    from hpcjobs.report_html import page

    require_matplotlib()
    data = ReportData.of(study)
    folder = study.paths.figures
    folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[bool, str, str, Painter, str]] = [
        (bool(data.completed), "History", "history", report_search.history,
         "Each completed trial, and the best so far. Node-hours count from a node's first trial to its last."),
        (bool(data.importances), "Parameters", "importances", report_search.importances,
         "What parts the best tenth of the trials from all of them. It says nothing about parameters not searched."),
        (bool(data.completed), "" if data.importances else "Parameters", "slices", report_search.slices,
         "A dot is a completed trial, the star the best one, a tick at the foot a pruned one. Axes leave out far "
         "outliers."),
        (bool(data.completed), "", "parallel", report_search.parallel,
         "A line is a trial, the brighter the better; parameters with a logarithmic range have a logarithmic axis."),
        (any(len(trial.intermediate_values) > 1 for trial in data.trials), "Curves", "curves", report_search.curves,
         "What trials reported after each epoch. A cross marks where the pruner gave a trial up."),
        (bool(data.spans), "Work", "gantt", report_work.gantt,
         "A lane is a worker, blank where it was idle. Lost: a fault of the machine took the trial, and it went on "
         "elsewhere from its checkpoint; recovering: until that worker was at work again."),
        (any(data.figures(trial).get("images_per_s") for trial in data.trials), "", "speed", report_work.speed,
         "Images trained on in a second. Over time every trial counts with its own rate while it was at work."),
        (bool(data.counts.failures), "Failures", "failures", report_work.failures,
         "Out of GPU memory, diverged and objective errors are the trial's own fault; all others are not counted in "
         "the budget."),
    ]  # fmt: skip
    figures = []
    with style():
        for there, heading, name, paint, caption in wanted:
            path = folder / f"{name}.png"
            if there:
                paint(data, path)
                figures.append((heading, path, caption))
            else:
                path.unlink(missing_ok=True)
    of_final = [
        (heading, folder / f"{name}.png", caption)
        for heading, name, caption in _OF_FINAL
        if (folder / f"{name}.png").exists()
    ]
    final = FinalResults.read(study.paths.final) if study.paths.final.exists() else None
    write_atomically(study.paths.report, page(data, figures, final, of_final, _commands(study, with_final)))


def dashboard_command(paths: StudyPaths) -> str:
    """The command that shows the study in optuna-dashboard; how to get that where it is missing."""
    missing = importlib.util.find_spec("optuna_dashboard") is None
    return f"{'pip install optuna-dashboard && ' if missing else ''}optuna-dashboard {shlex.quote(str(paths.journal))}"


def _commands(study: OpenStudy, with_final: bool) -> str:
    folder = shlex.quote(str(study.paths.folder))
    lines = [f"python -m hpcjobs.collect {folder}    # the best parameters as a file, all trials as a table"]
    if with_final:
        lines.append(f"python -m hpcjobs.final {folder}    # train with them on all data, test once on new data")
    lines.append(f"python -m hpcjobs.submit --resume {folder} --trials +50    # search on")
    lines.append(f"{dashboard_command(study.paths)}    # look into it with optuna-dashboard")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_entry(main))
