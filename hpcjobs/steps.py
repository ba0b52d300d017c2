"""The workers of one node as processes: start, restart after a pause, leave out what keeps failing, end."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hpcjobs.devices import Place
from hpcjobs.failures import EXIT_DEVICE_FAULT, EXIT_DONE, EXIT_HANDED_BACK, EXIT_UNUSABLE
from hpcjobs.heartbeat import WorkerStatus, read_status, sign_of_life
from hpcjobs.owners import node_name, process_alive, process_gone
from hpcjobs.placement import UnfitNodeError
from hpcjobs.spec import NODE_FOLDER, WorkerSpec, spec_file, status_file
from hpcjobs.text import counted

log = logging.getLogger("hpcjobs.node")

# a device that fails so often is left out for the rest of the job
MOST_DEVICE_FAULTS = 2
# a worker that dies so often in a row without finishing a trial is left out
MOST_DEATHS = 8
LONGEST_PAUSE_S = 10.0
SRUN_FAILED = 1
# where steps were created before, none may be for so long: Slurm's controller is away, say, and comes back
NO_STEP_S = 1800.0
# a worker that handed back unasked begins again after so long, if the others go on
HANDED_BACK_PAUSE_S = 30.0
# a worker whose status has not changed for so long is taken for hung, and killed
HUNG_S = 600.0
STARTING_S = 300.0
# a start that takes longer, since Slurm creates no step at the moment, say, no longer counts among those under way
SLOW_START_S = 20.0
# starts under way at any time, at most: more of them only wait for slurmctld and for the shared filesystem
MOST_STARTING = 16
# a worker that outlives its srun gets so long without a sign of life
ENDING_S = 10.0
# an agent holds one file open for each worker, and beside those that it has at its start some for a moment
SPARE_FILES = 64
# stands for an srun that ended with 0 although its worker never said that it had
CODE_LOST = 1


@dataclass(frozen=True)
class Ending:
    """How one process of a worker ended. ``code`` is negative for a signal, as srun's 128 + signal is too."""

    worker: int
    token: str
    code: int
    log: Path

    @property
    def is_death(self) -> bool:
        return self.code not in (EXIT_DONE, EXIT_HANDED_BACK, EXIT_DEVICE_FAULT, EXIT_UNUSABLE)


class Step:
    """One worker's slot: its place on the node, its present process and its history."""

    def __init__(
        self,
        spec: WorkerSpec,
        place: Place,
        node_folder: Path,
        worker_log: Path,
        command: list[str],
        *,
        writes_own_log: bool,
    ) -> None:
        self.index = spec.worker
        self.state = "pending"  # pending, live, done, handed back, out
        self.message = ""
        self.status: WorkerStatus | None = None
        self._spec = spec
        self._place = place
        self._node_folder = node_folder
        self._log = worker_log
        self._command = command
        self._writes_own_log = writes_own_log
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._deaths = 0
        self._device_faults = 0
        self._due = 0.0
        self._started = 0.0
        self._has_worked = False  # some process of this slot has said a word
        self._not_created_since: float | None = None
        self._log_size = 0
        self._sign = 0
        self._silent_s = 0.0
        self._looked = time.monotonic()

    @property
    def live(self) -> bool:
        return self.state == "live"

    @property
    def starting(self) -> bool:
        """Started and not heard of yet; one that takes long does not hold up the others."""
        return self.live and self.status is None and time.monotonic() - self._started < SLOW_START_S

    def due(self) -> bool:
        return self.state in ("pending", "handed back") and time.monotonic() >= self._due

    def start(self) -> None:
        """Start the process under a new token, so that what its predecessor left is never taken for its own."""
        token = secrets.token_hex(8)
        self._spec = replace(self._spec, token=token, restarts=self._starts)
        self._spec.write(spec_file(self._node_folder, self.index))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # numpy reads the number of threads when it is loaded, before the worker sets its own variables
        environment = {**os.environ, **self._spec.environment, NODE_FOLDER: str(self._node_folder)}
        with self._log.open("ab") as output:
            self._log_size = output.tell()
            # a session of its own: Ctrl-C in a terminal reaches the agent alone, which then stops the workers
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if self._writes_own_log else output,
                stderr=None if self._writes_own_log else subprocess.STDOUT,
                start_new_session=True,
            )
        self._starts += 1
        self._started = time.monotonic()
        self.status = None
        self.state = "live"
        self._silent_s = 0.0

    def look(self) -> None:
        """Read the status file, and end a process that has not moved for long."""
        path = status_file(self._node_folder, self.index)
        status, sign = read_status(path), sign_of_life(path)
        if status is None or status.token != self._spec.token:
            status = None
        now = time.monotonic()
        # only time in which this process ran too: after Slurm suspended the job, all seem to have been silent
        self._silent_s += min(now - self._looked, 1.0)
        self._looked = now
        if status is not None:
            self._has_worked, self._not_created_since = True, None
        if (status, sign) != (self.status, self._sign):
            self.status, self._sign, self._silent_s = status, sign, 0.0
        if self.live and self._silent_s > (allowed := self._longest_silence_s()):
            log.error("worker %d has not moved for %.0f s and is ended", self.index, allowed)
            self.kill()

    def _longest_silence_s(self) -> float:
        if self.status is None:
            return STARTING_S
        # srun can outlive its worker, if the step's own daemon has died
        return ENDING_S if process_gone(self.status.pid, self.status.start) else HUNG_S

    def reap(self) -> Ending | None:
        """If the process has ended: how. The step's next state is decided with it."""
        if self._process is None or self._process.poll() is None:
            return None
        self.look()
        if self._is_ending_by_itself():
            return None
        code = self._process.returncode
        self._process = None
        # srun can die alone; nothing of its step may go on while the trial is given to another
        self._kill_worker_process()
        if self.status is not None and self.status.exit_code is not None:
            code = self.status.exit_code
        elif code == EXIT_DONE:
            code = CODE_LOST
        ending = Ending(self.index, self._spec.token, code, self._log)
        self._decide(ending)
        return ending

    def _is_ending_by_itself(self) -> bool:
        """srun has gone, and its worker was told to stop and still hands its trial back."""
        status = self.status
        if status is None or status.state != "stopping" or not process_alive(status.pid, status.start):
            return False
        return self._silent_s < ENDING_S

    def _decide(self, ending: Ending) -> None:
        if self._has_worked and self._was_not_created(ending):
            self._not_created_since = self._not_created_since or self._started
            if time.monotonic() - self._not_created_since < NO_STEP_S:
                self.restart(LONGEST_PAUSE_S)  # no death: no worker was there
                return
        finished = self.status.finished if self.status else 0
        self._deaths = 1 if finished > 0 else self._deaths + 1
        if ending.code == EXIT_DONE:
            self.state = "done"
        elif ending.code == EXIT_HANDED_BACK:
            self.state, self._due = "handed back", time.monotonic() + HANDED_BACK_PAUSE_S
        elif ending.code == EXIT_DEVICE_FAULT:
            self._device_faults += 1
            if self._device_faults >= MOST_DEVICE_FAULTS:
                self._leave_out(f"{self._place.device or 'the device'} failed {self._device_faults} times")
            else:
                self.restart(1.0)
        elif ending.code == EXIT_UNUSABLE:
            why = self.status.message if self.status else ""
            self._leave_out(why or f"it cannot run trials; see {self._log}")
        elif self._deaths >= MOST_DEATHS:
            self._leave_out(f"it died {self._deaths} times without finishing a trial; see {self._log}")
        else:
            self.restart(min(LONGEST_PAUSE_S, 0.25 * 2.0 ** (self._deaths - 1)))

    def _was_not_created(self, ending: Ending) -> bool:
        """Whether srun was refused a step: it tells so in the agent's log, and no worker has written into its own."""
        said_nothing = self._writes_own_log and self._log.exists() and self._log.stat().st_size == self._log_size
        return ending.code == SRUN_FAILED and self.status is None and said_nothing

    def could_not_start(self, error: OSError) -> None:
        if isinstance(error, FileNotFoundError) and error.filename == self._command[0]:
            self._leave_out(f"{self._command[0]} was not found on this node; correct PATH in the profile's setup")
        else:  # a full disk, say
            log.warning("worker %d cannot be started: %s", self.index, error)
            self.restart(LONGEST_PAUSE_S)

    def _leave_out(self, why: str) -> None:
        self.state, self.message = "out", why
        log.error("worker %d is left out: %s", self.index, why)

    def restart(self, after_s: float) -> None:
        self.state = "pending"
        self._due = time.monotonic() + after_s

    def ask_to_stop(self) -> None:
        """Signal the worker: for when no order can be written for it."""
        status = self.status
        if status is not None and process_alive(status.pid, status.start):
            with contextlib.suppress(ProcessLookupError):
                os.kill(status.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process now, with all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._kill_worker_process()

    def _kill_worker_process(self) -> None:
        status = self.status
        if status is None or status.token != self._spec.token or not process_alive(status.pid, status.start):
            return
        log.warning("process %d of worker %d is still there and is killed", status.pid, self.index)
        with contextlib.suppress(ProcessLookupError):
            os.kill(status.pid, signal.SIGKILL)
        end = time.monotonic() + 10.0
        while process_alive(status.pid, status.start) and time.monotonic() < end:
            time.sleep(0.02)

    def report(self) -> WorkerStatus:
        """What the node's file says of this worker."""
        status = self.status or WorkerStatus(self.index, self._spec.token, 0, "", device=self._place.device)
        if self.live:
            return status
        names = {"pending": "waiting to restart" if self._starts else "starting", "out": "left out"}
        return replace(status, state=names.get(self.state, "ended"), trial=None, message=self.message)


def allow_open_files(workers: int) -> None:
    """Raise the limit of this process, if it is too low for what it holds open for its workers.

    Not to all that is allowed: workers have the same limit, and some programs look at every number below it.

    Raises:
        UnfitNodeError: so many are not allowed here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(list(Path("/proc/self/fd").iterdir())) + workers + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UnfitNodeError(
            f"{node_name()}: found a limit of {hard} open files (ulimit -n); allowed: at least {needed} for "
            f"{counted(workers, 'worker')}; raise it where it is set, or start fewer workers. No trial was begun"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def start_due(steps: list[Step], at_once: int, pause_s: float, wait: Callable[[float], None]) -> None:
    """Start what is due, at most ``at_once`` being at their start at any time: 64 at once swamp slurmd and the disk."""
    for step in steps:
        if step.due() and sum(other.starting for other in steps) < at_once:
            try:
                step.start()
            except OSError as error:
                step.could_not_start(error)
            wait(pause_s)
