"""A worker's second thread: it writes the worker's status, hears the agent's orders and knows how much time is left."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpcjobs.failures import EXIT_HANDED_BACK, Failure, FailureClass
from hpcjobs.heartbeat import BEAT_S, WorkerStatus, write_status
from hpcjobs.owners import process_gone, process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.recovery import recover
from hpcjobs.spec import Control, WorkerSpec
from hpcjobs.study import open_study

if TYPE_CHECKING:
    from hpcjobs.config import StudyFile

log = logging.getLogger("hpcjobs.worker")

# each of these tells a worker to stop
_ORDERS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
TICK_S = 0.5
# a thread that has not run for so long stood still: Slurm has suspended the job, say, and moves its end
STANDSTILL_S = 10.0
# then the end that is known counts for nothing until the agent tells another one, or for so long
DOUBT_S = 60.0
# Slurm may send the signal of --signal so much before the time that was asked for
SLURM_EARLY_S = 65.0
# hand back by force so long before the job ends, where the objective did not listen
FORCE_BEFORE_END_S = 5.0


class Pulse:
    """Implements :class:`hpcjobs.context.Clock` for the contexts of a worker's trials."""

    def __init__(self, spec: WorkerSpec, file: StudyFile) -> None:
        self.reason: str | None = None
        self._spec, self._file = spec, file
        self._control = Control()
        self._stop_seen: float | None = None
        self._looked = time.monotonic()
        self._stood_since = self._doubt_until = 0.0
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._trial_id: int | None = None
        start = process_start(os.getpid()) or ""
        self._status = WorkerStatus(
            spec.worker, spec.token, os.getpid(), start, device=spec.device, restarts=spec.restarts
        )
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        before = {number: signal.signal(number, self._on_signal) for number in _ORDERS}
        _leave_to_children(before)
        self._looked = time.monotonic()
        self._hear()
        self._tell()
        self._thread.start()

    def stop(self, exit_code: int) -> None:
        """End the thread; the last status tells the process's exit code."""
        self._ended.set()
        self._wake.set()
        self._thread.join()
        self._status.state, self._status.exit_code = "ended", exit_code
        self._tell()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past an order to stop."""
        self._wake.wait(seconds)

    def stop_ordered(self) -> bool:
        return self.reason is not None

    def seconds_left(self) -> float | None:
        """Until workers of this job must begin to stop; None without a limit."""
        return None if self._control.stop_at is None else self._control.stop_at - self._now()

    def _now(self) -> float:
        """Beside the job's end: after a standstill the time before it, as long as nobody knows the moved end."""
        now = time.monotonic()
        if now - self._looked > STANDSTILL_S:
            return self._looked  # the other thread is the first to run again
        return self._stood_since if now < self._doubt_until else now

    def update(self, **what: Any) -> None:
        self._status = replace(self._status, **what)

    def begin_trial(self, number: int, trial_id: int, epochs: int) -> None:
        self._trial_id = trial_id
        self.update(state="running", trial=number, epoch=0, epochs=epochs, value=None, images_per_s=None)

    def end_trial(self) -> None:
        self._trial_id = None
        self.update(trial=None, state="idle")

    def trial_finished(self) -> None:
        self.update(finished=self._status.finished + 1)

    def progress(self, epoch: int, value: float, figures: dict[str, float], epoch_s: float) -> None:
        speed = figures.get("images_per_s")
        self.update(epoch=epoch, value=value, images_per_s=speed, epoch_s=round(epoch_s, 3))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # only plain assignments: a signal may come while a lock is held
        left = self.seconds_left()
        if number == signal.SIGUSR2 and left is not None and left < SLURM_EARLY_S:
            return  # Slurm announces the time limit up to a minute early; the agent's clock is exact
        if self.reason is None:
            self.reason = f"signal {signal.Signals(number).name}"
        self._wake.set()

    def _hear(self) -> None:
        control = Control.read(self._spec.control)
        if control.end != self._control.end:
            self._doubt_until = 0.0
        self._control = control
        if self.reason is not None:
            return
        left = self.seconds_left()
        if self._control.stop:
            self.reason = self._control.stop
        elif left is not None and left <= 0:
            self.reason = "time limit"
        elif process_gone(self._spec.agent_pid, self._spec.agent_start):
            self.reason = "the node agent is gone"

    def _beat(self) -> None:
        last = 0.0
        while not self._ended.wait(TICK_S):
            now = time.monotonic()
            if self._look(now):
                self._force_hand_back()
            if now - last >= BEAT_S:
                last = now
                self._status.beat += 1
                self._tell()

    def _look(self, now: float) -> bool:
        """Whether the worker was told to stop and its objective does not listen."""
        self._notice_standstill(now)
        self._hear()
        if self.reason is None:
            return False
        self._stop_seen = self._stop_seen or now
        self._status.state, self._status.message = "stopping", self.reason
        self._wake.set()
        return self._overdue(now)

    def _notice_standstill(self, now: float) -> None:
        stood_s = now - self._looked
        if stood_s > STANDSTILL_S:
            self._stood_since, self._doubt_until = self._looked, now + DOUBT_S
            if self._stop_seen is not None:
                self._stop_seen += stood_s
        self._looked = now

    def _tell(self) -> None:
        """Write the status. Where the node's disk is full, a newer time of the old one shows that the worker lives."""
        try:
            write_status(self._spec.status, self._status)
        except OSError as error:
            log.warning("the worker's status cannot be written: %s", error)
            with contextlib.suppress(OSError):
                os.utime(self._spec.status)

    def _overdue(self, now: float) -> bool:
        """The objective neither polls nor reports: the grace is over, or the job is about to end."""
        assert self._stop_seen is not None
        if self._control.end is not None and self.reason == "time limit":
            return self._now() > self._control.end - FORCE_BEFORE_END_S
        return now - self._stop_seen > self._control.grace_s

    def _force_hand_back(self) -> None:
        """Give the trial back over the objective's head and leave: it loses what it did since its last checkpoint.

        It goes on under a new number: until this process has ended, the objective may still write into its folder.
        """
        trial_id = self._trial_id
        if trial_id is not None:
            log.warning("the objective does not stop: its trial is handed back as of its last checkpoint")
            kind = FailureClass.TIME_LIMIT if self.reason == "time limit" else FailureClass.PREEMPTION
            failure = Failure(kind, f"the objective did not stop in time: {self.reason}")
            # a storage of this thread's own: the other thread may hold the shared one for long
            recover(open_study(StudyPaths(self._spec.folder), self._file), trial_id, self._spec.token, failure)
        os._exit(EXIT_HANDED_BACK)


def _leave_to_children(handlers: Mapping[signal.Signals, Any]) -> None:
    """Give what an objective forks these handlers: the pools of multiprocessing end their processes with SIGTERM.

    A signal that comes before the child has them waits for that, or Python would forget it.
    """
    ours = threading.local()

    def hold() -> None:
        ours.mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ours.mask)

    def begin() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        go_on()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=begin)
