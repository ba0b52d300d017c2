"""The typed configuration of a cluster, a study and one submission. Units stand in the names.

Defaults live here; YAML overrides them; the command line overrides YAML. The frozen :class:`StudyFile` in the study
folder is the only thing that jobs read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Union

from pydantic import BaseModel, ConfigDict, Field

PartitionMode = Literal["spx", "dpx", "qpx", "cpx"]
Choice = Union[bool, int, float, str, None]


class Strict(BaseModel):
    """Unknown keys are errors; values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Uniform(Strict):
    type: Literal["uniform"]
    min: float
    max: float


class LogUniform(Strict):
    type: Literal["loguniform"]
    min: float
    max: float


class Int(Strict):
    type: Literal["int"]
    min: int
    max: int
    step: int = 1
    log: bool = False


class Categorical(Strict):
    type: Literal["categorical"]
    values: tuple[Choice, ...]


Parameter = Annotated[Union[Uniform, LogUniform, Int, Categorical], Field(discriminator="type")]


class NamedWithOptions(Strict):
    """A sampler or pruner by name, with keyword options for it."""

    name: str
    options: dict[str, Choice] = {}


class StudyConfig(Strict):
    """What is searched, and how. A study file is either this, or only the mapping of ``parameters``."""

    objective: str = "autospeed_model.objective:train_trial"
    direction: Literal["maximize", "minimize"] = "maximize"
    parameters: dict[str, Parameter]
    fixed: dict[str, Choice] = {}
    sampler: NamedWithOptions = NamedWithOptions(name="tpe", options={"constant_liar": True, "multivariate": True})
    pruner: NamedWithOptions = NamedWithOptions(name="none")
    seed: int | None = None
    trials: int = 20
    epochs: int = 5
    # how often a trial whose objective raised is tried again; faults of nodes and devices are not counted here
    retries: int = 0


class ModeSelection(Strict):
    """How a job asks for a partition mode; ``none``: the site's nodes have whatever mode they have."""

    by: Literal["constraint", "comment", "none"] = "none"
    modes: tuple[PartitionMode, ...] = ()
    default: PartitionMode | None = None


class ClusterConfig(Strict):
    """A site: what its sbatch demands and what its nodes have."""

    name: str
    account: str | None = None
    slurm_partition: str | None = None
    qos: str | None = None
    constraint: str | None = None  # beside the mode's, joined with &
    timeout_min: int = 60
    exclusive: bool = True
    gpu_vendor: Literal["amd", "nvidia", "none"] = "amd"
    gpus_per_node: int = 8
    gres: str | None = None  # "gpu:mi300x:8"; without it --gpus-per-node
    cores_per_node: int
    mem_gb_per_node: int | None = None  # None: no --mem at all (some sites forbid it)
    mode: ModeSelection = ModeSelection()
    workers_per_node: int | None = None  # None: one per logical GPU that is really there
    sbatch: dict[str, Choice] = {}  # further sbatch options, as submitit's slurm_additional_parameters
    srun: tuple[str, ...] = ()  # further srun options of each step
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # shell lines before the node agent starts
    environment: dict[str, str] = {}
    container: tuple[str, ...] = ()  # command prefix, e.g. ("singularity", "exec", "image.sif")
    python: str | None = None  # None: the interpreter that runs submit
    group_writable_folders: bool = False  # consent to study folders that the group can write to
    max_array_size: int = 1000


class RunConfig(Strict):
    """One submission: how much, where and on what data."""

    nodes: int = 1
    mode: PartitionMode | None = None
    workers_per_node: int | None = None
    data: Path | None = None


class StudyFile(Strict):
    """``study.yaml`` in a study folder: everything a job needs to know. ``cluster`` is None on this machine alone."""

    version: int = 1
    name: str
    study: StudyConfig
    run: RunConfig
    cluster: ClusterConfig | None = None
