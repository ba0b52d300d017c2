"""The tables and charts of a throughput experiment: Markdown, CSV, PNG, and one HTML page that holds all of it."""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from hpcjobs.errors import UserError
from hpcjobs.paths import write_atomically
from hpcjobs.throughput_plan import Setup
from hpcjobs.throughput_table import COMPUTE_ONLY, END_TO_END, Row, ThroughputTable

TITLES = {COMPUTE_ONLY: "Compute-only", END_TO_END: "End to end"}
# readable apart without colours, too
MARKERS = "osD^vPX*"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#777777")


def label(table: ThroughputTable, setup: Setup) -> str:
    """``CPX (63)``: a set-up and its workers; ``2 per GPU (2)`` where the mode is not ours to choose."""
    workers = next(row.workers for row in table.rows if row.setup == setup)
    name = setup.mode.upper() if setup.mode else f"{setup.per_gpu} per GPU"
    shared = f", {setup.per_gpu} per GPU" if setup.mode and setup.per_gpu > 1 else ""
    return f"{name} ({workers}{shared})"


def cell_text(row: Row | None, window: str) -> str:
    """As the tables print it: images/s, ``OOM``, ``failed``, or nothing."""
    if row is None or row.status == "not tried":
        return ""
    if row.status != "ok":
        return "OOM" if row.status == "oom" else "failed"
    speed = row.speed(window)
    return "" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def grid(table: ThroughputTable, text: Callable[[Row | None], str]) -> list[list[str]]:
    """One line per set-up, one column per batch size, in each cell the fastest precision."""
    head = ["Mode (workers)", *map(str, table.batch_sizes)]
    lines = [[label(table, setup), *(text(table.best(setup, b)) for b in table.batch_sizes)] for setup in table.setups]
    return [head, *lines]


def markdown_table(lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def sections(table: ThroughputTable) -> list[tuple[str, list[list[str]]]]:
    """The tables by title: the two speeds first, then what explains them."""

    def of(form: Callable[[Row], str]) -> list[list[str]]:
        return grid(table, lambda row: form(row) if row is not None and row.status == "ok" else "")

    found = [
        (f"{title}, images/s of a node", grid(table, lambda row, w=window: cell_text(row, w)))  # type: ignore[misc]
        for window, title in TITLES.items()
    ]
    found.append(("Spread between workers (standard deviation over mean)", of(lambda row: f"{row.spread or 0.0:.1%}")))
    if any(row.memory_gb for row in table.rows):
        found.append(("Device memory of a worker, GiB", of(lambda row: f"{row.memory_gb or 0.0:.1f}")))
    found.append(("Busy cores, all workers", of(lambda row: f"{row.cores_busy or 0.0:.1f}")))
    if len(table.precisions) > 1:
        found.append(("Precision of the fastest", of(lambda row: row.precision)))
    return found


def findings(table: ThroughputTable) -> list[str]:
    """What to do, and why, for each batch size; then what was odd."""
    lines = []
    several_precisions = len({row.precision for row in table.rows}) > 1
    for batch_size in table.batch_sizes:
        rows = [row for setup in table.setups if (row := table.best(setup, batch_size)) and row.end_to_end]
        if not rows:
            lines.append(f"Batch size {batch_size}: nothing could be measured.")
            continue
        best = max(rows, key=lambda row: row.end_to_end or 0.0)
        others = [row for row in rows if row is not best]
        second = max(others, key=lambda row: row.end_to_end or 0.0, default=None)
        precision = f" in {best.precision}" if several_precisions else ""
        line = f"Batch size {batch_size}: {label(table, best.setup)}{precision}, {best.end_to_end:,.0f} images/s"
        if second is not None and second.end_to_end and best.end_to_end:
            line += f", {best.end_to_end / second.end_to_end:.2f} times {label(table, second.setup)}"
        if best.host_limit:
            line += f". The host is the limit: {best.host_limit}"
        lines.append(f"{line}.")
    failed = [row for row in table.rows if row.status == "failed"]
    lines += [
        f"Failed: {row.setup.name}, batch size {row.batch_size}, {row.precision}: {row.message}" for row in failed
    ]
    lines += [f"Not measured: {mode}: {why}" for mode, why in table.problems.items()]
    return lines


def facts(table: ThroughputTable) -> str:
    where = f"cluster {table.cluster}" if table.cluster else "one machine"
    parts = [where, table.node.get("gpu") or "no GPU", f"{table.node.get('cores', '?')} cores"]
    parts.append(table.objective or table.measure)
    parts += [f"{name}={value}" for name, value in table.settings.items()]
    if table.node.get("mps"):
        parts.append("workers on one GPU share it through MPS")
    parts.append(f"windows of {table.window_s:g} s")
    return ", ".join(parts)


def markdown(table: ThroughputTable) -> str:
    text = [f"# Throughput: {table.name}\n", f"{facts(table)}\n"]
    for title, lines in sections(table):
        text += [f"## {title}\n", markdown_table(lines)]
    text += ["## What follows\n", "".join(f"- {line}\n" for line in findings(table))]
    return "\n".join(text)


def csv_of_grid(lines: list[list[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[cell.replace(",", "") for cell in line] for line in lines])
    return file.getvalue()


def csv_of_rows(table: ThroughputTable) -> str:
    """Every figure of every cell."""
    file = io.StringIO()
    writer = csv.DictWriter(file, [entry.name for entry in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in table.rows)
    return file.getvalue()


def chart(table: ThroughputTable, window: str) -> bytes:
    """A PNG: images/s of a node over the batch size, a line for each set-up that ends where memory did.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "charts need matplotlib: pip install 'hpcjobs[plots]'; or leave them out with --no-charts"
        ) from None
    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    places = {batch_size: place for place, batch_size in enumerate(table.batch_sizes)}
    top = max((row.speed(w) or 0.0 for row in table.rows for w in TITLES), default=0.0)
    for number, setup in enumerate(table.setups):
        rows = [row for batch_size in table.batch_sizes if (row := table.best(setup, batch_size, window))]
        measured = [(places[row.batch_size], speed) for row in rows if (speed := row.speed(window)) is not None]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        if measured:
            axes.plot(*zip(*measured, strict=True), color=colour, marker=marker, label=label(table, setup), linewidth=2)
        for row in rows:
            if row.status == "oom":
                place = (places[row.batch_size], 0.03 * top + 0.055 * top * number)
                axes.annotate("OOM", place, color=colour, ha="center", fontsize=9, fontweight="bold")
    axes.set_xticks(range(len(places)), [str(batch_size) for batch_size in places])
    axes.set_xlabel("batch size of a worker")
    axes.set_ylabel("images/s of a node")
    # both charts have one scale, so that what the host costs is seen
    axes.set_ylim(0, 1.08 * top if top else 1)
    axes.set_title(f"{TITLES[window]} throughput: {table.node.get('gpu') or 'no GPU'}, {table.name}", fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="mode (workers)", frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .25rem .7rem; text-align: right }
th { border-bottom: 2px solid #999 } td { border-bottom: 1px solid #ddd } :is(td, th):first-child { text-align: left }
img { max-width: 100% } .oom { color: #b00; font-weight: 600 } .best { background: #e6f4ea; font-weight: 600 }
"""


def html_page(table: ThroughputTable, charts: dict[str, bytes]) -> str:
    """One file without links to others."""
    e = html.escape
    body = [f"<h1>Throughput: {e(table.name)}</h1><p>{e(facts(table))}</p><h2>What follows</h2><ul>"]
    body += [f"<li>{e(line)}</li>" for line in findings(table)] + ["</ul>"]
    for window, picture in charts.items():
        data = base64.b64encode(picture).decode()
        body.append(f'<img alt="{e(TITLES[window])} throughput by batch size" src="data:image/png;base64,{data}">')
    speeds = len(TITLES)
    for number, (title, lines) in enumerate(sections(table)):
        body += [f"<h2>{e(title)}</h2>", _html_table(lines, mark_best=number < speeds)]
    head = f'<meta charset="utf-8"><title>Throughput: {e(table.name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _html_table(lines: list[list[str]], *, mark_best: bool) -> str:
    best = {column: _best(lines, column) for column in range(1, len(lines[0]))} if mark_best else {}
    rows = [f'<tr><td></td><td colspan="{len(lines[0]) - 1}">batch size of a worker</td></tr>']
    rows.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in lines[0]) + "</tr>")
    for number, line in enumerate(lines[1:], 1):
        cells = []
        for column, cell in enumerate(line):
            kind = ' class="oom"' if cell == "OOM" else ' class="best"' if best.get(column) == number else ""
            cells.append(f"<td{kind}>{html.escape(cell)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _best(lines: list[list[str]], column: int) -> int | None:
    values = {number: line[column].replace(",", "") for number, line in enumerate(lines[1:], 1)}
    numbers = {n: float(text) for n, text in values.items() if text.replace(".", "", 1).isdigit()}
    return max(numbers, key=lambda n: numbers[n], default=None)


def write_report(folder: Path, table: ThroughputTable, *, with_charts: bool = True) -> list[Path]:
    """Write everything into ``folder``; returns the files."""
    charts = {window: chart(table, window) for window in TITLES} if with_charts and table.rows else {}
    files: dict[str, bytes | str] = {
        "throughput.json": table.to_json(),
        "throughput.md": markdown(table),
        "all_figures.csv": csv_of_rows(table),
        "throughput.html": html_page(table, charts),
    }
    for window in TITLES:
        files[f"{window}.csv"] = csv_of_grid(grid(table, lambda row, w=window: cell_text(row, w)))  # type: ignore[misc]
    files |= {f"{window}.png": picture for window, picture in charts.items()}
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]
