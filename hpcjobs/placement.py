"""A worker takes its place on the node, and proves it before it takes a trial: one device, nobody else's; its cores.

The node's agent lists the devices once, in its folder on the node's own disk; workers look themselves up in that list,
so that 64 of them need not start a management library each. What the runtime itself says is asked where that is cheap.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcjobs.cores import format_cpu_list
from hpcjobs.logical_gpu import LogicalGpu
from hpcjobs.objective import resolve
from hpcjobs.owners import node_name, process_alive, process_start
from hpcjobs.paths import write_atomically
from hpcjobs.spec import WorkerSpec

if TYPE_CHECKING:
    from hpcjobs.plan import Plan

VISIBLE_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


class UnfitNodeError(RuntimeError):
    """The node is not what was asked for: its GPUs are in another mode, or there are none."""


class PlacementError(RuntimeError):
    """A worker is not where it should be. The message names the cause and what to do; no trial was taken."""


def check_mode(plan: Plan) -> None:
    """Raises UnfitNodeError if the node is not in the mode that the plan asks for."""
    if plan.mode is None:
        return
    from hpcjobs import partition

    found = partition.current_mode()
    if found != plan.mode:
        raise UnfitNodeError(
            f"{node_name()}: the GPUs are in mode {found or 'unknown'}, the study asks for {plan.mode}. "
            "No trial was begun. Did the prolog set the mode? Look at its log on the node, or submit without --mode."
        )


# ---- what the agent writes down ----


@dataclass(frozen=True)
class DeviceList:
    """The devices of a node as its agent found them. ``kfd``: GPUs that the kernel's driver showed then, if any."""

    names: dict[str, str]  # the value of the *_VISIBLE_DEVICES variable -> identity
    kfd: int | None = None

    @staticmethod
    def path(node_folder: Path) -> Path:
        return node_folder / "devices.json"

    @classmethod
    def of(cls, gpus: Sequence[LogicalGpu]) -> DeviceList:
        return cls({gpu.visible_by[1]: gpu.identity for gpu in gpus}, kfd_gpus())

    def write(self, node_folder: Path) -> None:
        write_atomically(self.path(node_folder), json.dumps(vars(self)), durable=False)

    @classmethod
    def read(cls, node_folder: Path) -> DeviceList:
        return cls(**json.loads(cls.path(node_folder).read_bytes()))


def kfd_gpus(nodes: Path = KFD_NODES) -> int | None:
    """Logical GPUs that AMD's kernel driver shows; None without that driver. CPUs are nodes with a gpu_id of 0."""
    try:
        ids = [(node / "gpu_id").read_text().strip() for node in nodes.iterdir()]
    except OSError:
        return None
    return sum(number != "0" for number in ids)


# ---- the worker ----


def take_place(spec: WorkerSpec) -> None:
    """Give this process its device, cores and caches; before anything imports torch.

    Raises:
        PlacementError: the process may not run on all of its cores.
    """
    for name in VISIBLE_VARIABLES:
        # the job's list counts other devices than the node really has, and two lists at once filter each other
        os.environ.pop(name, None)
    os.environ.update(spec.environment)
    if not spec.cores:
        return
    wanted = format_cpu_list(spec.cores)
    try:
        os.sched_setaffinity(0, spec.cores)
    except OSError as error:
        raise PlacementError(f"this process may not run on its CPUs {wanted} ({error.strerror}); {_CPUSET}") from None
    # the kernel silently leaves out what a cpuset forbids
    found = os.sched_getaffinity(0)
    if found != set(spec.cores):
        raise PlacementError(f"of its CPUs {wanted} this process may use {format_cpu_list(found)} alone; {_CPUSET}")


_CPUSET = (
    "its step has fewer CPUs than the node's agent: let steps span the node (no --exact, --cpu-bind or --cpus-per-task "
    "in the profile's srun options)"
)


def load_objective(name: str, working_folder: Path | None) -> Callable[..., Any]:
    """Import ``module:function``; the folder in which submit was called is searched too.

    A function may name in an attribute ``imports`` the modules that it imports when it runs. They are imported here, so
    that what they do to the process shows before a trial is taken.
    """
    if working_folder is not None and str(working_folder) not in sys.path:
        sys.path.insert(0, str(working_folder))
    function = resolve(name)
    for module in getattr(function, "imports", ()):
        importlib.import_module(module)
    return function


def check_place(spec: WorkerSpec, node_folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Prove that this process is where ``spec`` says, after the objective was imported.

    Raises:
        PlacementError: for the first thing that is wrong.
    """
    found = os.sched_getaffinity(0)
    if spec.cores and found != set(spec.cores):
        raise PlacementError(
            f"importing the objective changed the CPUs of this process from {format_cpu_list(spec.cores)} to "
            f"{format_cpu_list(found)}; look for OMP_PROC_BIND, GOMP_CPU_AFFINITY or KMP_AFFINITY in the environment, "
            "and for sched_setaffinity in the modules that it imports"
        )
    if not spec.has_gpu:
        return
    devices = DeviceList.read(node_folder)
    _check_variables(spec, environ)
    identity = _one_device(spec, devices, environ)
    _check_runtime()
    if devices.kfd is not None and (now := kfd_gpus()) != devices.kfd:
        raise PlacementError(
            f"the driver shows {now} logical GPUs, and showed {devices.kfd} when the node's agent looked; "
            "something changed the partition mode under this job; the node must be exclusive (exclusive: true)"
        )
    _claim(spec, node_folder, identity)


def _check_variables(spec: WorkerSpec, environ: Mapping[str, str]) -> None:
    given = {name: environ[name] for name in VISIBLE_VARIABLES if name in environ}
    text = " and ".join(f"{name}={value}" for name, value in given.items()) or "none of them"
    if len(given) != 1:
        raise PlacementError(
            f"exactly one of {', '.join(VISIBLE_VARIABLES)} must be set, found {text}: each filters what the other "
            "leaves; remove them from the profile's environment and from the objective's modules"
        )
    (name,) = given
    if given[name] != spec.environment.get(name):
        wanted = next((f"{n}={v}" for n, v in spec.environment.items() if n in VISIBLE_VARIABLES), "no device")
        raise PlacementError(f"importing the objective changed the visible device from {wanted} to {text}")


def _one_device(spec: WorkerSpec, devices: DeviceList, environ: Mapping[str, str]) -> str:
    name, value = next((name, environ[name]) for name in VISIBLE_VARIABLES if name in environ)
    asked = [part.strip() for part in value.split(",") if part.strip()]
    known = [part for part in asked if part in devices.names]
    if len(asked) != 1 or len(known) != 1:
        raise PlacementError(
            f"exactly one device must be visible, but {name}={value} shows {len(known)} of the "
            f"{len(devices.names)} logical GPUs that this node has ({_shortened(list(devices.names))}); see: "
            "python -m hpcjobs.partition show"
        )
    return devices.names[known[0]]


def _shortened(names: list[str]) -> str:
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else ", ".join(names)


def _check_runtime() -> None:
    count = runtime_devices()
    if count is not None and count != 1:
        shown = ", ".join(f"{name}={os.environ[name]}" for name in VISIBLE_VARIABLES if name in os.environ)
        raise PlacementError(
            f"the GPU runtime shows {count} devices to this process with {shown}; allowed: exactly one"
            + ("; is this a PyTorch build for the GPUs of this node?" if count == 0 else "")
        )


def runtime_devices() -> int | None:
    """Devices that the runtime shows to this process; None where asking would load what the objective does not.

    A second copy of the HIP runtime beside PyTorch's own can break both, so that AMD's is asked through PyTorch alone.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        return int(torch.cuda.device_count())
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return 0
    return number.value


def _claim(spec: WorkerSpec, node_folder: Path, identity: str) -> None:
    """Take the device for this worker. ``spec.share`` workers may have the same one; a restarted worker takes its own
    claim again, and that of a process that has ended is void."""
    mine = json.dumps({"worker": spec.worker, "pid": os.getpid(), "start": process_start(os.getpid())})
    word = hashlib.sha256(identity.encode()).hexdigest()[:16]
    others = []
    draft = node_folder / f"claim_{os.getpid()}"
    draft.write_text(mine)
    try:
        for slot in range(spec.share):
            path = node_folder / f"claim_{word}_{slot}"
            try:
                os.link(draft, path)  # a file that exists is complete
                return
            except FileExistsError:
                holder = json.loads(path.read_bytes())
            if holder["worker"] == spec.worker or not process_alive(holder["pid"], holder["start"]):
                write_atomically(path, mine, durable=False)
                return
            others.append(f"worker {holder['worker']} (process {holder['pid']})")
    finally:
        draft.unlink()
    raise PlacementError(
        f"the device {identity} ({spec.device}) belongs to {' and '.join(others)} already; two workers must not share "
        "it unless that was asked for (--workers-per-gpu)"
    )
