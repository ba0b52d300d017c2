"""A snapshot of a study as text: a screen for a person, one line for a log."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcjobs.heartbeat import NodeReport, WorkerStatus
from hpcjobs.progress import NodeLine, Snapshot
from hpcjobs.text import duration, number_text

NODES_SHOWN = 40
# a node with more workers shows them on a line of their own, unless the terminal is wide
CELLS_IN_LINE = 16
WIDE = 140
GONE = ("ended", "gone")

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


def one_line(now: Snapshot) -> str:
    """The state of a study for a log."""
    counts = now.counts
    best = f"; best {number_text(now.best.value)} (trial {now.best.number})" if now.best else ""
    speed = f"; {now.images_per_s:.0f} images/s" if now.images_per_s else ""
    failed = f", {counts.failed} failed" if counts.failed else ""
    return (
        f"{counts.finished}/{counts.budget} trials ended{failed}, {counts.running} running; "
        f"epochs {now.epochs_done}/{now.epochs_total}{speed}{best}; left: {duration(now.time_left_s)}"
    )


def render(now: Snapshot) -> Group:
    """The whole state of a study for a person."""
    counts = now.counts
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    share = counts.finished / max(1, counts.budget)
    table.add_row("study", Text(f"{now.name}  {now.folder}"))
    bar = Table.grid(padding=(0, 1, 0, 0))
    bar.add_row(ProgressBar(total=max(1, counts.budget), completed=counts.finished, width=40), f"{share:.0%}")
    table.add_row("", bar)
    numbers = {"pruned": counts.pruned, "failed": counts.failed, "running": counts.running, "waiting": counts.waiting}
    others = "".join(f", {number} {name}" for name, number in numbers.items() if number)
    table.add_row("trials", f"{counts.finished} of {counts.budget} ended: {counts.completed} completed{others}")
    if counts.failures:
        kinds = ", ".join(f"{kind}: {number}" for kind, number in sorted(counts.failures.items()))
        went_on = f" ({counts.recovered} went on under a new number)" if counts.recovered else ""
        table.add_row("failures", Text(kinds + went_on, style="yellow"))
    speed = f", {now.images_per_s:,.0f} images/s" if now.images_per_s else ""
    table.add_row("epochs", f"{now.epochs_done} of {now.epochs_total}{speed}")
    if now.best:
        values = ", ".join(f"{name}={number_text(value)}" for name, value in now.best.params.items())
        best = Text.assemble((number_text(now.best.value), "bold green"), f" in trial {now.best.number}: {values}")
        table.add_row("best", best)
    table.add_row("time left", "none" if now.finished else duration(now.time_left_s))
    return Group(table, Nodes(now.nodes)) if now.nodes else Group(table, Text("no node has started yet"))


class Nodes:
    """The nodes, each with its workers as cells, laid out for the width there is."""

    def __init__(self, lines: list[NodeLine]) -> None:
        # nodes that run come first: those are what a person looks for
        self._all = len(lines)
        self._lines = sorted(lines, key=lambda line: line.state in GONE)[:NODES_SHOWN]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max(len(line.report.workers) for line in self._lines)
        inline = most <= CELLS_IN_LINE or options.max_width >= WIDE
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("node", "element", "mode", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("trials", "images/s", "job ends in"):
            table.add_column(name, justify="right", no_wrap=True)
        if inline:
            table.add_column("workers", no_wrap=True)
        yield Text()
        for line in self._lines:
            table.add_row(*_cells_of(line), *([_workers(line.report)] if inline else []))
        yield table
        if not inline:
            yield Text()
            for line in self._lines:
                yield Text.assemble((f"{line.report.node}  ", "bold"), _workers(line.report))
        if self._all > len(self._lines):
            yield Text(f"and {self._all - len(self._lines)} more nodes")
        yield from self._notes()
        shown = dict.fromkeys(worker.state for line in self._lines for worker in line.report.workers)
        legend = "  ".join(f"{mark} {state}" for state, (mark, _) in CELLS.items() if state in shown)
        yield Text(legend, style="dim")

    def _notes(self) -> list[Text]:
        notes = []
        for line in self._lines:
            if line.report.message:
                notes.append(Text(f"{line.report.node}: {line.report.message}", style="yellow"))
            if line.report.host_limit and line.state not in GONE:
                notes.append(
                    Text(f"{line.report.node}: the host is the limit: {line.report.host_limit}", style="yellow")
                )
            for worker in line.report.workers:
                if _is_notable(worker):
                    text = f"{line.report.element} worker {worker.worker}: {worker.message}"
                    notes.append(Text(text, style="yellow"))
        return notes


def _cells_of(line: NodeLine) -> list[Text | str]:
    report = line.report
    silent = f" {duration(line.silent_s)}" if line.state == "silent" else ""
    rates = [w.images_per_s for w in report.workers if w.state == "running" and w.images_per_s]
    ended = sum(worker.finished for worker in report.workers)
    left = duration(report.time_left_s) if report.time_left_s is not None and line.state not in GONE else ""
    return [
        report.node,
        report.element,
        report.mode or "",
        Text(line.state + silent, style=_STATE_STYLES.get(line.state, "yellow")),
        str(ended),
        f"{sum(rates):,.0f}" if rates and line.state not in GONE else "",
        left,
    ]


def _workers(report: NodeReport) -> Text:
    return Text.assemble(*[CELLS.get(worker.state, ("?", "red")) for worker in report.workers])


def _is_notable(worker: WorkerStatus) -> bool:
    return worker.state == "left out" and bool(worker.message)
