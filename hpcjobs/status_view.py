"""A snapshot of a study as text: a screen for a person, one line for a log."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcjobs.heartbeat import NodeReport, WorkerStatus
from hpcjobs.progress import GONE, NodeLine, Snapshot
from hpcjobs.text import counted, duration, number_text

NODES_SHOWN = 40
NODES_NAMED = 4  # of those that say the same
NOTES_SHOWN = 8  # different messages of nodes, and of workers that are left out
# a node with more workers shows them on a line of their own, unless the terminal is wide
CELLS_IN_LINE = 16
WIDE = 140
# what a narrow terminal leaves out, the least needed first
DISPENSABLE = ("mode", "element", "CPU")
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


def render(now: Snapshot, queue: Mapping[str, int] | None = None, *, full_screen: bool = False) -> Picture:
    """The whole state of a study for a person. ``queue``: how many nodes wait in Slurm's queue, by its reason."""
    foot = [Text(line, style="yellow") for line in _queue_lines(queue)]
    return Picture(_head(now), now.nodes, foot, full_screen=full_screen)


class Picture:
    """The study, its nodes, and what waits: as many nodes as a full screen has room for, elsewhere up to 40."""

    def __init__(self, head: Table, nodes: list[NodeLine], foot: list[Text], *, full_screen: bool) -> None:
        self._head, self._nodes, self._foot, self._full_screen = head, nodes, foot, full_screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._head
        if self._nodes:
            around: list[RenderableType] = [self._head, *self._foot]
            taken = sum(len(console.render_lines(part, options)) for part in around)
            room = options.max_height - taken if self._full_screen else None
            yield Nodes(self._nodes, room)
        else:
            yield Text("no node has started yet")
        yield from self._foot


def _head(now: Snapshot) -> Table:
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
    return table


class Nodes:
    """The nodes, each with its workers as cells, laid out for the width there is, and the ``room``: lines, if limited.

    Where cells need lines of their own and those have no room, workers are counted instead.
    """

    def __init__(self, lines: list[NodeLine], room: int | None = None) -> None:
        # nodes that run come first: those are what a person looks for
        self._all = sorted(lines, key=lambda line: (line.state in GONE, _natural(line.report.element)))
        self._lines = self._all[:NODES_SHOWN]
        self._room = room

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        notes = list(self._notes())
        room = None
        if self._room is not None:  # beside a blank line, the header and the legend
            room = max(1, self._room - 3 - sum(len(console.render_lines(note, options)) for note in notes))
        rows = [{**_cells_of(line), "workers": _workers(line.report)} for line in self._lines]
        names, gap = self._layout(rows, options.max_width)
        if room is not None and "workers" not in names and 2 * len(rows) + 1 > room:
            rows = [{**row, "workers": _counts(line.report)} for row, line in zip(rows, self._lines, strict=True)]
            names, gap = self._layout(rows, options.max_width, own_line=False)
        lines = self._lines
        if room is not None and len(self._all) > room:
            lines = lines[: max(1, room - 1)]
            rows = rows[: len(lines)]
        table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row[name] for name in names))
        yield Text()
        yield table
        if "workers" not in names:
            yield Text()
            longest = max(len(line.report.node) for line in lines)
            for line in lines:
                yield Text.assemble((f"{line.report.node:<{longest}}  ", "bold"), _workers(line.report))
        if len(self._all) > len(lines):
            yield Text(f"and {counted(len(self._all) - len(lines), 'more node')}")
        yield from notes
        shown = dict.fromkeys(worker.state for line in lines for worker in line.report.workers)
        legend = "  ".join(f"{mark} {state}" for state, (mark, _) in CELLS.items() if state in shown)
        yield Text(legend, style="dim")

    def _layout(self, rows: list[dict[str, Text | str]], width: int, own_line: bool = True) -> tuple[list[str], int]:
        """The columns to show, and the gap between them, so that no cell is cut as long as that can be.

        ``own_line``: many workers may stand on lines of their own.
        """
        names = [name for name in rows[0] if any(row[name] for row in rows)]  # without what no node knows
        without = [name for name in names if name != "workers" or not own_line]
        narrow = [[name for name in without if name not in DISPENSABLE[:count]] for count in range(4)]
        layouts = [(without, 2), *((some, 1) for some in narrow)]
        if width >= WIDE or max(len(line.report.workers) for line in self._lines) <= CELLS_IN_LINE:
            layouts = [(names, 2), (names, 1), *layouts]

        def needed(shown: list[str], gap: int) -> int:
            return sum(max(len(name), *(len(row[name]) for row in rows)) + gap for name in shown) - gap

        return next((layout for layout in layouts if needed(*layout) <= width), layouts[-1])

    def _notes(self) -> list[Text]:
        said: dict[str, dict[str, None]] = {}  # many nodes say the same: one line
        for line in self._all:
            if line.report.message:
                said.setdefault(line.report.message, {})[line.report.node] = None
        notes = [Text(f"{_first(list(nodes))}: {text}", style="yellow") for text, nodes in said.items()][:NOTES_SHOWN]
        if len(said) > NOTES_SHOWN:
            others = {node for nodes in list(said.values())[NOTES_SHOWN:] for node in nodes}
            notes.append(Text(f"and words of {counted(len(others), 'more node')}; the logs have them", style="yellow"))
        limited = [line.report for line in self._all if line.report.host_limit and line.state not in GONE]
        if limited:  # each has figures of its own: those of the first tell what is meant
            names = _first([report.node for report in limited])
            notes.append(Text(f"{names}: the host is the limit: {limited[0].host_limit}", style="yellow"))
        left_out: dict[str, list[str]] = {}
        for line in self._all:
            for worker in filter(_is_notable, line.report.workers):
                left_out.setdefault(worker.message, []).append(f"{line.report.element} worker {worker.worker}")
        for message, workers in list(left_out.items())[:NOTES_SHOWN]:
            notes.append(Text(f"{_first(workers)}: {message}", style="yellow"))
        if len(left_out) > NOTES_SHOWN:
            more = sum(map(len, list(left_out.values())[NOTES_SHOWN:]))
            notes.append(Text(f"and {counted(more, 'more worker')} left out; the logs tell why", style="yellow"))
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


def _natural(text: str) -> list[str | int]:
    """A key that sorts 17_2 before 17_10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", text))]


def _counts(report: NodeReport) -> Text:
    """The workers as numbers of cells: ``62# 2.``"""
    numbers = Counter(CELLS.get(worker.state, ("?", "red")) for worker in report.workers)
    return Text(" ").join(Text(f"{number}{mark}", style) for (mark, style), number in numbers.items())


def _first(nodes: list[str]) -> str:
    rest = len(nodes) - NODES_NAMED
    return ", ".join(nodes[:NODES_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _is_notable(worker: WorkerStatus) -> bool:
    return worker.state == "left out" and bool(worker.message)
