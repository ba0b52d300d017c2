"""Entry: shows where a study stands, from any machine that sees its folder."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live

from hpcjobs import slurm_control
from hpcjobs.budget import why_stopped
from hpcjobs.errors import run_entry
from hpcjobs.journal_replay import no_garbage_collection
from hpcjobs.launch import Launched, recorded
from hpcjobs.owners import process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.placement_map import draw, read_map
from hpcjobs.progress import GONE, LIVE, Snapshot, StudyWatch
from hpcjobs.status_look import look_again
from hpcjobs.status_view import CELLS, one_line, render
from hpcjobs.study import open_study
from hpcjobs.text import counted

REFRESH_S = 2.0
PLAIN_REFRESH_S = 10.0
# Slurm is asked so often, and only while nodes are still to come; it gets so long to answer a person who looks
ASK_SLURM_S = 30.0
ANSWER_S = 10.0
# and no longer than this where the person has nodes that work to look at
ANSWER_ASIDE_S = 3.0
# how long the last picture waits for nodes to say that they have ended
LAST_WORDS_S = 5.0
# of elements that run or wait
_TO_COME = slurm_control.ALIVE | slurm_control.WAITING

_EXAMPLES = """\
examples:
  python -m hpcjobs.status runs/experiment1          # live until the study ends; Ctrl-C leaves the study alone
  python -m hpcjobs.status runs/experiment1 --once
  python -m hpcjobs.status runs/experiment1 --json
  python -m hpcjobs.status runs/experiment1 --placement   # which worker is on which GPU and cores
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.status",
        description="Show where a study stands. Reads only the study's folder;\nwhy a node waits, Slurm tells.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print it once as JSON")
    what.add_argument("--placement", action="store_true", help="show the map of each node: GPUs, workers, cores")
    options = parser.parse_args(arguments)
    paths = StudyPaths(options.folder)
    watched, now = _open(paths)
    console = Console(highlight=False)
    if not (options.json or options.once or options.placement):
        _follow(paths, watched, now, console)
        return 0
    now = look_again(paths, watched, now)
    if options.placement:
        show_placement(paths, now, console)
        return 0
    now, queue = Jobs(paths).picture(now)
    if options.json:
        print(json.dumps({**now.as_dict(), "queue": queue}, indent=2, default=str))
    else:
        console.print(render(now, queue))
    return 0


def _open(paths: StudyPaths) -> tuple[StudyWatch, Snapshot]:
    """A study and its first picture."""
    with no_garbage_collection():
        watched = StudyWatch(open_study(paths))
        now = watched.look()
        gc.freeze()  # a long study is a million objects, none of them garbage
    return watched, now


def show_placement(paths: StudyPaths, now: Snapshot, console: Console) -> None:
    """The map of each node that runs, with what its workers do now; after the last one has ended, of all."""
    reports = [line.report for line in now.nodes if line.state not in GONE] or [line.report for line in now.nodes]
    for report in reports:
        placement = read_map(paths.placement_file(report.element))
        if placement is not None:
            states = {worker.worker: CELLS.get(worker.state, ("?", "red")) for worker in report.workers}
            console.print(draw(placement, states))
    if not reports:
        console.print("no node has started yet")
    shown = {worker.state for report in reports for worker in report.workers}
    legend = "  ".join(f"{mark} {state}" for state, (mark, _) in CELLS.items() if state in shown)
    console.print(legend, style="dim", markup=False)


def watch(paths: StudyPaths) -> bool:
    """Show a study until it ends, or until none of its nodes is left. False if Ctrl-C ended the watching before."""
    console = Console(highlight=False)
    try:
        last = _follow(paths, *_open(paths), console)
    except KeyboardInterrupt:
        cancel = f"python -m hpcjobs.cancel {shlex.quote(str(paths.folder))}"
        known = recorded(paths)
        go_on = known and all(job.slurm for job in known)  # those of this machine end with its terminal
        console.print(
            f"no longer watching{f'; the jobs go on, to end them: {cancel}' if go_on else ''}",
            markup=False,
            soft_wrap=True,
        )
        return False
    if not last.finished:
        why = why_stopped(open_study(paths))
        console.print(
            f"{f'The study has stopped itself: {why}. ' if why else ''}"
            f"No node runs any more; {counted(last.counts.left, 'trial')} left. {_where_to_read(paths, last)}\n"
            f"To go on: python -m hpcjobs.submit --resume {shlex.quote(str(paths.folder))}",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    return True


def _where_to_read(paths: StudyPaths, now: Snapshot) -> str:
    """Which files tell why nodes have ended: the logs, and the output of a job that ended before its node began."""
    said = [f"Logs: {paths.logs}"] if paths.logs.is_dir() else []
    begun = [f"_{line.report.element}" for line in now.nodes]
    outputs = [
        # <element>_<task>_log.out; of this machine the element is <host>_<process>
        path
        for path in sorted(paths.submitit.glob("*_log.*"), key=lambda path: path.stat().st_mtime)
        if not any(element.endswith(f"_{path.name.rsplit('_', 2)[0]}") for element in begun)
    ]
    told = [path for path in outputs if path.stat().st_size] or outputs
    if told:
        lines = told[-1].read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        said.append(f"A job ended before its node began; its output, {told[-1]}, ends with: {last[:400]}")
    return "\n".join(said) or "No job has written anything"


def _follow(paths: StudyPaths, watched: StudyWatch, now: Snapshot, console: Console) -> Snapshot:
    jobs = Jobs(paths)
    if not console.is_terminal:
        while not now.finished and jobs.any_left(now):
            console.print(one_line(*jobs.picture(now)), markup=False, soft_wrap=True)
            now = _look_when_it_changes(watched, PLAIN_REFRESH_S)
        return _last_picture(watched, jobs, now, console)
    with Live(render(*jobs.picture(now), full_screen=True), console=console, auto_refresh=False, screen=True) as live:
        while not now.finished and jobs.any_left(now):
            time.sleep(REFRESH_S)
            now = watched.look()
            live.update(render(*jobs.picture(now), full_screen=True), refresh=True)
    return _last_picture(watched, jobs, now, console)


def _last_picture(watched: StudyWatch, jobs: Jobs, now: Snapshot, console: Console) -> Snapshot:
    """Show what stays on the terminal: of a finished study its nodes as they end, not as they were just before."""
    end = time.monotonic() + LAST_WORDS_S
    while now.finished and now.live_nodes and time.monotonic() < end:
        time.sleep(0.25)
        now = watched.look()
    console.print(render(*jobs.picture(now)))
    return now


def _look_when_it_changes(watched: StudyWatch, longest_s: float) -> Snapshot:
    """The next picture: after ``longest_s``, or as soon as the study has ended."""
    end = time.monotonic() + longest_s
    while not (now := watched.look()).finished and time.monotonic() < end:
        time.sleep(0.5)
    return now


def _agents(now: Snapshot) -> dict[str, str]:
    """Of each element the agent that its file is of: one that is queued again gets another."""
    return {line.report.element: line.report.agent for line in now.nodes}


class Jobs:
    """Whether any job of a study may still bring a node: started, starting or in the queue; and why those wait."""

    def __init__(self, paths: StudyPaths) -> None:
        self._paths = paths
        self._asked: float | None = None
        self._aside = False  # asked while nodes worked
        self._over: set[str] = set()  # jobs of which no element runs or waits: not asked about again
        self._states: dict[str, slurm_control.JobState] | None = None  # by element; None: Slurm does not answer
        self._agents: dict[str, str] = {}  # of each element when Slurm was asked

    def any_left(self, now: Snapshot) -> bool:
        if now.live_nodes:
            return True
        known = recorded(self._paths)
        ended = {line.report.element for line in now.nodes if line.state in GONE}
        for job in known:
            if not job.slurm and f"{job.host}_{job.job_ids[0]}" not in ended and process_start(int(job.job_ids[0])):
                return True
        states = self._ask(known, now, aside=False)
        return states is None or any(state.state in _TO_COME for state in states.values())

    def picture(self, now: Snapshot) -> tuple[Snapshot, dict[str, int]]:
        """What to show: without the nodes whose elements wait in the queue again, and those that wait.

        Such an element begins anew, maybe elsewhere: what its file says is over.
        """
        queue = self.waiting(now)
        queued = set(self._queued(now)) if queue else set()
        nodes = [line for line in now.nodes if line.state in LIVE or line.report.element not in queued]
        return replace(now, nodes=nodes), queue

    def _queued(self, now: Snapshot) -> dict[str, slurm_control.JobState]:
        """Elements that wait; one whose agent has begun since Slurm was asked, which is seldom, does not any more."""
        begun = {element for element, agent in _agents(now).items() if self._agents.get(element) != agent}
        return {
            element: state
            for element, state in (self._states or {}).items()
            if state.state in slurm_control.WAITING and element not in begun
        }

    def waiting(self, now: Snapshot) -> dict[str, int]:
        """How many elements wait in the queue, by Slurm's reason; nothing if all of them work or Slurm is silent."""
        if now.finished:
            return {}
        aside = now.live_nodes > 0
        if self._is_due(aside):
            known = recorded(self._paths)
            all_work = aside and sum(job.elements for job in known if job.slurm) <= now.live_nodes
            self._ask([] if all_work else known, now, aside)
        told = (state.state if state.reason in ("", "None") else state.reason for state in self._queued(now).values())
        return dict(Counter(told).most_common())

    def _is_due(self, aside: bool) -> bool:
        """When the last node ends, what was learnt beside it is old: those that watch for the end wait for this."""
        if self._asked is None or (self._aside and not aside):
            return True
        return time.monotonic() - self._asked > ASK_SLURM_S

    def _ask(self, known: list[Launched], now: Snapshot, aside: bool) -> dict[str, slurm_control.JobState] | None:
        """The states of all elements, as of the last time that Slurm was asked."""
        if self._is_due(aside):
            job_ids = {job_id for job in known if job.slurm for job_id in job.job_ids} - self._over
            try:
                answer = slurm_control.job_states(sorted(job_ids), ANSWER_ASIDE_S if aside else ANSWER_S)
            except slurm_control.SlurmUnavailableError:
                self._states = None
            else:
                left = {element.partition("_")[0] for element, state in answer.items() if state.state in _TO_COME}
                self._over |= job_ids - left
                self._states = answer
            self._asked, self._aside, self._agents = time.monotonic(), aside, _agents(now)
        return self._states


if __name__ == "__main__":
    sys.exit(run_entry(main))
