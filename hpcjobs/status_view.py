"""A snapshot of a study as text: a screen for a person, one line for a log."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcjobs.heartbeat import NodeReport, WorkerStatus
from hpcjobs.progress import NodeLine, Snapshot
from hpcjobs.text import counted, duration, number_text

NODES_SHOWN = 40
NODES_NAMED = 4  # of those that say the same
WORKERS_SHOWN = 8  # different messages of workers that are left out
# a node with more workers shows them on a line of their own, unless the terminal is wide
CELLS_IN_LINE = 16
WIDE = 140
# what a narrow terminal leaves out, the least needed first
DISPENSABLE = ("mode", "element", "CPU")
GONE = ("ended", "gone")
_NUMBERS = ("trials", "images/s", "CPU", "job ends in")

# one character and one colour for what a worker does
CELLS = {
    "running": ("#", "green"),
    "idle": (".", "cyan"),
    "starting": ("+", "yellow"),
    "stopping": ("~", "yellow"),
    "waiting to restart": ("!", "red"),
    "left out": ("x", "red"),
    "ended": ("-", "dim"),
}
_STATE_STYLES = {"running": "green", "silent": "bold red", "gone": "red", "ended": "dim"}


def one_line(now: Snapshot, queue: Mapping[str, int] | None = None) -> str:
    """The state of a study for a log. ``queue``: how many nodes wait in Slurm's queue, by its reason."""
    counts = now.counts
    best = f"; best {now.value_name} {number_text(now.best.value)} (trial {now.best.number})" if now.best else ""
    speed = f"; {now.images_per_s:.0f} images/s" if now.images_per_s else ""
    failed = f", {counts.failed} failed" if counts.failed else ""
    return (
        f"{percent(now)}: {counts.finished}/{counts.budget} trials ended{failed}, {counts.running} running; "
        f"epochs {now.epochs_done}/{now.epochs_total}{speed}{best}; left: {duration(now.time_left_s)}"
        + "".join(f"; {line}" for line in _queue_lines(queue))
    )


def _queue_lines(queue: Mapping[str, int] | None) -> list[str]:
    """One line, or none."""
    if not queue:
        return []
    reasons = ", ".join(f"{nodes} {reason}" for reason, nodes in queue.items()) if len(queue) > 1 else "".join(queue)
    return [f"{counted(sum(queue.values()), 'node')} in Slurm's queue: {reasons}"]


def percent(now: Snapshot) -> str:
    """The share of the work that is done; 100 % only when all is."""
    return f"{now.share:.1%}" if now.share < 0.1 else f"{math.floor(100 * now.share + 1e-9)}%"


def render(now: Snapshot, queue: Mapping[str, int] | None = None) -> Group:
    """The whole state of a study for a person. ``queue``: how many nodes wait in Slurm's queue, by its reason."""
    counts = now.counts
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("study", Text(f"{now.name}  {now.folder}"))
    bar = Table.grid(padding=(0, 1, 0, 0))
    bar.add_row(ProgressBar(total=1.0, completed=now.share, width=40), percent(now))
    table.add_row("", bar)
    numbers = {"pruned": counts.pruned, "failed": counts.failed, "running": counts.running, "waiting": counts.waiting}
    others = "".join(f", {number:,} {name}" for name, number in numbers.items() if number)
    table.add_row("trials", f"{counts.finished:,} of {counts.budget:,} ended: {counts.completed:,} completed{others}")
    if counts.failures:
        kinds = ", ".join(f"{kind}: {number:,}" for kind, number in sorted(counts.failures.items()))
        went_on = f" ({counts.recovered:,} went on under a new number)" if counts.recovered else ""
        table.add_row("failures", Text(kinds + went_on, style="yellow"))
    speed = f", {now.images_per_s:,.0f} images/s" if now.images_per_s else ""
    table.add_row("epochs", f"{now.epochs_done:,} of {now.epochs_total:,}{speed}")
    if now.best:
        values = ", ".join(f"{name}={number_text(value)}" for name, value in now.best.params.items())
        value = f"{now.value_name} {number_text(now.best.value)}"
        best = Text.assemble((value, "bold green"), f" in trial {now.best.number}: {values}")
        table.add_row("best", best)
    table.add_row("time left", "none" if now.finished else duration(now.time_left_s))
    nodes = Nodes(now.nodes) if now.nodes else Text("no node has started yet")
    return Group(table, nodes, *(Text(line, style="yellow") for line in _queue_lines(queue)))


class Nodes:
    """The nodes, each with its workers as cells, laid out for the width there is."""

    def __init__(self, lines: list[NodeLine]) -> None:
        # nodes that run come first: those are what a person looks for
        self._all = len(lines)
        self._lines = sorted(lines, key=lambda line: line.state in GONE)[:NODES_SHOWN]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [{**_cells_of(line), "workers": _workers(line.report)} for line in self._lines]
        names, gap = self._layout(rows, options.max_width)
        table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row[name] for name in names))
        yield Text()
        yield table
        if "workers" not in names:
            yield Text()
            longest = max(len(line.report.node) for line in self._lines)
            for line in self._lines:
                yield Text.assemble((f"{line.report.node:<{longest}}  ", "bold"), _workers(line.report))
        if self._all > len(self._lines):
            yield Text(f"and {counted(self._all - len(self._lines), 'more node')}")
        yield from self._notes()
        shown = dict.fromkeys(worker.state for line in self._lines for worker in line.report.workers)
        legend = "  ".join(f"{mark} {state}" for state, (mark, _) in CELLS.items() if state in shown)
        yield Text(legend, style="dim")

    def _layout(self, rows: list[dict[str, Text | str]], width: int) -> tuple[list[str], int]:
        """The columns to show, and the gap between them, so that no cell is cut as long as that can be."""
        names = [name for name in rows[0] if any(row[name] for row in rows)]  # without what no node knows
        without = [name for name in names if name != "workers"]
        narrow = [[name for name in without if name not in DISPENSABLE[:count]] for count in range(4)]
        layouts = [(without, 2), *((some, 1) for some in narrow)]
        if width >= WIDE or max(len(line.report.workers) for line in self._lines) <= CELLS_IN_LINE:
            layouts = [(names, 2), (names, 1), *layouts]

        def needed(shown: list[str], gap: int) -> int:
            return sum(max(len(name), *(len(row[name]) for row in rows)) + gap for name in shown) - gap

        return next((layout for layout in layouts if needed(*layout) <= width), layouts[-1])

    def _notes(self) -> list[Text]:
        said: dict[str, dict[str, None]] = {}  # many nodes say the same: one line
        for line in self._lines:
            if line.report.message:
                said.setdefault(line.report.message, {})[line.report.node] = None
        notes = [Text(f"{_first(list(nodes))}: {message}", style="yellow") for message, nodes in said.items()]
        for line in self._lines:
            if line.report.host_limit and line.state not in GONE:
                notes.append(
                    Text(f"{line.report.node}: the host is the limit: {line.report.host_limit}", style="yellow")
                )
        left_out: dict[str, list[str]] = {}
        for line in self._lines:
            for worker in filter(_is_notable, line.report.workers):
                left_out.setdefault(worker.message, []).append(f"{line.report.element} worker {worker.worker}")
        for message, workers in list(left_out.items())[:WORKERS_SHOWN]:
            notes.append(Text(f"{_first(workers)}: {message}", style="yellow"))
        if len(left_out) > WORKERS_SHOWN:
            others = sum(map(len, list(left_out.values())[WORKERS_SHOWN:]))
            notes.append(Text(f"and {counted(others, 'more worker')} left out; the logs tell why", style="yellow"))
        return notes


def _cells_of(line: NodeLine) -> dict[str, Text | str]:
    report = line.report
    silent = f" {duration(line.silent_s)}" if line.state == "silent" else ""
    rates = [w.images_per_s for w in report.workers if w.state == "running" and w.images_per_s]
    busy = report.pressure.get("cpu_busy")
    now = {
        "images/s": f"{sum(rates):,.0f}" if rates else "",
        "CPU": f"{busy:.0%}" if busy is not None else "",
        "job ends in": duration(report.time_left_s) if report.time_left_s is not None else "",
    }
    return {
        "node": report.node,
        "element": report.element,
        "mode": report.mode or "",
        "state": Text(line.state + silent, style=_STATE_STYLES.get(line.state, "yellow")),
        "trials": f"{sum(worker.finished for worker in report.workers):,}",
        **(dict.fromkeys(now, "") if line.state in GONE else now),
    }


def _workers(report: NodeReport) -> Text:
    return Text.assemble(*[CELLS.get(worker.state, ("?", "red")) for worker in report.workers])


def _first(nodes: list[str]) -> str:
    rest = len(nodes) - NODES_NAMED
    return ", ".join(nodes[:NODES_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _is_notable(worker: WorkerStatus) -> bool:
    return worker.state == "left out" and bool(worker.message)
