"""AMD GPUs through AMD SMI: what is there, and the switch of the compute partition mode. Nothing else calls ``amdsmi``.

The calls and their error codes are those of ROCm's AMD SMI library 6.3 to 7.0. A mode is set per GPU, on the handle of
its partition 0; then every handle is stale, so that the library is started anew and the devices are listed again.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcjobs.logical_gpu import PARTITIONS, LogicalGpu, NodeDevices

log = logging.getLogger(__name__)

# amdsmi_status_t
INVAL, NOT_SUPPORTED, RETRY, NO_PERM, BUSY, SETTING_UNAVAILABLE = 1, 2, 9, 10, 30, 55
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 4.0
# a set that reports success and leaves the mode as it was is tried again so often
MOST_UNCHANGED = 3


class AmdUnavailableError(Exception):
    """There is no usable AMD SMI here: no package, no library, or no GPU behind it."""


class ModeError(Exception):
    """A partition mode could not be set or verified. The message names the GPU, what it answered and what to do."""


@dataclass(frozen=True)
class _Device:
    """One processor handle of AMD SMI; valid until the library is started anew."""

    handle: Any
    bdf: str
    partition_id: int
    order: int  # the runtime's order

    @property
    def parent(self) -> str:
        """The PCI address without its function, which tells the partitions of one GPU apart."""
        return self.bdf.rpartition(".")[0]


class AmdSmi:
    """An initialised AMD SMI library; a context manager.

    Raises:
        AmdUnavailableError: on entry, when there is none.
    """

    def __enter__(self) -> AmdSmi:
        self._smi = _import_amdsmi()
        try:
            self._start()
        except self._smi.AmdSmiException as error:
            raise AmdUnavailableError(f"AMD SMI does not start: {_text(error)}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()

    def _start(self) -> None:
        self._smi.amdsmi_init(self._smi.AmdSmiInitFlags.INIT_AMD_GPUS)
        self.devices = list(self._list())

    def restart(self) -> None:
        """List the devices anew; every handle from before is void.

        Raises:
            ModeError: the library does not start again.
        """
        try:
            self._smi.amdsmi_shut_down()
            self._start()
        except self._smi.AmdSmiException as error:
            raise ModeError(
                f"AMD SMI does not list the devices after a switch ({_text(error)}); see dmesg, reboot the node"
            ) from error

    def _list(self) -> Iterator[_Device]:
        for position, handle in enumerate(self._smi.amdsmi_get_processor_handles()):
            bdf = self._smi.amdsmi_get_gpu_device_bdf(handle)
            kfd = self._ask("amdsmi_get_gpu_kfd_info", handle) or {}
            enumeration = self._ask("amdsmi_get_gpu_enumeration_info", handle) or {}
            if not _accessible(enumeration.get("drm_render")):
                continue
            partition_id = kfd.get("current_partition_id")
            if not isinstance(partition_id, int):
                partition_id = int(bdf.rpartition(".")[2], 16)
            orders = (enumeration.get("hip_id"), kfd.get("node_id"), position)
            yield _Device(handle, bdf, partition_id, next(order for order in orders if isinstance(order, int)))

    def _ask(self, call: str, *arguments: Any) -> Any:
        """The library's answer, or None where it has none ("N/A", an error, or a call that this version lacks)."""
        function = getattr(self._smi, call, None)
        if function is None:
            return None
        try:
            answer = function(*arguments)
        except self._smi.AmdSmiLibraryException:
            return None
        return None if answer == "N/A" else answer

    def parents(self) -> list[str]:
        """The physical GPUs by PCI address, in the order of the handles."""
        return list(dict.fromkeys(device.parent for device in self.devices))

    def _primary(self, parent: str) -> _Device | None:
        """Partition 0, the only one that answers for its GPU's mode."""
        return next((d for d in self.devices if d.parent == parent and d.partition_id == 0), None)

    def mode(self, parent: str) -> str | None:
        """The compute mode of a GPU in lower case, or None if it does not answer."""
        primary = self._primary(parent)
        answer = primary and self._ask("amdsmi_get_gpu_compute_partition", primary.handle)
        return answer.lower() if answer else None

    def set_mode(self, parent: str, mode: str) -> int:
        """Ask one GPU for a mode once and list the devices anew. Returns the library's status, 0 for success."""
        primary = self._primary(parent)
        if primary is None:
            raise ModeError(
                f"GPU {parent} shows no partition 0, so that its mode cannot be set; reset or reboot the node"
            )
        try:
            kind = self._smi.AmdSmiComputePartitionType[mode.upper()]
            self._smi.amdsmi_set_gpu_compute_partition(primary.handle, kind)
        except self._smi.AmdSmiLibraryException as error:
            return int(error.get_error_code())
        finally:
            self.restart()
        return 0

    def node(self) -> NodeDevices:
        """Everything that is known of the node's devices now."""
        parents = self.parents()
        ordered = sorted(self.devices, key=lambda device: device.order)
        primaries = [primary.handle for primary in map(self._primary, parents) if primary]
        first = primaries[0] if primaries else None
        memory = first and self._ask("amdsmi_get_gpu_memory_partition", first)
        asic = first and self._ask("amdsmi_get_gpu_asic_info", first)
        return NodeDevices(
            vendor="amd",
            gpus=tuple(self._logical_gpu(rank, device, parents) for rank, device in enumerate(ordered)),
            modes=tuple(self.mode(parent) for parent in parents),
            memory_mode=memory.lower() if memory else None,
            supported=self._supported(first),
            model=str(asic["market_name"]) if asic else "",
        )

    def _logical_gpu(self, rank: int, device: _Device, parents: list[str]) -> LogicalGpu:
        siblings = [other for other in self.devices if other.parent == device.parent]
        enumeration = self._ask("amdsmi_get_gpu_enumeration_info", device.handle) or {}
        numa = self._ask("amdsmi_topo_get_numa_node_number", device.handle)
        return LogicalGpu(
            index=rank,
            gpu=parents.index(device.parent),
            partition_id=device.partition_id,
            bdf=device.bdf,
            uuid=enumeration.get("hip_uuid") or self._ask("amdsmi_get_gpu_device_uuid", device.handle) or "",
            visible_by=("ROCR_VISIBLE_DEVICES", str(rank)),
            numa_node=numa if isinstance(numa, int) and numa < 0x8000_0000 else None,
            memory_gib=self._memory_gib(device, siblings),
        )

    def _memory_gib(self, device: _Device, siblings: list[_Device]) -> float | None:
        """Its own answer if every partition gives one, else an equal share of what partition 0 says for the GPU."""
        vram = self._smi.AmdSmiMemoryType.VRAM
        answers = [self._ask("amdsmi_get_gpu_memory_total", other.handle, vram) for other in siblings]
        own = answers[siblings.index(device)]
        if len(siblings) > 1 and not all(answers):
            count = PARTITIONS.get(self.mode(device.parent) or "", len(siblings))
            own = max((answer for answer in answers if answer), default=0) / count
        return round(own / 2**30, 1) if own else None

    def _supported(self, primary: Any) -> tuple[str, ...]:
        config = primary and self._ask("amdsmi_get_gpu_accelerator_partition_profile_config", primary)
        return tuple(profile["profile_type"].lower() for profile in config["profiles"]) if config else ()


def _import_amdsmi() -> ModuleType:
    """The package resolves its library's symbols at import: without the library that is a KeyError, with another
    version of it an AttributeError, and it prints instead of raising."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            import amdsmi
    except ModuleNotFoundError:
        raise AmdUnavailableError("the package amdsmi is not installed: pip install 'hpcjobs[amd]'") from None
    except (ImportError, KeyError, AttributeError, OSError) as error:
        raise AmdUnavailableError(
            "amdsmi finds no libamd_smi.so of its own version; set ROCM_PATH, and install the amdsmi of the node's "
            f"ROCm release ({type(error).__name__}: {error})"
        ) from error
    module: ModuleType = amdsmi
    return module


def _text(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()


def _accessible(drm_render: object) -> bool:
    """Whether this process may open the device: a job's cgroup hides GPUs from the runtime, but not from AMD SMI."""
    path = Path(f"/dev/dri/renderD{drm_render}")
    if not isinstance(drm_render, int) or not path.exists():
        return True
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:  # a node of the filesystem without a device behind it says nothing of permissions
        return True
    return True


def set_mode(
    mode: str,
    *,
    patience_s: float = 60.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> NodeDevices:
    """Put every GPU of this node into a compute partition mode, verify it, and return what is there then.

    Args:
        mode: ``spx``, ``dpx``, ``tpx``, ``qpx`` or ``cpx``. GPUs that are in it already are left alone.
        patience_s: how long GPUs may answer BUSY (a process that has just ended is still being torn down).

    Raises:
        ModeError: a GPU refuses, stays busy, or reports success without a change.
        AmdUnavailableError: no AMD SMI.
    """
    if mode not in PARTITIONS:
        raise ModeError(f"mode {mode!r} is unknown; allowed: {', '.join(PARTITIONS)}")
    deadline = clock() + patience_s
    with AmdSmi() as smi:
        if not smi.parents():
            raise ModeError("AMD SMI shows no GPU on this node")
        for parent in smi.parents():
            _set_one(smi, parent, mode, deadline, sleep, clock)
        devices = smi.node()
    wrong = [f"GPU {gpu} is in {found}" for gpu, found in enumerate(devices.modes) if found != mode]
    if wrong:
        raise ModeError(f"after setting {mode}: {', '.join(wrong)}")
    return devices


def _set_one(
    smi: AmdSmi, parent: str, mode: str, deadline: float, sleep: Callable[[float], None], clock: Callable[[], float]
) -> None:
    pause_s, unchanged = FIRST_PAUSE_S, 0
    while smi.mode(parent) != mode:
        status = smi.set_mode(parent, mode)
        if status == 0 and smi.mode(parent) == mode:
            return
        if status == 0:
            unchanged += 1
            if unchanged == MOST_UNCHANGED:
                raise ModeError(f"GPU {parent} reports success for {mode} and stays in {smi.mode(parent)}; see dmesg")
        elif status not in (BUSY, RETRY):
            raise ModeError(f"GPU {parent} refuses {mode}: {_explain(status)}")
        elif clock() + pause_s > deadline:
            raise ModeError(f"GPU {parent} stays busy: a process uses it, or its driver is stuck; see amd-smi process")
        log.info("GPU %s answers %s to %s; next try in %.2f s", parent, status, mode, pause_s)
        sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _explain(status: int) -> str:
    reasons = {
        NO_PERM: "no permission (NO_PERM); it takes root on bare metal, not in a container or virtual machine",
        NOT_SUPPORTED: "it has no partition modes (NOT_SUPPORTED)",
        INVAL: "it does not have this mode (INVAL)",
        SETTING_UNAVAILABLE: "not available with its present memory mode, or not at all (SETTING_UNAVAILABLE)",
    }
    return reasons.get(status, f"AMD SMI status {status}; see dmesg")
