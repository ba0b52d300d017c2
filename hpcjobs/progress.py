"""Where a study stands, as one value: from the journal and the nodes' files, read incrementally."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpcjobs.budget import Counts, count, predecessor
from hpcjobs.heartbeat import OLD_S, HeartbeatWatch, NodeReport
from hpcjobs.owners import process_gone
from hpcjobs.study import OpenStudy

# time left is estimated from so many of the last finished trials
RECENT = 50


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
    """Everything that status shows. Times in seconds; ``images_per_s`` is the sum over the live workers."""

    name: str
    folder: str
    direction: str
    counts: Counts
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
        return sum(line.state in ("starting", "running", "stopping") for line in self.nodes)

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


def snapshot(study: OpenStudy, watch: HeartbeatWatch) -> Snapshot:
    """Look at the study now."""
    watch.look()
    lines = []
    for element, report in sorted(watch.reports.items()):
        silent_s = watch.silent_s(element)
        lines.append(NodeLine(report, node_state(report, silent_s), silent_s))
    live = [line.report for line in lines if line.state in ("starting", "running", "stopping")]
    speeds = [w.images_per_s for report in live for w in report.workers if w.state == "running" and w.images_per_s]
    counts = count(study)
    best = best_trial(study)
    continued = {predecessor(trial) for trial in study.trials()}
    epochs = sum(len(trial.intermediate_values) for trial in study.trials() if trial.number not in continued)
    return Snapshot(
        name=study.file.name,
        folder=str(study.paths.folder),
        direction=study.file.study.direction,
        counts=counts,
        epochs_done=epochs,
        epochs_total=counts.budget * study.file.study.epochs,
        images_per_s=sum(speeds) if speeds else None,
        best=None if best is None else Best(best.number, float(best.values[0]), dict(best.params)),
        time_left_s=_time_left(study, counts, sum(len(report.workers) for report in live)),
        nodes=lines,
    )


def _time_left(study: OpenStudy, counts: Counts, workers: int) -> float | None:
    """Work that is left, in mean durations of the last finished trials, shared by the workers that are there."""
    if counts.left == 0:
        return 0.0
    ended = study.trials((TrialState.COMPLETE, TrialState.PRUNED))[-RECENT:]
    durations = [trial.duration.total_seconds() for trial in ended if trial.duration is not None]
    if not durations or workers == 0:
        return None
    mean = statistics.fmean(durations)
    now = datetime.now()
    begun = [trial.datetime_start for trial in study.trials((TrialState.RUNNING,)) if trial.datetime_start]
    rest = [max(0.0, mean - (now - start).total_seconds()) for start in begun]
    work = counts.waiting * mean + sum(rest)
    return max(work / min(workers, counts.left), max(rest, default=0.0))
