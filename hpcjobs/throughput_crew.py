"""The workers of one set-up of a throughput experiment as processes: started gently, restarted, given up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpcjobs.devices import Place, worker_environment
from hpcjobs.failures import EXIT_UNUSABLE
from hpcjobs.job import Job
from hpcjobs.owners import process_start
from hpcjobs.plan import Plan
from hpcjobs.slurm import module_command, srun_command
from hpcjobs.spec import NODE_FOLDER, WorkerSpec, control_file, spec_file, status_file
from hpcjobs.steps import MOST_STARTING, SLOW_START_S
from hpcjobs.throughput_plan import Setup, ThroughputPaths
from hpcjobs.throughput_protocol import Protocol

log = logging.getLogger("hpcjobs.throughput")

MOST_STARTS = 3
PAUSE_S = 2.0
BETWEEN_STARTS_S = 0.05
GRACE_S = 5.0
# Slurm's word to the steps of a job that is to end: before its time limit, or to make room for another
_TOLD_TO_END = frozenset(
    code for number in (signal.SIGUSR2, signal.SIGTERM) for code in (-int(number), 128 + int(number))
)


class JobEndsError(RuntimeError):
    """Slurm has told the workers to end; what they were measuring is no result."""


class Member:
    """One worker: its process, how often it was started, and why it was given up."""

    def __init__(self, spec: WorkerSpec, command: list[str], log_path: Path, *, writes_own_log: bool) -> None:
        self.spec, self.out = spec, ""
        self._command, self._log, self._writes_own_log = command, log_path, writes_own_log
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._due = 0.0
        self._started = 0.0

    @property
    def index(self) -> int:
        return self.spec.worker

    @property
    def live(self) -> bool:
        return self._process is not None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    def due(self) -> bool:
        return not self.out and self._process is None and time.monotonic() >= self._due

    def start(self, node_folder: Path) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        self._started = time.monotonic()
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self.spec.environment, NODE_FOLDER: str(node_folder)},
                stdin=subprocess.DEVNULL,
                stdout=None if self._writes_own_log else output,
                stderr=None if self._writes_own_log else subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """The exit code of a process that has ended since the last call."""
        code = self._process.poll() if self._process else None
        if code is not None:
            self._process = None
        return code

    def retry(self, why: str) -> None:
        """Start again after a pause, or give up."""
        if self._starts >= MOST_STARTS:
            self.give_up(f"{why}, {self._starts} times; see {self._log}")
        self._due = time.monotonic() + PAUSE_S * self._starts

    def give_up(self, why: str) -> None:
        self.out = why
        log.error("worker %d is left out: %s", self.index, why)
        self.kill()

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the process: srun passes SIGTERM on to its task, SIGKILL would leave that behind."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.send(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
                break
        self._process = None


class Crew:
    """All workers of a set-up."""

    def __init__(self, members: Sequence[Member], protocol: Protocol) -> None:
        self.members, self._protocol = list(members), protocol
        self._at_once = min(MOST_STARTING, max(4, os.cpu_count() or 1))

    def tend(self) -> list[tuple[int, str]]:
        """Start what is due; returns the workers that have died since the last call, and how.

        Raises:
            JobEndsError: one was told to end.
        """
        deaths = []
        for member in self.members:
            code = member.ended()
            if code is None or code == 0:
                continue
            if code in _TOLD_TO_END:
                raise JobEndsError("this job is about to end, or to make room for another")
            problem = self._protocol.problem_file(member.index)
            if code == EXIT_UNUSABLE and problem.exists():
                member.give_up(json.loads(problem.read_bytes())["message"])
            else:
                member.retry(f"its process ended with {code}")
            deaths.append((member.index, member.out or f"its process ended with {code}"))
        for member in self.members:
            if self._starting() < self._at_once and member.due():
                member.start(self._protocol.folder)
                time.sleep(BETWEEN_STARTS_S)
        return deaths

    def _starting(self) -> int:
        """Started and not heard of yet; one that takes long does not hold up the others."""
        return sum(
            member.live and member.age_s < SLOW_START_S and not self._protocol.up_file(member.index).exists()
            for member in self.members
        )

    def kill(self) -> None:
        """Ask all to end before waiting for any."""
        for member in self.members:
            member.send(signal.SIGTERM)
        for member in self.members:
            member.kill()


def make_crew(
    plan: Plan,
    paths: ThroughputPaths,
    setup: Setup,
    job: Job,
    token: str,
    places: Sequence[Place],
    protocol: Protocol,
) -> Crew:
    """One member per place. Their files are in the protocol's folder."""
    shares = Counter(place.device for place in places)
    members = []
    for worker, place in enumerate(places):
        spec = WorkerSpec(
            folder=paths.folder,
            element=job.element,
            worker=worker,
            token=token,
            agent=token,
            agent_pid=os.getpid(),
            agent_start=process_start(os.getpid()) or "",
            status=status_file(protocol.folder, worker),
            control=control_file(protocol.folder),
            device=place.device,
            has_gpu=bool(place.device),
            environment=worker_environment(plan, place, protocol.folder, worker),
            cores=place.cores,
            share=shares[place.device],
        )
        spec.write(spec_file(protocol.folder, worker))
        command = module_command(plan, "hpcjobs.throughput_worker", str(paths.folder), "--worker", str(worker))
        log_path = paths.worker_log(job.element, setup, worker)
        if job.slurm_id is not None:
            command = srun_command(plan, worker, log_path, command)
        members.append(Member(spec, command, log_path, writes_own_log=job.slurm_id is not None))
    return Crew(members, protocol)
