"""Which devices and cores each worker of a node gets."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcjobs.plan import Plan

log = logging.getLogger("hpcjobs.node")


@dataclass(frozen=True)
class Place:
    """Where one worker runs. ``environment`` makes exactly its device visible."""

    device: str = ""  # empty: no GPU
    environment: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A GPU as this module needs it: its name, what makes it visible, and the cores beside it (empty: unknown)."""

    name: str
    variable: str
    value: str
    cores: tuple[int, ...] = ()


def find_gpus(vendor: str | None) -> list[Gpu]:
    """The logical GPUs of this node. ``vendor`` None: look for AMD's, then NVIDIA's."""
    if vendor in ("amd", None):
        found = _amd()
        if found or vendor == "amd":
            return found
    if vendor in ("nvidia", None):
        return _nvidia()
    return []


def _amd() -> list[Gpu]:
    try:
        from hpcjobs import partition
    except ImportError:
        return []

    gpus = partition.discover()
    return [
        Gpu(f"GPU {gpu.index}", "ROCR_VISIBLE_DEVICES", str(gpu.index), tuple(getattr(gpu, "cores", ()) or ()))
        for gpu in gpus
    ]


def _nvidia() -> list[Gpu]:
    """The devices that this job was given, else all that the driver lists."""
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if inherited:
        values = [value.strip() for value in inherited.split(",")]
    elif shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        values = listed.stdout.split() if listed.returncode == 0 else []
    else:
        values = []
    return [Gpu(f"GPU {value}", "CUDA_VISIBLE_DEVICES", value) for value in values]


def places(plan: Plan, gpus: Sequence[Gpu], cores: Sequence[int]) -> list[Place]:
    """One place per worker: the plan's number of them, or one per logical GPU that is there.

    Workers without a GPU of their own share them in turn. Cores beside the GPU (on its NUMA node) are taken first, and
    no core is given twice unless there are fewer cores than workers.
    """
    count = len(gpus) if plan.workers_by_devices and gpus else plan.workers_per_node
    shares = _share_cores([gpus[i % len(gpus)].cores if gpus else () for i in range(count)], cores)
    found = []
    for worker in range(count):
        if not gpus:
            found.append(Place(cores=shares[worker]))
            continue
        gpu = gpus[worker % len(gpus)]
        found.append(Place(gpu.name, {gpu.variable: gpu.value}, shares[worker]))
    return found


def _share_cores(near: Sequence[Sequence[int]], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Equal shares of ``cores``; each worker takes from those near its GPU, then from what is left."""
    each = len(cores) // len(near)
    if each == 0:
        return [tuple(cores)] * len(near)
    free = dict.fromkeys(cores)
    shares: list[list[int]] = []
    for wanted in near:
        share = [core for core in wanted if core in free][:each]
        for core in share:
            del free[core]
        shares.append(share)
    left = iter(list(free))
    for share in shares:
        while len(share) < each:
            share.append(next(left))
    return [tuple(sorted(share)) for share in shares]
