"""Whether the host is the limit: CPU, memory, storage and idle devices of a node over a stretch of time."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

PROC = Path("/proc")
DRM = Path("/sys/class/drm")
# above these the host is busy; below DEVICE_BUSY a device waits for it
CPU_BUSY, CPU_WAIT, DEVICE_BUSY, STORAGE_WAIT, MEMORY_WAIT, MEMORY_FREE = 0.9, 0.3, 0.8, 0.3, 0.1, 0.05
# an answer to a question that was asked longer ago tells of other work
OLD_ANSWER_S = 10.0
PERIOD_S, SAMPLE_S = 30.0, 6.0


@dataclass(frozen=True)
class Pressure:
    """A node over ``seconds``. Shares are between 0 and 1; None where the kernel or the driver does not tell.

    Attributes:
        cpu_busy: of the CPUs that were looked at.
        cpu_wait, memory_wait, storage_wait: time in which some task waited for it (Linux' pressure stall information).
        memory_free: available memory over all of it.
        page_cache_gb: files kept in memory, such as mapped datasets.
        device_busy: mean over devices and samples.
    """

    seconds: float
    cpus: int
    cpu_busy: float
    memory_free: float
    page_cache_gb: float
    cpu_wait: float | None = None
    memory_wait: float | None = None
    storage_wait: float | None = None
    device_busy: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: round(value, 4) for name, value in asdict(self).items() if value is not None}

    @property
    def limit(self) -> str | None:
        """Which part of the host limits the work, with the figures that say so; None if none does."""
        idle = "" if self.device_busy is None else f", devices idle {1 - self.device_busy:.0%} of the time"
        waiting = self.device_busy is None or self.device_busy < DEVICE_BUSY
        if self.memory_free < MEMORY_FREE or (self.memory_wait or 0.0) > MEMORY_WAIT:
            waited = f", tasks waited for it {self.memory_wait:.0%} of the time" if self.memory_wait is not None else ""
            return f"memory: {self.memory_free:.0%} of it is available{waited}; fewer workers need less"
        if waiting and (self.cpu_busy > CPU_BUSY or (self.cpu_wait or 0.0) > CPU_WAIT):
            waited = f", tasks waited for them {self.cpu_wait:.0%} of the time" if self.cpu_wait is not None else ""
            return f"CPUs: {self.cpu_busy:.0%} of {self.cpus} busy{waited}{idle}; fewer workers or loader threads"
        if waiting and (self.storage_wait or 0.0) > STORAGE_WAIT:
            return f"storage: tasks waited for it {self.storage_wait:.0%} of the time{idle}; data on a local disk helps"
        return None


class HostWatch:
    """Looks at the host from its making to :meth:`end`; devices are sampled at each :meth:`sample`."""

    def __init__(
        self, cpus: Collection[int], device_busy: Callable[[], list[float]] | None = None, proc: Path = PROC
    ) -> None:
        """``device_busy``: the shares of time that the devices were busy lately; None to leave them out."""
        self._cpus, self._proc, self._devices = frozenset(cpus), proc, device_busy
        self._samples: list[float] = []
        self._begun = time.monotonic()
        self._first = self._counters()

    def sample(self) -> None:
        if self._devices is not None:
            self._samples += self._devices()

    def end(self) -> Pressure:
        seconds = max(time.monotonic() - self._begun, 1e-6)
        last = self._counters()
        busy, total = (last[name] - self._first[name] for name in ("busy", "total"))
        memory = _meminfo(self._proc)
        waits = {
            f"{name}_wait": (last[key] - self._first[key]) / (seconds * 1e6)
            for name, key in (("cpu", "cpu"), ("memory", "memory"), ("storage", "io"))
            if key in last and key in self._first
        }
        return Pressure(
            seconds=seconds,
            cpus=len(self._cpus),
            cpu_busy=busy / total if total else 0.0,
            memory_free=memory["MemAvailable"] / memory["MemTotal"],
            page_cache_gb=memory["Cached"] / 2**20,
            device_busy=sum(self._samples) / len(self._samples) if self._samples else None,
            **waits,
        )

    def _counters(self) -> dict[str, float]:
        """Ticks of our CPUs, and microseconds that some task waited."""
        found = {"busy": 0.0, "total": 0.0}
        for line in (self._proc / "stat").read_text().splitlines():
            name, *values = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cpus:
                ticks = [float(value) for value in values[:8]]  # what follows is counted within these
                found["total"] += sum(ticks)
                found["busy"] += sum(ticks) - ticks[3] - ticks[4]  # idle, waiting for storage
        for key in ("cpu", "memory", "io"):
            try:
                some = (self._proc / "pressure" / key).read_text().splitlines()[0]
            except OSError:
                continue
            found[key] = float(some.rpartition("total=")[2])
        return found


class PressureLog:
    """What a node's agent keeps of its host while trainings run: one :class:`Pressure` for each ``PERIOD_S``."""

    def __init__(self, cpus: Collection[int], vendor: str, *, has_gpus: bool) -> None:
        self._cpus, self._has_gpus = cpus, has_gpus
        self._devices = busy_devices(vendor) if has_gpus else None
        self._watch = HostWatch(cpus, self._devices)
        self._begun = self._sampled = time.monotonic()

    def look(self) -> Pressure | None:
        """Call it often; returns the last period's pressure when that has ended."""
        now = time.monotonic()
        if now - self._sampled >= SAMPLE_S:
            self._sampled = now
            self._watch.sample()
        if now - self._begun < PERIOD_S:
            return None
        found = self._watch.end()
        self._watch, self._begun = HostWatch(self._cpus, self._devices), now
        return found if self._has_gpus else on_cpus_alone(found)


def on_cpus_alone(pressure: Pressure) -> Pressure:
    """Where the CPUs are the devices, that they are busy is no sign that something else waits for them."""
    return replace(pressure, device_busy=pressure.cpu_busy)


def _meminfo(proc: Path) -> dict[str, float]:
    """In KiB."""
    rows = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    found = {row[0].rstrip(":"): float(row[1]) for row in rows if len(row) > 1}
    return {"MemAvailable": 0.0, "Cached": 0.0, "MemTotal": 1.0, **found}


def busy_devices(vendor: str) -> Callable[[], list[float]] | None:
    """How to ask the devices of this node how busy they are; None where they cannot be asked cheaply."""
    if vendor == "amd":
        files = sorted(DRM.glob("card[0-9]*/device/gpu_busy_percent"))
        return (lambda: _percentages(files)) if files else None
    if vendor == "nvidia" and shutil.which("nvidia-smi"):
        return _NvidiaSmi()
    return None


def _percentages(files: list[Path]) -> list[float]:
    found = []
    for path in files:
        try:
            found.append(int(path.read_text()) / 100)
        except (OSError, ValueError):
            continue  # a partition other than the first has no answer of its own
    return found


class _NvidiaSmi:
    """The shares that ``nvidia-smi`` told when it was last asked. Nobody waits for it, since it can hang in the driver:
    as long as it does, there is no answer, and it is not asked again."""

    def __init__(self) -> None:
        self._asked: subprocess.Popen[str] | None = None
        self._when = 0.0

    def __call__(self) -> list[float]:
        found: list[float] = []
        if self._asked is not None:
            if self._asked.poll() is None:
                return []
            out, _ = self._asked.communicate()
            if time.monotonic() - self._when < OLD_ANSWER_S:
                found = [int(line) / 100 for line in out.split() if line.isdigit()]
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        self._asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._when = time.monotonic()
        return found
