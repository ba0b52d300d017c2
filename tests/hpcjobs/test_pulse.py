"""What a worker makes of the end of its job when its own thread, or the wall clock, has not gone on evenly."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.owners import process_start
from hpcjobs.pulse import DOUBT_S, Pulse
from hpcjobs.spec import Control, WorkerSpec


class Clock:
    """Stands for the monotonic clock."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


class Worker:
    """A pulse whose rounds a test makes by hand, and its agent's file of orders."""

    def __init__(self, study: Any, folder: Path, clock: Clock) -> None:
        self._orders, self._clock = folder / "control", clock
        start = process_start(os.getpid()) or ""
        spec = WorkerSpec(
            study.paths.folder, "17_0", 0, "token", "agent", os.getpid(), start, folder / "status", self._orders
        )
        self.pulse = Pulse(spec, study.file)

    def told(self, *, stop: str | None = None, stop_in: float, end_in: float) -> Worker:
        Control(stop, self._clock.now + stop_in, self._clock.now + end_in).write(self._orders)
        return self

    def round(self, after_s: float = 0.5) -> bool:
        """One round of its thread; whether it would hand back by force."""
        self._clock.now += after_s
        return self.pulse._look(self._clock.now)


@pytest.fixture
def worker(studies: Any, tmp_path: Path, clock: Clock) -> Worker:
    return Worker(studies.create("epochs", trials=1), tmp_path, clock)


def test_a_worker_that_was_suspended_past_the_end_goes_on_when_the_end_has_moved(worker: Worker) -> None:
    worker.told(stop_in=90.0, end_in=120.0).round()
    worker._clock.now += 136.0
    assert worker.pulse.seconds_left() == 89.5, "the trial's thread is the first to run again"
    worker.round(0.0)
    assert (worker.pulse.reason, worker.pulse.seconds_left()) == (None, 89.5)
    worker.told(stop_in=80.0, end_in=110.0).round()
    assert (worker.pulse.reason, worker.pulse.seconds_left()) == (None, 79.5)
    worker.round(9.0)
    assert not worker.round(9.0 * 8)
    assert worker.pulse.reason is None, "a standstill again"
    for _ in range(int(DOUBT_S)):
        worker.round(1.0)
    assert worker.pulse.reason == "time limit"


def test_nobody_tells_the_moved_end(worker: Worker) -> None:
    worker.told(stop_in=90.0, end_in=120.0).round()
    worker.round(136.0)
    forced = [worker.round(2.0) for _ in range(int(DOUBT_S / 2))]
    assert worker.pulse.reason == "time limit"
    assert forced == [False] * (len(forced) - 1) + [True]


@pytest.mark.parametrize("reason", ["time limit", "cancelled"])
def test_a_worker_that_is_suspended_while_it_stops_has_its_time_to_stop_afterwards(reason: str, worker: Worker) -> None:
    worker.told(stop=reason, stop_in=0.0, end_in=30.0).round()
    assert worker.pulse.reason == reason
    assert not worker.round(136.0)
    assert not worker.round(2.0)


def test_a_wall_clock_that_is_set_stops_nobody(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.told(stop_in=90.0, end_in=120.0).round()
    later = time.time() + 3600.0
    monkeypatch.setattr(time, "time", lambda: later)
    worker.round()
    assert (worker.pulse.reason, worker.pulse.seconds_left()) == (None, 89.0)
