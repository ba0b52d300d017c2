"""Pure: what a throughput experiment measures, in which set-ups, and every path in its folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpcjobs.config import Choice, ClusterConfig, Line, PartitionMode, Positive, RunConfig, Strict, mistake
from hpcjobs.errors import UserError
from hpcjobs.load import validate
from hpcjobs.paths import JobFolder, write_atomically
from hpcjobs.plan import Plan, cluster_plan, local_plan
from hpcjobs.yaml_file import dump_yaml, read_yaml

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, order=True)
class Cell:
    """One thing to measure: a batch size in a precision. Cells are measured in ascending order."""

    precision: str
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.precision}-{self.batch_size:05d}"


@dataclass(frozen=True)
class Setup:
    """How a node is shared out: its partition mode (None: as it is), and workers on each logical GPU."""

    mode: PartitionMode | None
    per_gpu: int

    @property
    def name(self) -> str:
        """For files and people: ``cpx``, ``spx-x2``, ``x4``."""
        parts = [self.mode] if self.mode else []
        return "-".join([*parts, f"x{self.per_gpu}"] if self.per_gpu > 1 or not parts else parts)


class ThroughputFile(Strict):
    """``throughput.yaml`` in an experiment's folder: everything that its jobs read."""

    version: Literal[1] = 1
    name: Line
    measure: str = "autospeed_model.throughput:measure"
    settings: dict[Line, Choice] = {}  # handed to the measuring function as they are
    data: Path | None = None
    working_folder: Path | None = None
    modes: tuple[PartitionMode, ...] = ()  # empty: the nodes as they are
    per_gpu: tuple[Positive, ...] = (1,)
    batch_sizes: tuple[Positive, ...]
    precisions: tuple[Line, ...] = ("auto",)
    window_s: Seconds = 20.0
    # a worker that is not ready to measure after so long is given up; compiling counts
    patience_s: Seconds = 900.0
    cluster: ClusterConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ThroughputFile:
        if not self.batch_sizes:
            raise mistake("batch_sizes", "none", "at least one batch size")
        for precision in self.precisions:
            if not re.fullmatch(r"[A-Za-z0-9_]+", precision):
                raise mistake("precisions", precision, "letters and digits, such as fp32")
        if self.modes and self.cluster is None:
            raise mistake("modes", ", ".join(self.modes), "nothing on this machine alone, whose mode no job sets")
        return self

    @property
    def cells(self) -> list[Cell]:
        """In the order of measuring: what needs most memory comes last in each precision."""
        return [Cell(p, b) for p in dict.fromkeys(self.precisions) for b in sorted(set(self.batch_sizes))]

    def setups(self, mode: PartitionMode | None) -> list[Setup]:
        """The set-ups that one job, whose node is in ``mode``, measures in turn."""
        return [Setup(mode, count) for count in sorted(set(self.per_gpu))]

    @property
    def jobs(self) -> tuple[PartitionMode | None, ...]:
        """One job, of one node, per mode: a constraint holds for a whole job array, so that an array has one mode."""
        return tuple(dict.fromkeys(self.modes)) or (None,)

    def plan(self, setup: Setup, cores: int) -> Plan:
        """Where the workers of a set-up run; ``cores`` of this machine count where there is no cluster."""
        run = RunConfig(mode=setup.mode, workers_per_gpu=setup.per_gpu)
        if self.cluster is not None:
            return cluster_plan(self.name, run, self.cluster.model_copy(update={"workers_per_node": None}))
        # a machine without a GPU counts as one device
        alone = local_plan(self.name, run.model_copy(update={"workers_per_node": setup.per_gpu}), cores)
        return Plan(**{**vars(alone), "workers_by_devices": True})


@dataclass(frozen=True)
class ThroughputPaths(JobFolder):
    """The layout of an experiment's folder."""

    @property
    def config(self) -> Path:
        return self.folder / "throughput.yaml"

    def cell(self, setup: Setup, cell: Cell) -> Path:
        """The measurements of all workers of a node. The file exists once the cell is done."""
        return self.folder / "cells" / setup.name / f"{cell.name}.json"

    def problem(self, mode: PartitionMode | None) -> Path:
        """Why the job of a mode could not measure; gone once it could."""
        return self.folder / "cells" / f"{mode or 'as-is'}.problem"

    def worker_log(self, element: str, setup: Setup, worker: int) -> Path:
        return self.logs / element / setup.name / f"worker_{worker:03d}.log"

    @property
    def jobs(self) -> Path:
        """Slurm's job of each mode."""
        return self.folder / "jobs.json"

    @property
    def table(self) -> Path:
        """For ``--mode auto``."""
        return self.results / "throughput.json"


def write_file(paths: ThroughputPaths, file: ThroughputFile) -> None:
    """Freeze the experiment into its folder."""
    write_atomically(paths.config, dump_yaml(file.model_dump(mode="json")))


def read_file(folder: Path) -> ThroughputFile:
    """The experiment in ``folder``.

    Raises:
        UserError: there is none, or its file was damaged.
    """
    paths = ThroughputPaths(folder)
    if not paths.config.is_file():
        raise UserError(
            f"{paths.folder}: found no throughput.yaml; allowed: the folder of an experiment, as "
            "python -m hpcjobs.throughput makes it"
        )
    return validate(ThroughputFile, read_yaml(paths.config))
