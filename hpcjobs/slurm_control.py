"""Questions and orders to a running Slurm: the state of jobs, their time left, requeue and cancel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 60.0
#: States in which an element's processes may still exist.
ALIVE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
#: States in which an element has not started, or waits to start again.
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})


class SlurmUnavailableError(RuntimeError):
    """Slurm did not answer. Nothing follows from it about any job."""


@dataclass(frozen=True)
class JobState:
    """``state`` in squeue's long names; GONE when Slurm does not know the job any more. ``reason``: why it waits."""

    state: str
    left_s: float | None = None
    reason: str = ""


GONE = JobState("GONE")


def _run(command: list[str], timeout_s: float = TIMEOUT_S) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmUnavailableError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SlurmUnavailableError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def parse_time_left(text: str) -> float | None:
    """Seconds of squeue's ``[D-][HH:]MM:SS``; None for UNLIMITED, INVALID and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def job_states(job_ids: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, JobState]:
    """The states of all elements of these jobs, by ``<array job>_<array task>`` (or the plain id of no array).

    Elements that Slurm has forgotten are not in the answer.

    Raises:
        SlurmUnavailableError: if Slurm did not answer.
    """
    states: dict[str, JobState] = {}
    for job_id in job_ids:
        command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}", "--format=%i|%T|%L|%r"]
        try:
            answer = _run(command, timeout_s)
        except SlurmUnavailableError as error:
            if "Invalid job id" in str(error):
                continue
            raise
        for line in answer.splitlines():
            element, state, left, reason = line.strip().split("|", 3)
            states[element] = JobState(state, parse_time_left(left), reason)
    return states


def jobs_with_script_in(folder: Path) -> set[str]:
    """Ids of this user's jobs in the queue, of arrays their first ids, whose batch script was in ``folder``.

    Raises:
        SlurmUnavailableError: if Slurm did not answer.
    """
    found = set()
    for line in _run(["squeue", "--me", "--noheader", "--format=%F|%o"]).splitlines():
        job_id, _, script = line.partition("|")
        if Path(script).parent.resolve() == folder.resolve():
            found.add(job_id)
    return found


def restarts(element: str) -> int:
    """How often Slurm has queued this element again.

    Raises:
        SlurmUnavailableError: if Slurm did not answer.
    """
    found = re.search(r"\bRestarts=(\d+)", _run(["scontrol", "--oneliner", "show", "job", element]))
    return int(found.group(1)) if found else 0


def requeue(element: str) -> None:
    """Requeue one array element (or a job that is no array).

    Raises:
        SlurmUnavailableError: if Slurm refused.
    """
    _run(["scontrol", "requeue", element])


def cancel(job_ids: Iterable[str], *, pending_only: bool = False) -> None:
    """Cancel jobs; those that have ended already are no error.

    Raises:
        SlurmUnavailableError: if Slurm refused.
    """
    only = ["--state=PENDING"] if pending_only else []
    for job_id in job_ids:
        try:
            _run(["scancel", *only, job_id])
        except SlurmUnavailableError as error:
            if "Invalid job id" not in str(error):
                raise
