"""Which devices and cores each worker of a node gets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcjobs.cores import Cpu, assign_cores
from hpcjobs.logical_gpu import LogicalGpu
from hpcjobs.partition import discover
from hpcjobs.plan import Plan

log = logging.getLogger("hpcjobs.node")


@dataclass(frozen=True)
class Place:
    """Where one worker runs. ``environment`` makes exactly its device visible; ``threads`` is its share of the cores
    where several workers have the same ones."""

    device: str = ""  # empty: no GPU
    environment: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    threads: int = 1


def find_gpus(vendor: str | None) -> tuple[LogicalGpu, ...]:
    """The logical GPUs of this node that the job may use. ``vendor`` None: look for AMD's, then NVIDIA's."""
    devices = discover(vendor)
    if devices.note:
        log.info("no GPU: %s", devices.note)
    if devices.missing:
        log.warning("%d logical GPUs of mode %s are missing on this node", devices.missing, devices.mode)
    return devices.gpus


def places(plan: Plan, gpus: Sequence[LogicalGpu], cpus: Sequence[Cpu]) -> list[Place]:
    """One place per worker: the plan's number of them, or ``workers_per_gpu`` per logical GPU that is there.

    Fewer workers than GPUs are spread over all physical GPUs; more of them share the GPUs in turn. The cores
    are those of :func:`hpcjobs.cores.assign_cores`.
    """
    count = plan.workers_per_gpu * len(gpus) if plan.workers_by_devices and gpus else plan.workers_per_node
    spread = count < len(gpus)
    own = [
        gpus[worker * len(gpus) // count if spread else worker % len(gpus)] if gpus else None for worker in range(count)
    ]
    reserved = plan.cluster.reserved_cpus if plan.cluster else ()
    shares = assign_cores([gpu.numa_node if gpu else None for gpu in own], cpus, reserved)
    sharing = Counter(shares)
    return [
        Place(
            device=f"GPU {gpu.index}" if gpu else "",
            environment=gpu.environment if gpu else {},
            cores=cores,
            threads=max(1, len(cores) // sharing[cores]),
        )
        for gpu, cores in zip(own, shares, strict=True)
    ]


def worker_environment(plan: Plan, place: Place, node_folder: Path, worker: int) -> dict[str, str]:
    """What a worker's process gets: the profile's variables, its threads, its device, caches of its own."""
    # the threads of the cores that are really there, unless the site's profile says otherwise
    threads = {"OMP_NUM_THREADS": str(place.threads)}
    own = plan.cluster.environment if plan.cluster else {}
    environment = {**plan.environment, **threads, **own, **place.environment}
    if place.device:
        # several processes on one MIOpen database damage it
        cache = str(node_folder / f"miopen_{worker:03d}")
        environment |= {"MIOPEN_USER_DB_PATH": cache, "MIOPEN_CUSTOM_CACHE_DIR": cache}
    return environment
