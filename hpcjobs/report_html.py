"""The page of a report: one file with everything in it, for a browser without any network."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hpcjobs.final_results import FinalResults, rows_of
from hpcjobs.progress import ordered_by_value
from hpcjobs.report_data import ReportData
from hpcjobs.text import counted, duration, number_text

TRIALS_LISTED = 20

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #222833; background: #f4f5f7; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 24px 60px; }
h1 { font-size: 25px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 30px 0 10px; }
p.sub { color: #5a6472; margin: 0 0 16px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 10px; }
.card, figure, .table { background: white; border: 1px solid #dfe3e8; border-radius: 8px; }
.card { padding: 10px 14px; } .card b { display: block; font-size: 21px; font-weight: 600; }
.card span { color: #5a6472; font-size: 12.5px; display: block; }
figure { margin: 0 0 12px; padding: 8px 10px 4px; } figure img { width: 100%; height: auto; display: block; }
figcaption { color: #5a6472; font-size: 13px; padding: 4px 6px 6px; }
.table { overflow-x: auto; padding: 4px 10px 8px; margin-bottom: 12px; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid #edf0f3; }
th:first-child, td:first-child { text-align: left; } td.text { text-align: left; white-space: normal; }
th.text { text-align: left; }
pre { background: #222833; color: #f4f5f7; padding: 10px 14px; border-radius: 8px; overflow-x: auto; font-size: 13px; }
.two { display: grid; grid-template-columns: minmax(300px, 1fr) 2fr; gap: 12px; align-items: start; }
"""


Figure = tuple[str, Path, str]


def page(
    data: ReportData, figures: Iterable[Figure], final: FinalResults | None, of_final: Iterable[Figure], commands: str
) -> str:
    """The whole page. A figure is (heading, PNG, caption); with an empty heading it stays under the one before."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(data.file.name)}: report</title><style>{_CSS}</style></head><body><main>",
        f"<h1>{escape(data.file.name)}</h1><p class='sub'>{escape(_subtitle(data))}</p>",
        _cards(data),
        f"<h2>Best parameters</h2>{_best(data)}",
        *map(_figure, figures),
    ]
    if final is not None:
        header, *rows = rows_of(final)
        note = "Mean and deviation over the seeds; a gain in brackets is smaller than both deviations together."
        parts += [f"<h2>Final trainings</h2>{_table(header, rows)}<p class='sub'>{note}</p>", *map(_figure, of_final)]
    if data.completed:
        parts.append(f"<h2>The best trials</h2>{_trials(data)}")
    parts.append(_failures(data))
    parts += [f"<h2>Go on</h2><pre>{escape(commands)}</pre></main></body></html>"]
    return "\n".join(parts) + "\n"


def _figure(figure: Figure) -> str:
    heading, image, caption = figure
    encoded = base64.b64encode(image.read_bytes()).decode()
    return (
        f"{f'<h2>{escape(heading)}</h2>' if heading else ''}"
        f"<figure><img alt='{escape(heading or caption)}' src='data:image/png;base64,{encoded}'>"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _subtitle(data: ReportData) -> str:
    study = data.file.study
    where = f"cluster {data.file.cluster.name}" if data.file.cluster else "one machine"
    left = counted(data.counts.left, "trial")
    state = f"still running: {left} left" if data.nodes_run else f"not finished: {left} left, no node runs"
    if data.counts.left == 0:
        state = "finished"
    return (
        f"{study.objective}, {study.direction}; sampler {study.sampler.name}, pruner {study.pruner.name}; {where}; "
        f"{state}; written {datetime.now():%Y-%m-%d %H:%M}"
    )


def _cards(data: ReportData) -> str:
    counts, nodes = data.counts, {node.node for node in data.nodes}
    epochs = sum(len(trial.intermediate_values) for trial in data.trials)
    best = number_text(data.best.values[0]) if data.best else "none"
    rates = [rate for trial in data.trials if (rate := data.figures(trial).get("images_per_s"))]
    cards = [
        (f"best {data.file.value_name}", best, _best_note(data)),
        ("trials", f"{counts.finished} of {counts.budget}",
         f"{counts.completed} completed, {counts.pruned} pruned, {counts.failed} failed"),
        ("time", duration(data.end - data.start), f"{epochs} of {counts.budget * data.file.study.epochs} epochs"),
        ("node-hours", _hours(data.node_hours), f"on {counted(len(nodes), 'node')}"),
        ("workers at work", f"{data.busy_share:.0%}", f"{_hours(data.busy_hours)} worker-hours in trials"),
        ("went on after a fault", str(counts.recovered), "trials, under a new number"),
    ]  # fmt: skip
    if data.gpu_hours:
        cards.insert(4, ("GPU-hours", _hours(data.gpu_hours), "of whole GPUs, while nodes were held"))
    if rates:
        mean = sum(rates) / len(rates)
        cards.append(("speed of a trial", f"{mean:,.0f}" if mean >= 100 else number_text(mean), "images/s, mean"))
    return "<div class='cards'>" + "".join(
        f"<div class='card'><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>"
        for name, value, note in cards
    ) + "</div>"  # fmt: skip


def _hours(hours: float) -> str:
    return number_text(hours) if hours >= 0.001 else "under 0.001"


def _none_completed(data: ReportData) -> str:
    """What became of the trials instead; of what failed there is a table of its own."""
    counts = data.counts
    if not counts.finished:
        return "No trial has completed yet."
    ended = f"{counted(counts.finished, 'trial')} ended: {counts.pruned} pruned, {counts.failed} failed"
    return f"No trial has completed ({ended}), so there are no best parameters."


def _best_note(data: ReportData) -> str:
    """Which trial it was, and what the defaults came to: the first question about a best value."""
    if data.best is None:
        return "no trial has completed"
    reference = _trial_of_defaults(data)
    if reference and reference.number == data.best.number:
        return f"in trial {data.best.number}, with the defaults"
    compared = f"; the defaults: {number_text(reference.values[0])}" if reference else ""
    return f"in trial {data.best.number}{compared}"


def _trial_of_defaults(data: ReportData) -> FrozenTrial | None:
    """The completed trial that had the default of every parameter searched, if there is one."""
    wanted = {name: data.file.defaults[name] for name in data.parameters if name in data.file.defaults}
    if len(wanted) < len(data.parameters):
        return None
    return next((trial for trial in data.completed if trial.params == wanted), None)


def _best(data: ReportData) -> str:
    if data.best is None:
        return f"<p>{_none_completed(data)}</p>"
    header = ["parameter", "best"]
    rows = [[name, number_text(value)] for name, value in data.best.params.items()]
    if data.file.defaults:
        header.append("default")
        rows = [[*row, number_text(data.file.defaults.get(row[0]))] for row in rows]
    if data.importances:
        header.append("importance")
        rows = [[*row, f"{data.importances.get(row[0], 0):.0%}"] for row in rows]
    figures = {data.file.value_name: data.best.values[0], **data.figures(data.best)}
    reached = _table(["figure", "value"], [[name, number_text(value)] for name, value in figures.items()])
    return f"<div class='two'>{reached}{_table(header, rows)}</div>"


def _trials(data: ReportData) -> str:
    best = ordered_by_value(data.completed, data.file.study.direction)[:TRIALS_LISTED]
    names = list(data.parameters)
    rows = [
        [str(trial.number), number_text(trial.values[0]), *(number_text(trial.params.get(name)) for name in names),
         duration(trial.duration.total_seconds() if trial.duration else None)]
        for trial in best
    ]  # fmt: skip
    return _table(["trial", data.file.value_name, *names, "took"], rows)


def _failures(data: ReportData) -> str:
    failed = [trial for trial in data.trials if trial.state.name == "FAIL"]
    if not failed:
        return ""
    rows = []
    for trial in failed[-TRIALS_LISTED:]:
        failure: dict[str, Any] = trial.user_attrs.get("hpcjobs:failure") or {}
        rows.append([str(trial.number), failure.get("class", "unknown"), failure.get("message", "")])
    return f"<h2>Failed trials</h2>{_table(['trial', 'class', 'message'], rows, text_from=1)}"


def _table(header: list[str], rows: list[list[str]], text_from: int = 1000) -> str:
    def cells(tag: str, row: list[str]) -> str:
        marks = [" class='text'" if index >= text_from else "" for index in range(len(row))]
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='table'><table><tr>{cells('th', header)}</tr>{body}</table></div>"
