"""Every path in a study folder, and what an experiment's folder has of it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hpcjobs.errors import UserError

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class JobFolder:
    """What a study's folder and an experiment's have in common. ``folder`` is kept absolute: jobs start elsewhere."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", from_here(Path(self.folder)))

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def node_log(self, element: str) -> Path:
        """``element`` is ``<array job>_<array task>``."""
        return self.logs / element / "node.log"

    @property
    def submitit(self) -> Path:
        return self.folder / "submitit"

    @property
    def results(self) -> Path:
        return self.folder / "results"


@dataclass(frozen=True)
class StudyPaths(JobFolder):
    """The layout of a study folder on the shared filesystem."""

    @property
    def config(self) -> Path:
        """The frozen configuration, the only thing that jobs read."""
        return self.folder / "study.yaml"

    @property
    def journal(self) -> Path:
        """Optuna's journal; everything a study knows of its trials."""
        return self.folder / "journal.log"

    @property
    def nodes(self) -> Path:
        """One small JSON file per array element: heartbeat and what its workers do."""
        return self.folder / "nodes"

    def node_file(self, element: str) -> Path:
        """``element`` is ``<array job>_<array task>``."""
        return self.nodes / f"{element}.json"

    def worker_log(self, element: str, worker: int) -> Path:
        return self.logs / element / f"worker_{worker:03d}.log"

    @property
    def failed_logs(self) -> Path:
        return self.logs / "failed"

    def failed_log(self, number: int) -> Path:
        """What a trial that failed wrote, once ``hpcjobs.clean`` has removed the workers' logs."""
        return self.failed_logs / f"trial_{number:05d}.log"

    def placement_file(self, element: str) -> Path:
        """Which devices and cores the workers of a node have."""
        return self.logs / element / "placement.json"

    @property
    def trials(self) -> Path:
        return self.folder / "trials"

    def trial(self, number: int) -> Path:
        """Where a trial that may go on has its checkpoint. A recovered trial gets a new number and a new folder."""
        return self.trials / f"{number:05d}"

    @property
    def curves(self) -> Path:
        """What trials reported epoch by epoch: one file of JSON lines for each worker."""
        return self.folder / "curves"

    def worker_curves(self, element: str, worker: int) -> Path:
        return self.curves / f"{element}_{worker:03d}.jsonl"

    @property
    def best_params(self) -> Path:
        return self.results / "best_params.yaml"

    @property
    def trials_csv(self) -> Path:
        return self.results / "trials.csv"

    @property
    def curves_csv(self) -> Path:
        return self.results / "curves.csv"

    @property
    def summary(self) -> Path:
        return self.results / "summary.json"

    @property
    def report(self) -> Path:
        """One page with everything in it."""
        return self.results / "report.html"

    @property
    def final(self) -> Path:
        """What the final trainings reached."""
        return self.results / "final.json"

    @property
    def figures(self) -> Path:
        return self.results / "figures"


def current_folder() -> Path:
    """The working folder.

    Raises:
        UserError: somebody has removed it.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("found no current folder: it was removed; allowed: one that exists; cd to another") from None


def from_here(path: Path) -> Path:
    """Absolute, like ``Path.absolute``, with the error of :func:`current_folder`."""
    return path if path.is_absolute() else current_folder() / path


def write_atomically(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """Write ``data`` under a temporary name beside ``path``, then rename it: readers see the old file or the new one.

    ``durable=False`` leaves out the sync, for status files that are written again in seconds.
    """
    content = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
