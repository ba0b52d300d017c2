"""What a machine is, as far as a profile needs to know: Slurm's partitions and limits, devices, modules, Python.

Reads what ``sinfo``, ``scontrol`` and ``sacctmgr`` print; nothing is submitted. The questions are few and cheap.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from hpcjobs.config import MODES, PartitionMode
from hpcjobs.slurm_control import TIMEOUT_S

_AMD = ("mi50", "mi100", "mi200", "mi210", "mi250", "mi300", "mi325", "mi350", "mi355", "amd", "gfx")
_PARTITION_FIELDS = "%P|%a|%l|%D|%c|%m|%G|%f"


@dataclass(frozen=True)
class SlurmPartition:
    """One kind of node of a Slurm partition, as sinfo groups them. Memory in GB, time in minutes (None: no limit)."""

    name: str
    default: bool
    up: bool
    time_min: int | None
    nodes: int
    cores: int
    mem_gb: int
    gres: str
    features: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """GPUs of a node, of all types."""
        return sum(int(number) for _, number in _gpu_entries(self.gres))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(kind for kind, _ in _gpu_entries(self.gres) if kind)

    @property
    def vendor(self) -> str:
        """amd, nvidia or none; of an unnamed type what this machine's own tools suggest."""
        if not self.gpus:
            return "none"
        words = " ".join([*self.gpu_types, *self.features]).lower()
        if any(name in words for name in _AMD):
            return "amd"
        if self.gpu_types or shutil.which("nvidia-smi"):
            return "nvidia"
        return "amd" if Path("/opt/rocm").exists() else "nvidia"

    @property
    def modes(self) -> tuple[PartitionMode, ...]:
        """Partition modes that jobs can ask for, if the nodes' features name any."""
        return tuple(mode for mode in MODES if mode in {feature.lower() for feature in self.features})


@dataclass(frozen=True)
class Site:
    """Everything found. ``problems`` are questions that were not answered, and why.

    ``slurm`` is its version; ``silence`` why Slurm, whose commands are here, answers nothing at all. ``rocm`` is the
    release of this machine, ``amdsmi`` that of the Python package.
    """

    slurm: str | None = None
    silence: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    partitions: list[SlurmPartition] = field(default_factory=list)
    accounts: list[str] = field(default_factory=list)
    accounting: bool = False
    modules: bool = False
    gpu_modules: list[str] = field(default_factory=list)
    container: str | None = None
    torch: str | None = None
    python: str = ""
    rocm: str | None = None
    amdsmi: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def max_array(self) -> int | None:
        text = self.settings.get("MaxArraySize", "")
        return int(text) if text.isdigit() else None

    def best_partition(self) -> SlurmPartition | None:
        """The Slurm partition to begin with: one that is up, with the most GPUs in all, the default one of equals."""
        usable = [partition for partition in self.partitions if partition.up]
        return max(usable, key=lambda p: (p.gpus * p.nodes, p.default, p.nodes), default=None)


def look(python: str | None = None) -> Site:
    """Ask this machine. Never raises for what is missing: that is an answer, too."""
    problems: list[str] = []
    errors: dict[str, str] = {}

    def ask(*command: str, timeout_s: float = TIMEOUT_S) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except FileNotFoundError:
            return ""
        except (OSError, subprocess.TimeoutExpired) as error:
            errors[command[0]] = str(error)
            problems.append(f"{command[0]}: {error}")
            return ""
        if done.returncode != 0:
            errors[command[0]] = (done.stderr or done.stdout).strip()
            said = errors[command[0]].splitlines()  # the first line is the cause, mostly
            problems.append(f"{' '.join(command[:2])}: {said[0][:200] if said else f'exit code {done.returncode}'}")
            return ""
        return done.stdout

    settings = parse_settings(ask("scontrol", "show", "config"))
    partitions = parse_partitions(ask("sinfo", "--noheader", f"--format={_PARTITION_FIELDS}"))
    silence, accounts, version = "", "", None
    if {"scontrol", "sinfo"} <= errors.keys():
        silence = why_silent(errors["scontrol"])
        problems.clear()
    else:
        user = f"user={getpass.getuser()}"
        accounts = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", user, "format=account")
        version = re.search(r"(\d+\.\d+\.\d+)", ask("sbatch", "--version"))
    known = ask("bash", "-lc", "type module >/dev/null 2>&1 && module --terse avail 2>&1 || true", timeout_s=30)
    imported = ask(python or sys.executable, "-c", "import torch; print(torch.__version__)", timeout_s=120)
    return Site(
        slurm=version.group(1) if version else None,
        silence=silence,
        settings=settings,
        partitions=partitions,
        accounts=sorted({line.strip() for line in accounts.splitlines() if line.strip()}),
        accounting=settings.get("AccountingStorageType", "") not in ("", "accounting_storage/none", "(null)"),
        modules=bool(known.strip()),
        gpu_modules=parse_modules(known),
        container=next((name for name in ("apptainer", "singularity") if shutil.which(name)), None),
        torch=imported.strip().splitlines()[-1] if imported.strip() else None,
        python=f"{platform.python_version()} ({python or sys.executable})",
        rocm=rocm_release(Path(os.environ.get("ROCM_PATH") or "/opt/rocm")),
        amdsmi=_package_version("amdsmi"),
        problems=[problem for problem in problems if "import torch" not in problem],
    )


def rocm_release(folder: Path) -> str | None:
    """As ROCm writes it down: ``6.4.1``; None where there is none."""
    try:
        match = re.match(r"[0-9.]+", (folder / ".info" / "version").read_text())
    except OSError:
        return None
    return match.group() if match else None


def _package_version(name: str) -> str | None:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


def why_silent(said: str) -> str:
    """What Slurm's commands say where none of them gets an answer, in words that tell a person where to look."""
    if "configuration source" in said:
        return "its commands find no slurm.conf here, and none by DNS"
    return f"its commands get no answer: {said.splitlines()[0][:200] if said else 'they say nothing'}"


def parse_settings(text: str) -> dict[str, str]:
    """``scontrol show config`` as a mapping."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def parse_partitions(text: str) -> list[SlurmPartition]:
    """sinfo's lines in the format that :func:`look` asks for; lines that do not fit it are passed over."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 8:
            continue
        name, state, time, nodes, cores, memory, gres, features = fields
        found.append(
            SlurmPartition(
                name=name.rstrip("*"),
                default=name.endswith("*"),
                up=state == "up",
                time_min=parse_time(time),
                nodes=_number(nodes),
                cores=_number(cores),
                mem_gb=_number(memory) // 1024,
                gres="" if gres in ("(null)", "N/A") else gres,
                features=() if features in ("(null)", "N/A") else tuple(features.split(",")),
            )
        )
    return found


def parse_time(text: str) -> int | None:
    """Minutes of Slurm's ``[D-]HH:MM:SS`` or ``MM:SS``; None for infinite."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return max(1, (days * 24 + hours) * 60 + minutes)


def parse_modules(text: str) -> list[str]:
    """Names of modules for GPUs and Python, newest last of each, from ``module --terse avail``."""
    wanted = re.compile(r"(rocm|amd|cuda|cpe|partition|gcc|python|cray-python|pytorch)[^\s:]*/[^\s:]+$", re.IGNORECASE)
    return [line.strip().removesuffix("(default)") for line in text.splitlines() if wanted.match(line.strip())]


def _gpu_entries(gres: str) -> list[tuple[str, str]]:
    """(type, number) of each kind of GPU in ``gpu:mi300x:8(S:0-1),gpu:4``."""
    plain = re.sub(r"\([^)]*\)", "", gres)
    return re.findall(r"\bgpu(?::([A-Za-z][\w.-]*))?:(\d+)", plain)


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else 0


def free_files(folder: Path) -> int | None:
    """How many more files the filesystem can hold; None where it does not say."""
    found = os.statvfs(folder)
    return found.f_favail if found.f_files else None
