"""Where a study stands, as one value: from the journal and the nodes' files, read incrementally."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpcjobs.budget import FAILURE, Counts, predecessor
from hpcjobs.heartbeat import OLD_S, HeartbeatWatch, NodeReport, WorkerStatus
from hpcjobs.owners import process_gone
from hpcjobs.study import OpenStudy

# time left is estimated from so many of the last finished trials
RECENT = 50
# states of a node that works
LIVE = ("starting", "running", "stopping")
# and of one that works no more
GONE = ("ended", "gone")


@dataclass(frozen=True)
class Best:
    """The best completed trial so far."""

    number: int
    value: float
    params: dict[str, Any]


@dataclass(frozen=True)
class NodeLine:
    """One node: its report, and what this reader makes of its silence."""

    report: NodeReport
    state: str
    silent_s: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """Everything that status shows. Times in seconds; ``images_per_s`` is the sum over the live workers.

    ``share`` is that of the work that is done, between 0 and 1, by epochs: a trial that has ended needs none any more.
    """

    name: str
    folder: str
    direction: str
    value_name: str
    counts: Counts
    share: float
    epochs_done: int
    epochs_total: int
    images_per_s: float | None
    best: Best | None
    time_left_s: float | None
    nodes: list[NodeLine] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.counts.left == 0

    @property
    def live_nodes(self) -> int:
        return sum(line.state in LIVE for line in self.nodes)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "finished": self.finished, "budget": self.counts.budget}


def ordered_by_value(trials: Iterable[FrozenTrial], direction: str) -> list[FrozenTrial]:
    """Trials that have a value, the best first, of equals the earliest."""
    return sorted((trial for trial in trials if trial.values), key=_rank(direction))


def best_trial(study: OpenStudy) -> FrozenTrial | None:
    """The completed trial with the best value, the earliest of equals; None before one has completed."""
    completed = study.trials((TrialState.COMPLETE,))
    return min((trial for trial in completed if trial.values), key=_rank(study.file.study.direction), default=None)


def _rank(direction: str) -> Callable[[FrozenTrial], tuple[float, int]]:
    sign = -1.0 if direction == "maximize" else 1.0
    return lambda trial: (sign * trial.values[0], trial.number)


def node_state(report: NodeReport, silent_s: float | None) -> str:
    """The node's own state, unless it cannot be true any more."""
    if report.state == "ended":
        return "ended"
    if process_gone(report.pid, report.start, report.host):
        return "gone"
    if silent_s is not None and silent_s > OLD_S:
        return "silent"
    return report.state


def _at_rest(line: NodeLine) -> NodeLine:
    """A node that has ended without the work that its file says of workers, as of the agent's last look at them."""
    if line.state not in GONE:
        return line
    workers = [w if w.state == "left out" else replace(w, state="ended") for w in line.report.workers]
    return replace(line, report=replace(line.report, workers=workers))


class StudyWatch:
    """Looks at a study as often as one likes: a trial that has ended is looked at once, a node's file each time."""

    def __init__(self, study: OpenStudy) -> None:
        self._study = study
        self._beats = HeartbeatWatch(study.paths)
        self._looked_at = 0  # so many trials have been seen
        self._open: list[int] = []  # numbers of those that had not ended yet
        self._continued: set[int | None] = set()
        self._ended = {TrialState.COMPLETE: 0, TrialState.PRUNED: 0}
        self._epochs_ended = 0
        self._failed: dict[int, int] = {}  # epochs of each failed trial: somebody may go on with it
        self._failures: dict[str, int] = {}
        self._best: FrozenTrial | None = None
        self._durations: deque[float] = deque(maxlen=RECENT)  # of the last that ended

    def look(self) -> Snapshot:
        """Where the study stands now."""
        file = self._study.file
        nodes = self._nodes()
        live = [line.report for line in nodes if line.state in LIVE]
        workers = [worker for report in live for worker in report.workers]
        speeds = [worker.images_per_s for worker in workers if worker.state == "running" and worker.images_per_s]
        running, waiting = self._trials()
        counts = Counts(
            completed=self._ended[TrialState.COMPLETE],
            pruned=self._ended[TrialState.PRUNED],
            failed=sum(number not in self._continued for number in self._failed),
            running=len(running),
            waiting=len(waiting),
            recovered=sum(number in self._continued for number in self._failed),
            failures=dict(self._failures),
        )
        under_way = [len(trial.intermediate_values) for trial in (*running, *waiting)]
        failed = sum(epochs for number, epochs in self._failed.items() if number not in self._continued)
        epochs_done = self._epochs_ended + failed + sum(under_way)
        epochs = file.study.epochs
        work_done = counts.finished * epochs + sum(min(done, epochs) for done in under_way)
        best = self._best
        return Snapshot(
            name=file.name,
            folder=str(self._study.paths.folder),
            direction=file.study.direction,
            value_name=file.value_name,
            counts=counts,
            share=work_done / (counts.budget * epochs) if counts.budget else 1.0,
            epochs_done=epochs_done,
            epochs_total=counts.budget * epochs,
            images_per_s=sum(speeds) if speeds else None,
            best=None if best is None else Best(best.number, float(best.values[0]), dict(best.params)),
            time_left_s=self._time_left(counts, running, counts.left * epochs - sum(under_way), workers),
            nodes=nodes,
        )

    def _nodes(self) -> list[NodeLine]:
        self._beats.look()
        lines = []
        for element, report in sorted(self._beats.reports.items()):
            silent_s = self._beats.silent_s(element)
            lines.append(_at_rest(NodeLine(report, node_state(report, silent_s), silent_s)))
        return lines

    def _trials(self) -> tuple[list[FrozenTrial], list[FrozenTrial]]:
        """Take in what has changed; returns the trials that run and those that wait."""
        trials = self._study.trials()
        self._open += range(self._looked_at, len(trials))
        self._continued.update(predecessor(trial) for trial in trials[self._looked_at :])
        self._looked_at = len(trials)
        now_open: list[int] = []
        running: list[FrozenTrial] = []
        waiting: list[FrozenTrial] = []
        for number in self._open:
            trial = trials[number]
            if trial.state.is_finished():
                self._take_in(trial)
                continue
            now_open.append(number)
            if number not in self._continued:
                (running if trial.state == TrialState.RUNNING else waiting).append(trial)
        self._open = now_open
        return running, waiting

    def _take_in(self, trial: FrozenTrial) -> None:
        epochs = len(trial.intermediate_values)
        if trial.state == TrialState.FAIL:
            kind = (trial.user_attrs.get(FAILURE) or {}).get("class", "unknown")
            self._failures[kind] = self._failures.get(kind, 0) + 1
            self._failed[trial.number] = epochs
            return
        self._ended[trial.state] += 1
        self._epochs_ended += epochs
        if trial.duration is not None:
            self._durations.append(trial.duration.total_seconds())
        if trial.state == TrialState.COMPLETE and trial.values:
            rank = _rank(self._study.file.study.direction)
            self._best = min(filter(None, (self._best, trial)), key=rank)

    def _time_left(
        self, counts: Counts, running: list[FrozenTrial], epochs_left: int, workers: list[WorkerStatus]
    ) -> float | None:
        """Work that is left, shared by the workers that are there: in mean durations of the last trials that ended;
        before one has, in mean durations of an epoch."""
        if counts.left == 0:
            return 0.0
        if not workers:
            return None
        at_work = min(len(workers), counts.left)
        if not self._durations:
            epochs_s = [worker.epoch_s for worker in workers if worker.epoch_s]
            return epochs_left * statistics.fmean(epochs_s) / at_work if epochs_s else None
        mean = statistics.fmean(self._durations)
        now = datetime.now()
        begun = [trial.datetime_start for trial in running if trial.datetime_start]
        rest = [max(0.0, mean - (now - start).total_seconds()) for start in begun]
        work = counts.waiting * mean + sum(rest)
        return max(work / at_work, max(rest, default=0.0))
