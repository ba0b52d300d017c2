"""What nodes and workers say of themselves: small JSON files, and how old they are by the reader's own clock.

A worker writes its status into a folder of its node's agent on a local disk. The agent gathers them into one file per
node in the study folder, so that a parallel filesystem sees one small file per node every few seconds.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpcjobs.paths import StudyPaths, write_atomically

# Seconds between two beats of a node, and after how many without a change its heartbeat is old.
BEAT_S = 2.0
OLD_S = 20.0


@dataclass
class WorkerStatus:
    """What one worker does now."""

    worker: int
    token: str
    pid: int
    start: str
    state: str = "starting"  # starting, idle, running, stopping, ended, waiting to restart, left out
    beat: int = 0
    device: str = ""
    trial: int | None = None
    epoch: int = 0
    epochs: int = 0
    value: float | None = None
    images_per_s: float | None = None
    epoch_s: float | None = None
    finished: int = 0  # trials that this worker brought to an end
    restarts: int = 0
    exit_code: int | None = None  # once the worker ends in order; srun does not always pass it on
    message: str = ""


@dataclass
class NodeReport:
    """The file of one array element in ``nodes/``."""

    element: str
    agent: str  # token, drawn anew at each start of the agent: a requeued element is another agent
    host: str
    node: str
    pid: int
    start: str
    run: int = 0  # how often Slurm has queued this element again
    state: str = "starting"  # starting, running, stopping, ended
    beat: int = 0
    mode: str | None = None
    gpus: int = 0
    time_left_s: float | None = None
    message: str = ""
    pressure: dict[str, float] = field(default_factory=dict)  # see hpcjobs.pressure
    host_limit: str = ""  # what the host lacked lately, with figures
    workers: list[WorkerStatus] = field(default_factory=list)

    def write(self, paths: StudyPaths) -> None:
        write_atomically(paths.node_file(self.element), json.dumps(asdict(self)), durable=False)


def _known(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in data.items() if key in names}


def write_status(path: Path, status: WorkerStatus) -> None:
    write_atomically(path, json.dumps(asdict(status)), durable=False)


def read_status(path: Path) -> WorkerStatus | None:
    """None while the worker has not written yet."""
    try:
        return WorkerStatus(**_known(WorkerStatus, json.loads(path.read_bytes())))
    except FileNotFoundError:
        return None


def sign_of_life(path: Path) -> int:
    """A number that changes whenever a worker has touched its status file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_node(path: Path) -> NodeReport | None:
    """One node's file; None if it is gone or not a node's file."""
    try:
        data = json.loads(path.read_bytes())
        workers = [WorkerStatus(**_known(WorkerStatus, worker)) for worker in data.pop("workers", [])]
        return NodeReport(**_known(NodeReport, data), workers=workers)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_nodes(paths: StudyPaths) -> list[NodeReport]:
    reports = [read_node(path) for path in sorted(paths.nodes.glob("*.json"))]
    return [report for report in reports if report is not None]


class HeartbeatWatch:
    """How long each node has been silent, measured from when this process first saw its present state.

    No clocks of two machines are compared: only what changes between two looks counts. A node seen for the first time
    is therefore fresh.
    """

    def __init__(self, paths: StudyPaths) -> None:
        self._paths = paths
        self._seen: dict[str, tuple[tuple[str, int], float]] = {}
        self.reports: dict[str, NodeReport] = {}

    def look(self) -> None:
        now = time.monotonic()
        self.reports = {report.element: report for report in read_nodes(self._paths)}
        for element, report in self.reports.items():
            state = (report.agent, report.beat)
            if element not in self._seen or self._seen[element][0] != state:
                self._seen[element] = (state, now)

    def silent_s(self, element: str) -> float | None:
        """Seconds without a beat; None for an element that has no file."""
        if element not in self.reports:
            return None
        return time.monotonic() - self._seen[element][1]
