"""How the workers of a node measure together: small files in a folder of the node's own disk, one clock.

For each cell the node orders ``measure`` or ``skip``. A worker that measures opens one or more *windows*, each when it
is warm. When every worker has opened a window, or has ended the cell, the node names a start a little ahead; all work
for the same seconds. CLOCK_MONOTONIC is one clock for all processes of a node, whatever happens to the time of day.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcjobs.config import Choice
from hpcjobs.paths import write_atomically

Action = Literal["measure", "skip"]
POLL_S = 0.02
# from the decision to the start: every worker must have seen it
LEAD_S = 0.3


class NodeIsGoneError(RuntimeError):
    """The node's agent has ended while a worker waited for it."""


@dataclass(frozen=True)
class Protocol:
    """The files of one set-up's measurement in ``folder``; cells are counted from 0."""

    folder: Path

    def order_file(self, cell: int) -> Path:
        return self.folder / f"order_{cell:03d}.json"

    def ready_file(self, cell: int, window: int, worker: int) -> Path:
        return self.folder / f"ready_{cell:03d}_{window}_{worker:03d}"

    def start_file(self, cell: int, window: int) -> Path:
        return self.folder / f"start_{cell:03d}_{window}.json"

    def result_file(self, cell: int, worker: int) -> Path:
        return self.folder / f"result_{cell:03d}_{worker:03d}.json"

    def up_file(self, worker: int) -> Path:
        """A worker has begun and is where it should be."""
        return self.folder / f"up_{worker:03d}"

    def problem_file(self, worker: int) -> Path:
        """Why a worker cannot measure at all."""
        return self.folder / f"problem_{worker:03d}.json"

    # ---- the node's side ----

    def order(self, cell: int, action: Action) -> None:
        write_atomically(self.order_file(cell), json.dumps({"action": action}), durable=False)

    def release(self, cell: int, window: int, seconds: float) -> float:
        """Let all workers begin a window; returns its start."""
        start = time.monotonic() + LEAD_S
        write_atomically(self.start_file(cell, window), json.dumps({"start": start, "seconds": seconds}), durable=False)
        return start

    def result(self, cell: int, worker: int) -> dict[str, Any] | None:
        """What a worker wrote at the end of a cell; None while it has not."""
        try:
            found: dict[str, Any] = json.loads(self.result_file(cell, worker).read_bytes())
        except FileNotFoundError:
            return None
        return found

    def write_result(self, cell: int, worker: int, result: dict[str, Any]) -> None:
        write_atomically(self.result_file(cell, worker), json.dumps(result), durable=False)

    # ---- a worker's side ----

    def wait_for_order(self, cell: int, alive: Callable[[], bool]) -> Action:
        action: Action = _wait_for(self.order_file(cell), alive)["action"]
        return action

    def wait_for_start(self, cell: int, window: int, worker: int, alive: Callable[[], bool]) -> tuple[float, float]:
        """Say that this worker is ready; returns start and length of the window, in seconds of CLOCK_MONOTONIC."""
        self.ready_file(cell, window, worker).touch()
        told = _wait_for(self.start_file(cell, window), alive)
        return float(told["start"]), float(told["seconds"])


def _wait_for(path: Path, alive: Callable[[], bool]) -> dict[str, Any]:
    """Raises NodeIsGoneError when nobody is left who could write the file."""
    looks = 0
    while not path.exists():
        time.sleep(POLL_S)
        looks += 1
        if looks % 50 == 0 and not alive():
            raise NodeIsGoneError(f"the node's agent ended before it wrote {path.name}")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


class Window:
    """One stretch of time in which all workers of a node do the same kind of work.

    ``over`` turns true at its end; then wait for the device and :meth:`close` it: the speed counts all images that were
    given to the device, over the time until it had done them.
    """

    def __init__(self, start: float, seconds: float) -> None:
        self.images = 0
        self.seconds: float | None = None
        self.cpu_s = 0.0
        self._end = start + seconds
        time.sleep(max(0.0, start - time.monotonic()))
        self._begun, self._cpu = time.monotonic(), _cpu_seconds()
        self.late_s = self._begun - start

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def add(self, images: int) -> None:
        """So many more images were worked on."""
        self.images += images

    def close(self) -> None:
        self.seconds = time.monotonic() - self._begun
        self.cpu_s = _cpu_seconds() - self._cpu

    def as_dict(self) -> dict[str, float]:
        if self.seconds is None:
            raise RuntimeError("a window was opened and never closed")
        return {
            "images": self.images,
            "seconds": round(self.seconds, 4),
            "images_per_s": round(self.images / self.seconds, 3),
            "cpu_s": round(self.cpu_s, 3),
            "late_s": round(self.late_s, 4),
        }


def _cpu_seconds() -> float:
    """Of this process, its threads and the children that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@dataclass
class Measurement:
    """The argument of a measuring function ``measure(context) -> dict of further figures``.

    Attributes:
        batch_size, precision: the cell.
        settings: the experiment's, as given.
        device: ``cuda:0`` (also on AMD GPUs) or ``cpu``.
        window_s: length of each window in seconds.
    """

    batch_size: int
    precision: str
    settings: dict[str, Choice]
    data: Path | None
    device: str
    window_s: float
    open_window: Callable[[int], tuple[float, float]]
    windows: dict[str, Window] = field(default_factory=dict)

    def window(self, name: str) -> Window:
        """Call it when warm: waits until all workers of the node are, then begins the window ``name``."""
        start, seconds = self.open_window(len(self.windows))
        self.windows[name] = Window(start, seconds)
        return self.windows[name]
