"""Starts node agents through submitit: one array element per node, or one process of this machine.

Every submission leaves a record in the study folder, by which ``status`` and ``cancel`` find its jobs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcjobs import slurm_control
from hpcjobs.config import StudyFile
from hpcjobs.errors import UserError
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.plan import Plan
from hpcjobs.slurm import agent_python, submitit_parameters
from hpcjobs.text import counted

if TYPE_CHECKING:
    from hpcjobs.study import OpenStudy

# submitit ends local jobs after a time; a study of this machine has none
LOCAL_TIMEOUT_MIN = 60 * 24 * 365


@dataclass(frozen=True)
class Launched:
    """One submission: Slurm's job ids, or the local controller's process id."""

    job_ids: tuple[str, ...]
    elements: int
    slurm: bool
    host: str


def jobs_folder(paths: StudyPaths) -> Path:
    return paths.folder / "jobs"


def _cancel_file(paths: StudyPaths) -> Path:
    return paths.folder / "cancelled"


def cancel_requested(paths: StudyPaths) -> bool:
    """Whether somebody has cancelled the study; agents look at this at every beat."""
    return _cancel_file(paths).exists()


def request_cancel(paths: StudyPaths) -> None:
    write_atomically(_cancel_file(paths), "")


def recorded(paths: StudyPaths) -> list[Launched]:
    """All submissions of this study.

    Raises:
        UserError: a record is damaged.
    """
    found = []
    for path in sorted(jobs_folder(paths).glob("*.json")):
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            found.append(Launched(**{**data, "job_ids": tuple(data["job_ids"])}))
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{path}: found no record of a submission; allowed: what submit wrote there; end the job "
                f"{path.stem} if it runs (on Slurm: scancel {path.stem}), and remove the file"
            ) from None
    return found


def slurm_jobs(study: OpenStudy) -> tuple[list[str], list[str]]:
    """Ids of the study's jobs in Slurm's queue, and of those that a record names but that are not its own.

    Records alone prove nothing: in a copied folder they are those of another study, and Slurm gives numbers again once
    it has lost its state. A job is the study's own if its batch script was in the study's folder; so are found, too,
    those whose submission was killed before its record.

    Raises:
        SlurmUnavailableError: if Slurm did not answer.
    """
    known = {job_id for job in recorded(study.paths) if job.slurm for job_id in job.job_ids}
    if not known and study.file.cluster is None:
        return [], []
    own = slurm_control.jobs_with_script_in(study.paths.submitit)
    there = slurm_control.job_states(sorted(known - own))
    in_queue = slurm_control.ALIVE | slurm_control.WAITING
    others = {name.partition("_")[0] for name, job in there.items() if job.state in in_queue}
    return sorted(own), sorted(others)


def is_agent_of(paths: StudyPaths, pid: int) -> bool:
    """Whether this process of this host was started for the study in this very folder: not for one that was copied."""
    process = Path("/proc") / str(pid)
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        return any(
            (process / "cwd" / os.fsdecode(argument)).resolve() in (paths.folder.resolve(), paths.submitit.resolve())
            for argument in arguments
            if argument
        )
    except OSError:  # it has ended, or is another user's
        return False


def launch(paths: StudyPaths, file: StudyFile, plan: Plan) -> Launched:
    """Start ``plan.nodes`` node agents for the study in the folder; also for one that is running already.

    Raises:
        FailedJobError, FailedSubmissionError: sbatch refused all of them.
        UserError: it refused some.
    """
    from hpcjobs.budget import go_on
    from hpcjobs.guardian import recover_lost
    from hpcjobs.study import open_study

    _cancel_file(paths).unlink(missing_ok=True)
    study = open_study(paths)
    go_on(study)
    recover_lost(study, with_slurm=plan.cluster is not None)
    paths.submitit.mkdir(parents=True, exist_ok=True)
    paths.nodes.mkdir(exist_ok=True)
    if plan.cluster is not None:
        return _launch_slurm(paths, file, plan)
    launched = _launch_local(paths)
    _record(paths, launched)
    return launched


def _record(paths: StudyPaths, launched: Launched) -> None:
    write_atomically(jobs_folder(paths) / f"{'-'.join(launched.job_ids)}.json", json.dumps(asdict(launched)))


def _launch_slurm(paths: StudyPaths, file: StudyFile, plan: Plan) -> Launched:
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from hpcjobs.node import run_node

    executor = submitit.SlurmExecutor(folder=paths.submitit, python=agent_python(plan))
    executor.update_parameters(**submitit_parameters(plan, file.run.working_folder))
    ids: list[str] = []
    queued = 0
    for elements in plan.arrays:
        try:
            with refusal_told_once():
                jobs = executor.map_array(run_node, [str(paths.folder)] * elements)
        except (FailedJobError, FailedSubmissionError) as error:
            if not ids:
                raise
            rest = plan.nodes - queued
            raise UserError(
                f"sbatch refused {rest} of {counted(plan.nodes, 'node')}: {str(error).strip()}\n"
                f"{counted(queued, 'node')} of the study, queued before as job {', '.join(ids)}, will run. To add the "
                f"rest later: python -m hpcjobs.submit --resume {shlex.quote(str(paths.folder))} --nodes {rest}"
            ) from None
        ids.append(jobs[0].job_id.partition("_")[0])
        queued += elements
        # each at once: nobody may find jobs that no record tells of
        _record(paths, Launched((ids[-1],), elements, True, socket.gethostname()))
    return Launched(tuple(ids), plan.nodes, True, socket.gethostname())


@contextlib.contextmanager
def refusal_told_once() -> Iterator[None]:
    """Around a submission: submitit prints what sbatch said, and then raises an error with the same text."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        yield
    sys.stderr.write(said.getvalue())  # warnings of a job that was accepted


def _launch_local(paths: StudyPaths) -> Launched:
    import submitit

    from hpcjobs.node import run_node

    executor = submitit.LocalExecutor(folder=paths.submitit)
    executor.update_parameters(timeout_min=LOCAL_TIMEOUT_MIN)
    # submitit's local executor hides all GPUs from jobs that do not ask for any
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
    with _held(signal.SIGINT, signal.SIGHUP), _without_streams():
        job = executor.submit(run_node, str(paths.folder), environment)
    return Launched((str(job.job_id),), 1, False, socket.gethostname())


@contextlib.contextmanager
def _without_streams() -> Iterator[None]:
    """A child that starts meanwhile gets none of our streams: who reads our output through a pipe, or over ssh, would
    wait for the study's end."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours = {}
    for number in range(3):
        with contextlib.suppress(OSError):  # one that is closed already
            ours[number] = os.dup(number)
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        for number in ours:
            os.dup2(nothing, number)
        yield
    finally:
        for number, copy in ours.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(nothing)


@contextlib.contextmanager
def _held(*numbers: signal.Signals) -> Iterator[None]:
    """These signals reach us afterwards. A child that starts meanwhile has them blocked: submitit's controller would
    kill the agent at once on Ctrl-C, while the agent itself takes its time to stop the workers."""
    came: list[int] = []
    # the mask alone does not keep a signal from a library's threads, which tell the main one
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        for signal_number in came:
            signal.raise_signal(signal_number)
