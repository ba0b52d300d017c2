"""Runs once per node, in the batch step of its array element: checks the mode, starts the workers, looks after them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import optuna

from hpcjobs.budget import count
from hpcjobs.cores import allowed_cpus
from hpcjobs.devices import find_gpus, places
from hpcjobs.errors import run_entry
from hpcjobs.failures import EXIT_DEVICE_FAULT, EXIT_HANDED_BACK, EXIT_UNUSABLE
from hpcjobs.guardian import Guardian
from hpcjobs.heartbeat import BEAT_S, NodeReport
from hpcjobs.job import Job
from hpcjobs.journal_client import SOCKET_VARIABLE
from hpcjobs.journal_server import serve
from hpcjobs.launch import cancel_requested
from hpcjobs.memory import OutOfMemoryCount
from hpcjobs.owners import process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import Plan, make_plan
from hpcjobs.recovery import recover_worker, worker_death
from hpcjobs.slurm import step_command, worker_command
from hpcjobs.slurm_control import SlurmUnavailableError
from hpcjobs.spec import Control, WorkerSpec, control_file, status_file
from hpcjobs.steps import Ending, Step, start_due
from hpcjobs.study import OpenStudy, open_study

log = logging.getLogger("hpcjobs.node")

EXIT_UNFIT = 3
EXIT_NO_WORKER = 4
TICK_S = 0.2
START_PAUSE_S = 0.05
# an element asks Slurm for its own end so often: an administrator may have moved it
ASK_END_S = 60.0
# workers that stop get this long, then they are killed; Slurm's KillWait is 30 s
GRACE_S = 20.0
HANDED_BACK_PAUSE_S = 30.0


class UnfitNodeError(RuntimeError):
    """The node is not what the study asks for: its GPUs are in another mode, or there are none."""


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
        self._signal: str | None = None
        self._asked_end = -ASK_END_S
        self._last_beat = -BEAT_S
        self.report = new_report(job, token)
        self.report.mode = plan.mode
        self.report.gpus = len({step.report().device for step in steps} - {""})

    def run(self) -> int:
        """Returns the exit code: 0, or 4 if no worker could go on although there is work."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that submitted may close
        at_once = max(4, os.cpu_count() or 1)
        try:
            while self._beat():
                self._reap()
                if self._stopped_at is None:
                    start_due(self._steps, at_once, START_PAUSE_S, time.sleep)
                time.sleep(TICK_S)
        finally:
            for step in self._steps:
                step.kill()
            self._guardian.release()
        return self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name

    def _beat(self) -> bool:
        """Look at everything once; False when the node has nothing more to do."""
        now = time.monotonic()
        for step in self._steps:
            step.look()
        if now - self._last_beat >= BEAT_S:
            self._last_beat = now
            self._check_end(now)
            self._check_stop()
            self._guardian.tick()
            self.report.beat += 1
            self.report.state = "running" if self._stopped_at is None else "stopping"
            self._write_report()
        if self._stopped_at is not None and now - self._stopped_at > self._longest_stop_s():
            log.error("workers that did not stop in time are killed")
            for step in self._steps:
                step.kill()
        if any(step.live for step in self._steps):
            return True
        pending = any(step.state == "pending" for step in self._steps)
        return self._stopped_at is None and pending and count(self._study).left > 0

    def _longest_stop_s(self) -> float:
        if self._control.stop == "time limit" and self._control.end and self._control.stop_at:
            return self._control.end - self._control.stop_at - 2.0
        return GRACE_S + 10.0

    def _check_end(self, now: float) -> None:
        """Tell the workers when the job ends, and again if that moves."""
        if self._job.slurm_id is None or now - self._asked_end < ASK_END_S:
            return
        self._asked_end = now
        end = self._job.ask_end()
        if end is None or (self._control.end is not None and abs(end - self._control.end) < 5.0):
            return
        delay = min(float(self._plan.signal_delay_s), (end - time.time()) / 4)
        self._control = Control(stop_at=end - delay, end=end, grace_s=GRACE_S)
        self._control.write(self._control_file)
        log.info("this job ends in %.0f s; workers stop %.0f s before", end - time.time(), delay)

    def _check_stop(self) -> None:
        if self._stopped_at is not None:
            return
        if self._signal is not None:
            self._stop(f"signal {self._signal}")
        elif cancel_requested(self._study.paths):
            self._stop("cancelled")
        elif self._control.stop_at is not None and time.time() >= self._control.stop_at:
            self._stop("time limit")

    def _stop(self, reason: str) -> None:
        log.info("stopping: %s", reason)
        self._stopped_at = time.monotonic()
        self.report.message = reason
        self._control = Control(reason, self._control.stop_at, self._control.end, GRACE_S)
        self._control.write(self._control_file)

    def _reap(self) -> None:
        for step in self._steps:
            ending = step.reap()
            if ending is not None:
                self._recover(ending)
        if self._stopped_at is None and not any(step.live or step.state == "pending" for step in self._steps):
            # Slurm signals all steps and not this process when the job is to end
            if any(step.state == "handed back" for step in self._steps) and count(self._study).left:
                self._stop("the workers were told to stop")
        elif self._stopped_at is None:
            for step in self._steps:
                if step.state == "handed back":
                    step.restart(HANDED_BACK_PAUSE_S)

    def _recover(self, ending: Ending) -> None:
        names = {EXIT_HANDED_BACK: "stopped", EXIT_DEVICE_FAULT: "device fault", EXIT_UNUSABLE: "cannot run trials"}
        log.info("worker %d ended with %s", ending.worker, names.get(ending.code, f"code {ending.code}"))
        failure = worker_death(ending.code, ending.is_death and self._memory.has_grown(), ending.log)
        for number, successor in recover_worker(self._study, ending.token, failure):
            log.warning("trial %d of dead worker %d goes on as trial %s", number, ending.worker, successor)

    def _write_report(self) -> None:
        self.report.time_left_s = None if self._control.end is None else round(self._control.end - time.time(), 1)
        self.report.workers = [step.report() for step in self._steps]
        self.report.write(self._study.paths)

    def _end(self) -> int:
        left = count(self._study).left
        requeue = self._stopped_at is not None and left > 0 and self._may_requeue()
        self.report.state = "ended"
        if requeue:
            self.report.message += "; queued again"
        elif not left:
            self.report.message = "the budget is spent"
        self._write_report()
        log.info("node ends: %s; %d trials are left", self.report.message or "no worker can go on", left)
        if requeue:
            self._job.requeue()
        if left and self._stopped_at is None:
            return EXIT_NO_WORKER
        return 0

    def _may_requeue(self) -> bool:
        if self._job.slurm_id is None or cancel_requested(self._study.paths):
            return False
        try:
            return self._job.may_requeue()
        except SlurmUnavailableError as error:
            log.error("not queued again: %s", error)
            return False


def new_report(job: Job, token: str) -> NodeReport:
    """The file of this node, as long as nothing is known but who writes it."""
    return NodeReport(
        element=job.element,
        agent=token,
        host=socket.gethostname(),
        node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        pid=os.getpid(),
        start=process_start(os.getpid()) or "",
    )


def check_mode(plan: Plan) -> None:
    """Raises UnfitNodeError if the node is not in the mode that the study asks for."""
    if plan.mode is None:
        return
    from hpcjobs import partition

    found = partition.current_mode()
    if found != plan.mode:
        raise UnfitNodeError(
            f"{socket.gethostname()}: the GPUs are in mode {found or 'unknown'}, the study asks for {plan.mode}. "
            "No trial was begun. Did the prolog set the mode? Look at its log on the node, or submit without --mode."
        )


def make_steps(study: OpenStudy, plan: Plan, job: Job, node_folder: Path, token: str) -> list[Step]:
    """One step per place of this node."""
    vendor = plan.cluster.gpu_vendor if plan.cluster else None
    gpus = find_gpus(vendor)
    found = places(plan, gpus, allowed_cpus())
    if plan.cluster and plan.cluster.gpus_per_node and vendor != "none":
        if not gpus:
            raise UnfitNodeError(
                f"{socket.gethostname()}: no GPU was found, the profile {plan.cluster.name} says that a node has "
                f"{plan.cluster.gpus_per_node}. No trial was begun. Look at: python -m hpcjobs.partition show"
            )
        if plan.workers_by_devices and len(gpus) != plan.workers_per_node:
            log.warning("%d logical GPUs were found where %d were expected", len(gpus), plan.workers_per_node)
    steps = []
    for worker, place in enumerate(found):
        # the threads of the cores that are really there, unless the site's profile says otherwise
        threads = {"OMP_NUM_THREADS": str(max(1, len(place.cores)))}
        own = plan.cluster.environment if plan.cluster else {}
        environment = {**plan.environment, **threads, **own, **place.environment}
        if place.device:
            # several processes on one MIOpen database damage it
            cache = str(node_folder / f"miopen_{worker:03d}")
            environment |= {"MIOPEN_USER_DB_PATH": cache, "MIOPEN_CUSTOM_CACHE_DIR": cache}
        spec = WorkerSpec(
            folder=study.paths.folder,
            element=job.element,
            worker=worker,
            token="",
            agent=token,
            agent_pid=os.getpid(),
            agent_start=process_start(os.getpid()) or "",
            status=status_file(node_folder, worker),
            control=control_file(node_folder),
            device=place.device,
            has_gpu=bool(place.device),
            environment=environment,
            cores=place.cores,
        )
        if job.slurm_id is None:
            command = worker_command(plan, study.paths, worker)
        else:
            command = step_command(plan, study.paths, job.element, worker)
        path = study.paths.worker_log(job.element, worker)
        steps.append(Step(spec, place, node_folder, path, command, writes_own_log=job.slurm_id is not None))
    return steps


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """The agent's log: on stderr, which submitit keeps, and in the study folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr), logging.FileHandler(path)]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def run_node(folder: str, environment: dict[str, str | None] | None = None) -> int:
    """What submitit runs on each node: the agent of the study in ``folder``.

    Args:
        environment: variables to set, or with None to remove, before anything looks at devices.
    """
    for name, value in (environment or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    paths = StudyPaths(Path(folder))
    job = Job.from_environment()
    token = secrets.token_hex(8)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # on the node's own disk, and ours alone
    node_folder = Path(tempfile.mkdtemp(prefix="hpcjobs-"))
    with logging_to(paths.node_log(job.element)):
        try:
            code = _run(paths, job, node_folder, token)
        except UnfitNodeError as error:
            log.error("%s", error)
            report = new_report(job, token)
            report.state, report.message = "ended", str(error)
            report.write(paths)
            code = EXIT_UNFIT
        finally:
            shutil.rmtree(node_folder, ignore_errors=True)
    if code:
        # not an Exception: submitit would print a traceback over the message
        sys.exit(code)
    return code


def _run(paths: StudyPaths, job: Job, node_folder: Path, token: str) -> int:
    study = open_study(paths)
    plan = make_plan(study.file, local_cores=len(os.sched_getaffinity(0)))
    log.info("node agent of %s on %s, run %d of this element", job.element, socket.gethostname(), job.restarts + 1)
    check_mode(plan)
    steps = make_steps(study, plan, job, node_folder, token)
    log.info("%d workers: %s", len(steps), ", ".join(sorted({step.report().device or "cpu" for step in steps})))
    with _journal_server(paths):
        return NodeAgent(study, plan, job, node_folder, steps, token).run()


@contextlib.contextmanager
def _journal_server(paths: StudyPaths) -> Iterator[None]:
    """Append for all workers of this node together. Workers that cannot reach the server append by themselves."""
    try:
        server = serve(paths)
    except OSError as error:
        log.warning("workers append to the journal by themselves: no local socket can be made (%s)", error)
        yield
        return
    os.environ[SOCKET_VARIABLE] = str(server.socket_path)
    try:
        with server:
            yield
    finally:
        del os.environ[SOCKET_VARIABLE]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.node", description="The node agent of a study, inside a job (see slurm/study.sbatch)."
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    return run_node(str(parser.parse_args(arguments).folder.absolute()))


if __name__ == "__main__":
    sys.exit(run_entry(main))
