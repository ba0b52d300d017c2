"""The job that a node agent runs in: its names, its end, and how to queue it again."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpcjobs import slurm_control

# A requeued element starts again at most so often; whoever wants more resumes the study.
MOST_REQUEUES = 100


@dataclass(frozen=True)
class Job:
    """One element of a submission: an array element under Slurm, or a process of this machine."""

    element: str  # names its files: <array job>_<array task>; of a job that is no array its number, as Slurm has it
    slurm_id: str | None  # what scontrol takes; None on this machine alone
    restarts: int = 0
    end: float | None = None  # Unix time, as the environment tells it: the end as it was planned at the start

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Job:
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        job = environment.get("SLURM_JOB_ID")
        if job is None or environment.get("SUBMITIT_EXECUTOR") == "local":
            number = environment.get("SUBMITIT_LOCAL_JOB_ID", str(os.getpid()))
            return cls(element=f"{socket.gethostname()}_{number}", slurm_id=None)
        end = environment.get("SLURM_JOB_END_TIME")
        name = f"{array}_{task}" if array and task else job
        return cls(
            element=name,
            slurm_id=name,
            restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
            end=float(end) if end else None,
        )

    def state(self) -> slurm_control.JobState:
        """What Slurm says of this element; GONE where it does not know it.

        Raises:
            SlurmUnavailableError: if Slurm did not answer.
        """
        assert self.slurm_id is not None
        return slurm_control.job_states([self.slurm_id]).get(self.slurm_id, slurm_control.GONE)

    def ask_left(self) -> float | None:
        """Seconds until the job ends, as Slurm says; None if it does not answer, or the job has no end.

        squeue takes what this node's clock has gone on since the start, without the time in which the job was
        suspended. A clock that is wrong makes it wrong by as much; where that is minutes, munge refuses the question.
        """
        try:
            return self.state().left_s
        except slurm_control.SlurmUnavailableError:
            return None

    def planned_left(self) -> float | None:
        """Seconds until the end that was planned at the start: for as long as Slurm has not answered."""
        return None if self.end is None else self.end - time.time()

    def may_requeue(self) -> bool:
        """Whether queueing this element again is ours to do: nobody cancelled it and Slurm does not do it itself.

        Raises:
            SlurmUnavailableError: if Slurm did not answer.
        """
        if self.slurm_id is None or self.restarts >= MOST_REQUEUES:
            return False
        # it may run again elsewhere already, if this node was cut off
        return self.state().state == "RUNNING" and slurm_control.restarts(self.slurm_id) == self.restarts

    def requeue(self) -> None:
        """Queue this element again; Slurm then ends this run of it."""
        assert self.slurm_id is not None
        slurm_control.requeue(self.slurm_id)
