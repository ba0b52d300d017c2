"""The typed configuration of a cluster, a study and one submission. Units stand in the names.

Defaults live here; YAML overrides them; the command line overrides YAML. The frozen :class:`StudyFile` in the study
folder is the only thing that jobs read. Errors are told with file and line by :mod:`hpcjobs.load`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

PartitionMode = Literal["spx", "dpx", "qpx", "cpx"]
MODES: tuple[PartitionMode, ...] = get_args(PartitionMode)
# logical GPUs that one MI300X shows in each mode (8 XCDs divided among them)
LOGICAL_GPUS: dict[PartitionMode, int] = {"spx": 1, "dpx": 2, "qpx": 4, "cpx": 8}

# sbatch options that the launcher writes itself, from keys of its own or because it cannot work without
OWN_SBATCH_OPTIONS = frozenset(
    {"array", "cpus-per-task", "error", "job-name", "nodes", "ntasks", "ntasks-per-node"}
    | {"open-mode", "output", "signal", "time", "wrap"}
)
# with those of terminals (C1) and halves of characters, which no file or terminal can hold
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# of samplers, journals and spreadsheets that calculate in double precision
LARGEST_WHOLE = 2**53
# every trial waits in the journal from the start
MOST_TRIALS = 1_000_000


def mistake(key: str | tuple[str, ...], found: object, allowed: str, remedy: str = "") -> PydanticCustomError:
    """An error of a validator with what every message says; ``key`` counts from the value that is validated."""
    keys = (key,) if isinstance(key, str) else key
    return PydanticCustomError(
        "mistake", "{allowed}", {"key": keys, "found": found, "allowed": allowed, "remedy": remedy}
    )


def _one_line(text: str) -> str:
    if not text or CONTROL_CHARACTER.search(text):
        raise mistake((), text, "text of one line, without control characters")
    return text


def _scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise mistake((), value, "a finite number")
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise mistake((), value, "a number, text, true, false or null")
    if isinstance(value, str) and CONTROL_CHARACTER.search(value):
        raise mistake((), value, "text of one line, without control characters")
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        raise mistake((), value, f"a whole number of at most {LARGEST_WHOLE}")
    return value


Line = Annotated[str, AfterValidator(_one_line)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True, ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
Positive = Annotated[int, Field(strict=True, ge=1, le=LARGEST_WHOLE)]
Flag = Annotated[bool, Field(strict=True)]
Choice = Annotated[bool | int | float | str | None, BeforeValidator(_scalar)]


class Strict(BaseModel):
    """Unknown keys are errors; values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Range(Strict):
    min: Number
    max: Number

    @model_validator(mode="after")
    def _ordered(self) -> _Range:
        if self.min > self.max:
            raise mistake("max", self.max, f"more than min, which is {self.min}", "exchange the two")
        if self.min == self.max:
            raise mistake("max", self.max, "more than min", f"write a fixed value: NAME: {self.min}")
        return self


class Uniform(_Range):
    type: Literal["uniform"]

    @model_validator(mode="after")
    def _finite_width(self) -> Uniform:
        if not math.isfinite(self.max - self.min):
            raise mistake("max", self.max, "a range whose width is a finite number", "search a narrower range")
        return self


class LogUniform(_Range):
    type: Literal["loguniform"]

    @model_validator(mode="after")
    def _positive(self) -> LogUniform:
        if self.min <= 0:
            raise mistake("min", self.min, "more than 0 on a logarithmic scale", "start at 1e-6, say, or use uniform")
        return self


class Int(Strict):
    type: Literal["int"]
    min: Whole
    max: Whole
    step: Positive = 1
    log: Flag = False

    @model_validator(mode="after")
    def _ordered(self) -> Int:
        if self.min > self.max:
            raise mistake("max", self.max, f"more than min, which is {self.min}", "exchange the two")
        if self.min == self.max:
            raise mistake("max", self.max, "more than min", f"write a fixed value: NAME: {self.min}")
        if self.log and self.min < 1:
            raise mistake("min", self.min, "at least 1 on a logarithmic scale", "start at 1, or leave out log")
        if self.log and self.step != 1:
            raise mistake("step", self.step, "1 on a logarithmic scale", "leave out step or log")
        beyond = (self.max - self.min) % self.step
        if beyond:
            raise mistake("max", self.max, "min plus a multiple of step", f"the last value is {self.max - beyond}")
        return self


class Categorical(Strict):
    type: Literal["categorical"]
    values: tuple[Choice, ...]

    @model_validator(mode="after")
    def _distinct(self) -> Categorical:
        if len(self.values) < 2:
            raise mistake("values", list(self.values), "at least two values", "write a fixed value: NAME: VALUE")
        for index, value in enumerate(self.values):
            # by equality, as the sampler looks values up: 1, 1.0 and true are one
            if value in self.values[:index]:
                raise mistake("values", value, "each value once (1, 1.0 and true are equal)", "remove one")
        return self


Parameter = Annotated[Uniform | LogUniform | Int | Categorical, Field(discriminator="type")]


class NamedWithOptions(Strict):
    """A sampler or pruner by name, with keyword options for it."""

    name: Line
    options: dict[str, Choice] = {}


# of many workers at once: what runs counts, and parameters are drawn together. A study file's own options win
TPE_OPTIONS: dict[str, Choice] = {"constant_liar": True, "multivariate": True}


class StudyConfig(Strict):
    """What is searched, and how. A study file is either this, or only the mapping of ``parameters``."""

    objective: str = "autospeed_model.objective:train_trial"
    direction: Literal["maximize", "minimize"] = "maximize"
    parameters: dict[Line, Parameter]
    fixed: dict[Line, Choice] = {}
    sampler: NamedWithOptions = NamedWithOptions(name="tpe", options=TPE_OPTIONS)
    pruner: NamedWithOptions = NamedWithOptions(name="none")
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] | None = None
    trials: Annotated[int, Field(strict=True, ge=1, le=MOST_TRIALS)] = 20
    epochs: Positive = 5
    # how often a trial whose objective raised is tried again; faults of nodes and devices are not counted here
    retries: Annotated[int, Field(strict=True, ge=0)] = 0
    # the study stops when so many trials have failed with an error of the objective and none has ended well; 0: never
    stop_after_errors: Annotated[int, Field(strict=True, ge=0)] = 8
    # fixed whole numbers, such as the batch size, that are halved for a trial that runs out of GPU memory
    halve_on_gpu_memory: tuple[Line, ...] = ()

    @field_validator("sampler", "pruner", mode="before")
    @classmethod
    def _a_mapping(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, (dict, NamedWithOptions)):
            name = "tpe" if info.field_name == "sampler" else "asha"
            raise mistake((), given, f"a mapping, such as {{name: {name}}}")
        return given

    @field_validator("sampler")
    @classmethod
    def _with_options(cls, sampler: NamedWithOptions) -> NamedWithOptions:
        return (
            sampler.model_copy(update={"options": {**TPE_OPTIONS, **sampler.options}})
            if sampler.name == "tpe"
            else sampler
        )

    @model_validator(mode="after")
    def _consistent(self) -> StudyConfig:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", self.objective):
            raise mistake("objective", self.objective, "module:function", "for example my_project.training:train")
        for name in self.fixed:
            if name in self.parameters:
                raise mistake(("fixed", name), name, "either searched or fixed", "remove one of the two")
        for name in self.halve_on_gpu_memory:
            value = self.fixed.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 2:
                allowed = "names of fixed whole numbers of at least 2 (what is searched must stay what it is)"
                raise mistake("halve_on_gpu_memory", name, allowed, f"add it to fixed: {{{name}: 16}}, say")
        if not self.parameters:
            raise mistake("parameters", None, "at least one parameter with a range", "see configs/studies for examples")
        return self


class ModeSelection(Strict):
    """How a job asks for a partition mode; ``none``: the site's nodes have whatever mode they have."""

    by: Literal["constraint", "comment", "none"] = "none"
    modes: tuple[PartitionMode, ...] = ()
    default: PartitionMode | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ModeSelection:
        if self.by == "none" and self.modes:
            raise mistake(
                "modes", ", ".join(self.modes), "nothing while by is none", "set by: constraint, or remove modes"
            )
        if self.by != "none" and not self.modes:
            raise mistake("modes", "none", f"some of {', '.join(MODES)}", "name the modes that jobs may ask for")
        if self.default is not None and self.default not in self.modes:
            raise mistake("default", self.default, f"one of modes: {', '.join(self.modes) or 'none'}")
        return self


class ClusterConfig(Strict):
    """A site: what its sbatch demands and what its nodes have."""

    name: Line
    account: Line | None = None
    account_required: Flag = False  # the site runs no job without one
    slurm_partition: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None  # beside the mode's, joined with &
    timeout_min: Positive = 60
    signal_delay_s: Positive = 120  # how long before its end a job is told, so that trials are checkpointed
    exclusive: Flag = True
    gpu_vendor: Literal["amd", "nvidia", "none"] = "amd"
    gpus_per_node: Annotated[int, Field(strict=True, ge=0)] = 8
    gpu_memory_gb: Positive | None = None  # of a whole GPU; for --mode auto
    gres: Line | None = None  # "gpu:mi300x:8"; without it --gpus-per-node
    cores_per_node: Positive
    reserved_cpus: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()  # left to the system, with their core
    mem_gb_per_node: Positive | None = None  # None: no --mem at all (some sites forbid it)
    mode: ModeSelection = ModeSelection()
    workers_per_node: Positive | None = None  # None: one per logical GPU that is really there
    sbatch: dict[Line, Choice] = {}  # further sbatch options, as submitit's slurm_additional_parameters
    srun: tuple[Line, ...] = ()  # further srun options of each step
    modules: tuple[Line, ...] = ()
    setup: tuple[Line, ...] = ()  # shell lines before the node agent starts
    environment: dict[str, str] = {}
    container: tuple[Line, ...] = ()  # prefix of a worker's command, e.g. ("singularity", "exec", "image.sif")
    python: Line | None = None  # None: the interpreter that runs submit; in a container, python3
    group_writable_folders: Flag = False  # consent to study folders that the group can write to
    max_array_size: Positive = 1000

    @model_validator(mode="after")
    def _consistent(self) -> ClusterConfig:
        for key, value in self.sbatch.items():
            option = key.replace("_", "-")
            if key.startswith("-") or option in OWN_SBATCH_OPTIONS:
                allowed = "a long option's name without dashes, other than " + ", ".join(sorted(OWN_SBATCH_OPTIONS))
                raise mistake(("sbatch", key), key, allowed)
            if value is None or value is False:
                raise mistake(("sbatch", key), value, "text, a number or true", "leave the option out instead")
            if isinstance(value, str):
                _check_line(("sbatch", key), value)
        for name, text in self.environment.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise mistake(("environment", name), name, "letters, digits and _ in a variable's name")
            if text:
                _check_line(("environment", name), text)
        if self.mode.by != "none" and self.gpu_vendor != "amd":
            raise mistake(("mode", "by"), self.mode.by, "none where gpu_vendor is not amd", "only AMD GPUs have modes")
        return self


def _check_line(key: tuple[str, ...], text: str) -> None:
    if not text or CONTROL_CHARACTER.search(text):
        raise mistake(key, text, "text of one line, without control characters")


class RunConfig(Strict):
    """One submission: how much, where and on what data."""

    nodes: Positive = 1
    mode: PartitionMode | None = None
    workers_per_node: Positive | None = None
    workers_per_gpu: Positive | None = None  # several on each logical GPU that is there; without workers_per_node
    data: Path | None = None
    # where submit was called: modules of the user's own are imported from here
    working_folder: Path | None = None


class StudyFile(Strict):
    """``study.yaml`` in a study folder: everything a job needs to know. ``cluster`` is None on this machine alone."""

    version: Literal[1] = 1
    name: Line
    study: StudyConfig
    run: RunConfig
    cluster: ClusterConfig | None = None
    # what the objective declares: parameters that the study neither searches nor fixes, and what its value is
    defaults: dict[Line, Choice] = {}
    value_name: Line = "value"
