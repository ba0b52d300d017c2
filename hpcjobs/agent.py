"""The loop of a node agent: starts workers, restarts what dies, recovers its trials, stops all in time, reports."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from hpcjobs.budget import trials_left, why_stopped
from hpcjobs.failures import EXIT_DEVICE_FAULT, EXIT_HANDED_BACK, EXIT_UNUSABLE, is_journal_out_of_reach
from hpcjobs.guardian import Guardian
from hpcjobs.heartbeat import BEAT_S, NodeReport, read_node
from hpcjobs.job import Job
from hpcjobs.launch import cancel_requested
from hpcjobs.memory import OutOfMemoryCount
from hpcjobs.owners import node_name, process_start
from hpcjobs.plan import Plan
from hpcjobs.pressure import PressureLog
from hpcjobs.recovery import recover_worker, worker_death
from hpcjobs.slurm_control import SlurmUnavailableError
from hpcjobs.spec import Control, control_file
from hpcjobs.steps import MOST_STARTING, Ending, Step, allow_open_files, start_due
from hpcjobs.study import OpenStudy
from hpcjobs.text import counted

log = logging.getLogger("hpcjobs.node")

EXIT_NO_WORKER = 4
EXIT_NO_STUDY = 5
TICK_S = 0.2
START_PAUSE_S = 0.05
# an element asks Slurm for its own end so often: an administrator may have moved it
ASK_END_S = 60.0
# and once more before it acts on an end that is older news: Slurm moves that of a job which it suspends
CONFIRM_END_S = 5.0
# workers that stop get this long, then they are killed; Slurm's KillWait is 30 s
GRACE_S = 20.0
# a worker that ended as only those do that were told to stop begins again after so long
DEATH_PAUSE_S = 1.0
# workers that have not stopped so long before the job's end are killed
KILL_BEFORE_END_S = 2.0
# an editor may write study.yaml anew, and it is not there for a moment
ABSENCE_S = 1.0


class StudyGoneError(RuntimeError):
    """The study's folder was moved or removed: whatever is written would make another one in its place."""


def new_report(job: Job, token: str) -> NodeReport:
    """The file of this node, as long as nothing is known but who writes it."""
    return NodeReport(
        element=job.element,
        agent=token,
        host=socket.gethostname(),
        node=node_name(),
        pid=os.getpid(),
        start=process_start(os.getpid()) or "",
        run=job.restarts,
    )


class NodeAgent:
    """Looks after the workers of one node until the study's budget is spent or the job ends."""

    def __init__(
        self, study: OpenStudy, plan: Plan, job: Job, node_folder: Path, steps: list[Step], token: str
    ) -> None:
        self._study = study
        self._plan = plan
        self._job = job
        self._control_file = control_file(node_folder)
        self._control = Control(grace_s=GRACE_S)
        self._steps = steps
        self._guardian = Guardian(study, token, with_slurm=job.slurm_id is not None)
        self._memory = OutOfMemoryCount()
        self._stopped_at: float | None = None
        self._stopping_s = 0.0
        self._looked = time.monotonic()
        self._signal: str | None = None
        self._asked_end = -ASK_END_S
        self._last_beat = -BEAT_S
        self.wants_requeue = False  # known once run() has returned
        self._replaced = False
        self._gone = False
        self._unrecovered: list[Ending] = []
        self._left = 1  # trials that have not ended, as of the last beat
        self.report = new_report(job, token)
        self.report.mode = plan.mode
        self.report.gpus = len({step.report().device for step in steps} - {""})
        vendor = plan.cluster.gpu_vendor if plan.cluster else "nvidia"
        self._pressure = PressureLog(os.sched_getaffinity(0), vendor, has_gpus=self.report.gpus > 0)

    def run(self) -> int:
        """Returns the exit code: 0, 4 if no worker could go on although there is work, 5 if the study has gone.

        Raises:
            UnfitNodeError: so many workers cannot be looked after here.
        """
        allow_open_files(len(self._steps))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted may close
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGHUP))  # on this machine we start so
        at_once = min(MOST_STARTING, max(4, os.cpu_count() or 1))
        try:
            while self._beat():
                self._reap()
                if self._stopped_at is None and self._left:
                    start_due(self._steps, at_once, START_PAUSE_S, time.sleep)
                time.sleep(TICK_S)
        except StudyGoneError as error:
            log.error("%s", error)
            self._gone = True
        finally:
            for step in self._steps:
                step.kill()
            if not self._gone:
                self._guardian.release()
        return EXIT_NO_STUDY if self._gone else self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name

    def _beat(self) -> bool:
        """Look at everything once; False when the node has nothing more to do."""
        now = time.monotonic()
        if self._stopped_at is not None:
            # only time in which this process ran: a job that Slurm suspended meanwhile has had none of its grace
            self._stopping_s += min(now - self._looked, 1.0)
        self._looked = now
        for step in self._steps:
            step.look()
        if now - self._last_beat >= BEAT_S:
            self._last_beat = now
            self._check_study()
            if self._is_replaced():
                return False
            self._left = trials_left(self._study)
            self._check_end(now)
            self._check_stop()
            self._guardian.tick()
            self._look_at_host()
            self.report.beat += 1
            self.report.state = "running" if self._stopped_at is None else "stopping"
            self._write_report()
        if self._stopped_at is not None and self._stop_is_overdue():
            log.error("workers that did not stop in time are killed")
            for step in self._steps:
                step.kill()
        if any(step.live for step in self._steps):
            return True
        pending = any(step.state == "pending" for step in self._steps)
        return self._stopped_at is None and pending and self._left > 0

    def _check_study(self) -> None:
        config = self._study.paths.config
        if not config.exists():
            time.sleep(ABSENCE_S)
            if not config.exists():
                raise StudyGoneError(
                    f"{config} is gone: this node ends, and its trials can go on from their checkpoints. Where the "
                    "study's folder was moved: python -m hpcjobs.submit --resume FOLDER, with its new name"
                )

    def _is_replaced(self) -> bool:
        """Whether Slurm has given this element to another node, while this one stood still or was cut off."""
        latest = read_node(self._study.paths.node_file(self._job.element))
        self._replaced = latest is not None and latest.run > self.report.run
        return self._replaced

    def _look_at_host(self) -> None:
        pressure = self._pressure.look()
        if pressure is None:
            return
        limit = pressure.limit or ""
        if limit and not self.report.host_limit:
            log.warning("the host is the limit: %s", limit)
        self.report.pressure, self.report.host_limit = pressure.as_dict(), limit

    def _stop_is_overdue(self) -> bool:
        if self._control.stop == "time limit" and self._control.end is not None:
            return time.monotonic() > self._control.end - KILL_BEFORE_END_S
        return self._stopping_s > GRACE_S + 10.0

    def _check_end(self, now: float) -> None:
        """Tell the workers when the job ends, and again if that moves."""
        often = CONFIRM_END_S if self._deadline_has_passed(now) else ASK_END_S
        if self._job.slurm_id is None or now - self._asked_end < often:
            return
        self._asked_end = now
        left = self._job.ask_left()
        if left is None and self._control.end is None:  # else Slurm's last word is newer
            left = self._job.planned_left()
        if left is None:
            return
        end = time.monotonic() + left
        if self._control.end is not None and abs(end - self._control.end) < 5.0:
            return
        delay = min(float(self._plan.signal_delay_s), left / 4)
        self._control = replace(self._control, stop_at=end - delay, end=end)
        self._order()
        log.info("this job ends in %.0f s; workers stop %.0f s before", left, delay)

    def _deadline_has_passed(self, now: float) -> bool:
        """Whether the time has come to stop the workers, or to kill those that have not stopped."""
        if self._control.end is None or self._control.stop_at is None:
            return False
        return now >= (self._control.stop_at if self._stopped_at is None else self._control.end - KILL_BEFORE_END_S)

    def _check_stop(self) -> None:
        if self._stopped_at is not None:
            return
        if self._signal is not None:
            self._stop(f"signal {self._signal}")
        elif cancel_requested(self._study.paths):
            self._stop("cancelled")
        elif why := why_stopped(self._study):
            self._stop(why)
        elif self._control.stop_at is not None and time.monotonic() >= self._control.stop_at:
            self._stop("time limit")

    def _stop(self, reason: str) -> None:
        log.info("stopping: %s", reason)
        self._stopped_at = time.monotonic()
        self.report.message = reason
        self._control = replace(self._control, stop=reason)
        self._order()

    def _order(self) -> None:
        """Tell the workers. Where the node's disk is full, they are signalled instead when they are to stop."""
        try:
            self._control.write(self._control_file)
        except OSError as error:
            log.error("no order can be written for the workers: %s", error)
            for step in self._steps if self._control.stop else ():
                step.ask_to_stop()

    def _reap(self) -> None:
        endings, self._unrecovered = self._unrecovered, []
        endings += [ending for step in self._steps if (ending := self._ending_of(step)) is not None]
        if endings:
            self._check_study()
        for ending in endings:
            self._recover(ending)
        if self._stopped_at is not None or any(step.live or step.state == "pending" for step in self._steps):
            return
        # Slurm signals all steps and not this process when the job is to end; each takes its own time to stop
        if any(step.state == "handed back" for step in self._steps) and trials_left(self._study):
            self._stop("the workers were told to stop")

    def _ending_of(self, step: Step) -> Ending | None:
        """How a worker has ended, if it has. An objective may end its process with any code: that of a worker that was
        told to stop counts as such only if the worker said so itself, and as a death else."""
        ending = step.reap()
        if ending is None or ending.code != EXIT_HANDED_BACK or self._stopped_at is not None:
            return ending
        status = step.status
        if status is None or (status.exit_code is None and status.state != "stopping"):
            log.warning("worker %d ended with code %d, and not since it was told to", ending.worker, ending.code)
            step.restart(DEATH_PAUSE_S)
        return ending

    def _recover(self, ending: Ending) -> None:
        names = {EXIT_HANDED_BACK: "stopped", EXIT_DEVICE_FAULT: "device fault", EXIT_UNUSABLE: "cannot run trials"}
        log.info("worker %d ended with %s", ending.worker, names.get(ending.code, f"code {ending.code}"))
        failure = worker_death(ending.code, ending.is_death and self._memory.has_grown(), ending.log)
        try:
            recovered = recover_worker(self._study, ending.token, failure)
        except OSError as error:
            if not is_journal_out_of_reach(error):
                raise
            log.error("what worker %d ran is recovered later: %s", ending.worker, error)
            self._unrecovered.append(ending)
            return
        for number, successor in recovered:
            log.warning("trial %d of dead worker %d goes on as trial %s", number, ending.worker, successor)

    def _write_report(self) -> None:
        end = self._control.end
        self.report.time_left_s = None if end is None else round(end - time.monotonic(), 1)
        self.report.workers = [step.report() for step in self._steps]
        try:
            self.report.write(self._study.paths)
        except OSError as error:  # a full disk, say: the next beat tries again, and Slurm knows that this node lives
            log.warning("the node's file cannot be written: %s", error)

    def _end(self) -> int:
        if self._replaced:
            log.error("%s was started again elsewhere: its trials go on there, this node leaves", self._job.element)
            return 0
        left = trials_left(self._study)
        self.wants_requeue = self._stopped_at is not None and left > 0 and self._may_requeue()
        self.report.state = "ended"
        if self.wants_requeue:
            self.report.message += "; queued again"
        elif not left:
            self.report.message = ""  # nothing that needs a word
        self._write_report()
        why = self.report.message or ("no worker can go on" if left else "all trials have ended")
        log.info("node ends: %s; %s left", why, counted(left, "trial"))
        if left and self._stopped_at is None:
            return EXIT_NO_WORKER
        return 0

    def _may_requeue(self) -> bool:
        if self._job.slurm_id is None or cancel_requested(self._study.paths) or why_stopped(self._study):
            return False
        try:
            return self._job.may_requeue()
        except SlurmUnavailableError as error:
            log.error("not queued again: %s", error)
            return False
