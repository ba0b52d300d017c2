"""What a node agent tells its workers: a file for the start of each, and one by which it orders all of them to stop."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcjobs.paths import write_atomically

# names the agent's folder on the node's own disk, for its workers
NODE_FOLDER = "HPCJOBS_NODE_FOLDER"


def spec_file(node_folder: Path, worker: int) -> Path:
    return node_folder / f"worker_{worker:03d}.json"


def status_file(node_folder: Path, worker: int) -> Path:
    return node_folder / f"status_{worker:03d}.json"


def control_file(node_folder: Path) -> Path:
    return node_folder / "control.json"


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that a worker is told. Times are of the node's own clock, which agent and workers share."""

    folder: Path
    element: str
    worker: int
    token: str
    agent: str
    agent_pid: int
    agent_start: str
    status: Path
    control: Path
    device: str = ""
    has_gpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    restarts: int = 0
    share: int = 1  # workers that the node's agent puts on this device

    def write(self, path: Path) -> None:
        data = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
        write_atomically(path, json.dumps(data), durable=False)

    @classmethod
    def read(cls, path: Path) -> WorkerSpec:
        data: dict[str, Any] = json.loads(path.read_bytes())
        for key in ("folder", "status", "control"):
            data[key] = Path(data[key])
        data["cores"] = tuple(data["cores"])
        return cls(**data)


@dataclass(frozen=True)
class Control:
    """The agent's orders. ``end``: when the job ends; ``stop_at``: when workers must begin to stop.

    Times are of the node's monotonic clock: nobody sets that one.
    """

    stop: str | None = None
    stop_at: float | None = None
    end: float | None = None
    grace_s: float = 20.0

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)), durable=False)

    @classmethod
    def read(cls, path: Path) -> Control:
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return cls()
