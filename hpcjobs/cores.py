"""Which CPU cores each worker of a node gets: disjoint sets, near the worker's GPU."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/devices/system")
# no machine has a CPU of a larger number; a slip of the pen must not fill the memory
LARGEST = 1_000_000


@dataclass(frozen=True)
class Cpu:
    """A hardware thread: its number for the kernel, the physical core that it is a thread of, and its NUMA node."""

    number: int
    core: tuple[int, int]  # package, core
    numa_node: int | None = None


def allowed_cpus(sysfs: Path = SYSFS) -> list[Cpu]:
    """The CPUs that this process may run on, with what the kernel says of each."""
    return describe_cpus(os.sched_getaffinity(0), sysfs)


def describe_cpus(numbers: Iterable[int], sysfs: Path = SYSFS) -> list[Cpu]:
    """Core and NUMA node of each CPU; one that the kernel does not describe counts as a core of its own."""
    node_of = {}
    for folder in (sysfs / "node").glob("node[0-9]*"):
        for number in parse_cpu_list((folder / "cpulist").read_text()):
            node_of[number] = int(folder.name.removeprefix("node"))
    return [
        Cpu(number, _core(sysfs / "cpu" / f"cpu{number}", number), node_of.get(number)) for number in sorted(numbers)
    ]


def _core(folder: Path, number: int) -> tuple[int, int]:
    try:
        package, core = (int((folder / "topology" / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return (-1, number)
    return (package, core)


def parse_cpu_list(text: str) -> list[int]:
    """``0-3,8`` as the kernel and Slurm write it -> [0, 1, 2, 3, 8]. ValueError for anything else."""
    numbers: list[int] = []
    for part in text.strip().split(",") if text.strip() else []:
        begin, _, end = part.partition("-")
        first, last = int(begin), int(end or begin)
        if not first <= last <= LARGEST:
            raise ValueError(f"{part!r} is no range of numbers up to {LARGEST}")
        numbers.extend(range(first, last + 1))
    return numbers


def format_cpu_list(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 3, 8] -> ``0-3,8``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def assign_cores(
    numa_nodes: Sequence[int | None], cpus: Sequence[Cpu], reserved: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Share the CPUs among workers.

    All hardware threads of a core go to one worker. Every worker gets the same number of cores, first from the NUMA
    node of its GPU, then from whatever is left; a remainder stays free for the node's agent. With fewer cores than
    workers all workers of a NUMA node get all of its cores, for the kernel to balance.

    Args:
        numa_nodes: for each worker, the NUMA node of its GPU, or None.
        cpus: what may be used: a job's mask, gaps and all.
        reserved: CPU numbers to leave to the system; their whole core is left out.

    Returns:
        For each worker its CPU numbers, ascending. Without any CPU left, empty tuples: no binding.
    """
    threads: dict[tuple[int, int], list[Cpu]] = defaultdict(list)
    for cpu in cpus:
        threads[cpu.core].append(cpu)
    free = [core for core, members in threads.items() if not any(cpu.number in reserved for cpu in members)]
    near = {core: threads[core][0].numa_node for core in free}
    each = len(free) // len(numa_nodes) if numa_nodes else 0
    if not free:
        return [()] * len(numa_nodes)
    shares = _exclusive(numa_nodes, free, near, each) if each else _shared(numa_nodes, free, near)
    return [tuple(sorted(cpu.number for core in share for cpu in threads[core])) for share in shares]


_Core = tuple[int, int]


def _exclusive(
    numa_nodes: Sequence[int | None], free: list[_Core], near: dict[_Core, int | None], each: int
) -> list[list[_Core]]:
    left = dict.fromkeys(free)
    shares: list[list[_Core]] = []
    for node in numa_nodes:
        share = [core for core in left if node is not None and near[core] == node][:each]
        for core in share:
            del left[core]
        shares.append(share)
    for share in shares:
        for core in list(left)[: each - len(share)]:
            share.append(core)
            del left[core]
    return shares


def _shared(numa_nodes: Sequence[int | None], free: list[_Core], near: dict[_Core, int | None]) -> list[list[_Core]]:
    return [[core for core in free if near[core] == node] or free for node in numa_nodes]
