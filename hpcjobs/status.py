"""Entry: shows where a study stands, from any machine that sees its folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcjobs import slurm_control
from hpcjobs.errors import run_entry
from hpcjobs.heartbeat import HeartbeatWatch, WorkerStatus
from hpcjobs.launch import recorded
from hpcjobs.owners import process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.progress import NodeLine, Snapshot, snapshot
from hpcjobs.study import OpenStudy, open_study

REFRESH_S = 2.0
PLAIN_REFRESH_S = 10.0
ASK_SLURM_S = 60.0
NODES_SHOWN = 40

_EXAMPLES = """\
examples:
  python -m hpcjobs.status runs/experiment1          # live until the study ends; Ctrl-C leaves the study alone
  python -m hpcjobs.status runs/experiment1 --once
  python -m hpcjobs.status runs/experiment1 --json
"""

# one character and one colour for what a worker does
_CELLS = {
    "running": ("#", "green"),
    "idle": (".", "cyan"),
    "starting": ("+", "yellow"),
    "stopping": ("~", "yellow"),
    "waiting to restart": ("!", "red"),
    "left out": ("x", "red"),
    "ended": ("-", "dim"),
}
_LEGEND = "# running  . idle  + starting  ~ stopping  ! restarting  x left out  - ended"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.status",
        description="Show where a study stands. Reads only the study's folder.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument("--json", action="store_true", help="print it once as JSON")
    options = parser.parse_args(arguments)
    study = open_study(StudyPaths(options.folder))
    beats = HeartbeatWatch(study.paths)
    if options.json:
        print(json.dumps(snapshot(study, beats).as_dict(), indent=2, default=str))
        return 0
    console = Console(highlight=False)
    if options.once:
        console.print(render(snapshot(study, beats)))
        return 0
    _follow(study, console)
    return 0


def watch(paths: StudyPaths) -> None:
    """Show a study until it ends, or until none of its nodes is left. Ctrl-C only ends the watching."""
    console = Console(highlight=False)
    try:
        last = _follow(open_study(paths), console)
    except KeyboardInterrupt:
        console.print("no longer watching")
        return
    if not last.finished:
        console.print(
            f"No node runs any more and {last.counts.left} trials are left. Logs: {paths.logs}\n"
            f"To go on: python -m hpcjobs.submit --resume {paths.folder}",
            style="yellow",
        )


def _follow(study: OpenStudy, console: Console) -> Snapshot:
    beats = HeartbeatWatch(study.paths)
    jobs = _Jobs(study.paths)
    now = snapshot(study, beats)
    if not console.is_terminal:
        while not now.finished and jobs.any_left(now):
            console.print(one_line(now))
            _sleep_until_change(study, PLAIN_REFRESH_S)
            now = snapshot(study, beats)
        console.print(render(now))
        return now
    with Live(render(now), console=console, auto_refresh=False) as live:
        while not now.finished and jobs.any_left(now):
            time.sleep(REFRESH_S)
            now = snapshot(study, beats)
            live.update(render(now), refresh=True)
    return now


def _sleep_until_change(study: OpenStudy, longest_s: float) -> None:
    """Sleep, but wake up when the study has ended."""
    from hpcjobs.budget import count

    end = time.monotonic() + longest_s
    while time.monotonic() < end and count(study).left:
        time.sleep(0.5)


class _Jobs:
    """Whether any job of a study may still bring a node: started, starting or in the queue."""

    def __init__(self, paths: StudyPaths) -> None:
        self._paths = paths
        self._asked = time.monotonic()
        self._answer = True

    def any_left(self, now: Snapshot) -> bool:
        if now.live_nodes:
            return True
        known = recorded(self._paths)
        ended = {line.report.element for line in now.nodes if line.state in ("ended", "gone")}
        for job in known:
            if not job.slurm and f"{job.host}_{job.job_ids[0]}" not in ended and process_start(int(job.job_ids[0])):
                return True
        if not any(job.slurm for job in known):
            return False
        if time.monotonic() - self._asked > ASK_SLURM_S:
            self._asked = time.monotonic()
            self._answer = self._ask([job_id for job in known if job.slurm for job_id in job.job_ids])
        return self._answer

    @staticmethod
    def _ask(job_ids: list[str]) -> bool:
        try:
            states = slurm_control.job_states(job_ids).values()
        except slurm_control.SlurmUnavailableError:
            return True
        return any(state.state in slurm_control.ALIVE | slurm_control.WAITING for state in states)


def duration(seconds: float | None) -> str:
    """Seconds as people read them."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def one_line(now: Snapshot) -> str:
    """The state of a study for a log."""
    counts = now.counts
    best = f"; best {now.best.value:.5g} (trial {now.best.number})" if now.best else ""
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
    table.add_row("study", Text(f"{now.name}  {now.folder}", overflow="fold"))
    table.add_row("", ProgressBar(total=max(1, counts.budget), completed=counts.finished, width=40))
    trials = f"{counts.finished} of {counts.budget} ended: {counts.completed} completed, {counts.pruned} pruned, "
    trials += f"{counts.failed} failed; {counts.running} running, {counts.waiting} waiting"
    table.add_row("trials", trials)
    if counts.failures:
        kinds = ", ".join(f"{kind}: {number}" for kind, number in sorted(counts.failures.items()))
        table.add_row("failures", f"{kinds} ({counts.recovered} went on under a new number)")
    table.add_row("epochs", f"{now.epochs_done} of {now.epochs_total}")
    if now.images_per_s:
        table.add_row("speed", f"{now.images_per_s:,.0f} images/s")
    if now.best:
        values = ", ".join(f"{name}={_short(value)}" for name, value in now.best.params.items())
        table.add_row("best", Text(f"{now.best.value:.6g} in trial {now.best.number}: {values}", overflow="fold"))
    table.add_row("time left", "none" if now.finished else duration(now.time_left_s))
    return Group(table, _node_table(now.nodes)) if now.nodes else Group(table, Text("no node has started yet"))


def _node_table(nodes: list[NodeLine]) -> Group:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("element", "node", "mode", "state", "workers"):
        table.add_column(column, overflow="fold")
    # nodes that run come first: those are what a person looks for
    shown = sorted(nodes, key=lambda line: line.state in ("ended", "gone"))[:NODES_SHOWN]
    for line in shown:
        report = line.report
        state = line.state + (f" for {duration(line.silent_s)}" if line.state == "silent" else "")
        if report.message:
            state += f": {report.message}"
        cells = Text.assemble(*[_CELLS.get(worker.state, ("?", "red")) for worker in report.workers])
        table.add_row(report.element, report.node, report.mode or "", state, cells)
    notes = [
        Text(f"{line.report.element} worker {worker.worker}: {worker.message}", style="yellow")
        for line in shown
        for worker in line.report.workers
        if _is_notable(worker)
    ]
    hidden = [Text(f"and {len(nodes) - len(shown)} more nodes")] if len(nodes) > len(shown) else []
    return Group(table, *hidden, *notes, Text(_LEGEND, style="dim"))


def _is_notable(worker: WorkerStatus) -> bool:
    return worker.state == "left out" and bool(worker.message)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run_entry(main))
