"""What a node has for its workers: logical GPUs, which are whole GPUs or partitions of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# logical GPUs of one MI300X in each compute partition mode; MI300A has SPX, TPX and CPX with 1, 3 and 6
PARTITIONS = {"spx": 1, "dpx": 2, "tpx": 3, "qpx": 4, "cpx": 8}


@dataclass(frozen=True)
class LogicalGpu:
    """One device as a process can be given it.

    Attributes:
        index: its place among the devices that the runtime (ROCR or CUDA) shows to a process without restrictions.
        gpu: the physical GPU that it is (a part of), counted from 0.
        partition_id: which part of that GPU; 0 where the GPU is whole.
        bdf: PCI address, such as ``0000:05:00.3``; all MIG instances of a GPU share one.
        uuid: the maker's identifier; all AMD partitions of a GPU may share one.
        visible_by: the one variable that shows a process this device alone, and its value.
        numa_node: the NUMA node beside the GPU, or None where the machine does not say.
        memory_gib: memory of its own, or None where the library does not say.
    """

    index: int
    gpu: int
    partition_id: int
    bdf: str
    uuid: str
    visible_by: tuple[str, str]
    numa_node: int | None = None
    memory_gib: float | None = None

    @property
    def environment(self) -> dict[str, str]:
        return dict([self.visible_by])

    @property
    def identity(self) -> str:
        """Different for any two logical GPUs of a node, and the same for every process that looks."""
        return f"{self.uuid or self.bdf}/{self.partition_id}"


@dataclass(frozen=True)
class NodeDevices:
    """The logical GPUs of this node, in the runtime's order, and what is known of their modes.

    Attributes:
        modes: compute partition mode of each physical GPU in lower case; None where it does not answer. Empty if the
            GPUs have no modes.
        memory_mode: ``nps1``, ``nps2`` ... or None.
        supported: the compute modes that the GPUs offer.
        note: why there is nothing, or what is odd; empty if all is well.
    """

    vendor: Literal["amd", "nvidia", "none"]
    gpus: tuple[LogicalGpu, ...] = ()
    modes: tuple[str | None, ...] = ()
    memory_mode: str | None = None
    supported: tuple[str, ...] = ()
    model: str = ""
    note: str = ""

    @property
    def mode(self) -> str | None:
        """The mode that all GPUs are in, or None: they have none, differ, or do not answer."""
        return self.modes[0] if len(set(self.modes)) == 1 else None

    @property
    def missing(self) -> int:
        """Logical GPUs that the modes promise and that are not there (63 of 64: the kernel's limit on devices)."""
        return max(0, sum(PARTITIONS.get(mode or "", 0) for mode in self.modes) - len(self.gpus))
