"""Starts the jobs of a throughput experiment: one Slurm job per mode, or one after another on this machine."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable

from hpcjobs import slurm_control
from hpcjobs.config import PartitionMode
from hpcjobs.errors import UserError
from hpcjobs.launch import refusal_told_once
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.slurm import agent_python, submitit_parameters
from hpcjobs.text import counted
from hpcjobs.throughput_node import OnCell, run_in_job, run_job
from hpcjobs.throughput_plan import Setup, ThroughputFile, ThroughputPaths

POLL_S = 2.0
ASK_SLURM_S = 20.0
# Slurm shows a new job, or a requeued one, not at once
GONE_LOOKS = 2


def run_here(paths: ThroughputPaths, file: ThroughputFile, on_cell: OnCell) -> int:
    """Measure in this process; Ctrl-C leaves what is done, for --resume."""
    return run_job(str(paths.folder), file.jobs[0], on_cell)


def open_modes(paths: ThroughputPaths, file: ThroughputFile) -> list[PartitionMode | None]:
    """The modes of which cells are left."""
    return [mode for mode in file.jobs if _left(paths, file, mode)]


def _left(paths: ThroughputPaths, file: ThroughputFile, mode: PartitionMode | None) -> int:
    return sum(not paths.cell(setup, cell).exists() for setup in file.setups(mode) for cell in file.cells)


def submit_jobs(paths: ThroughputPaths, file: ThroughputFile, show: Callable[[str], None]) -> None:
    """Submit a job for each mode of which cells are left, unless one is queued or runs; ``show`` tells of both.

    Raises:
        UserError: sbatch refused one, or Slurm does not tell of one whether it is queued.
    """
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    known = recorded(paths)
    for mode in open_modes(paths, file):
        name = mode or "as-is"
        if name in known and _is_queued(known[name]):
            show(f"mode {name}: job {known[name]} waits or runs already")
            continue
        plan = file.plan(Setup(mode, max(file.per_gpu)), 1)
        executor = submitit.SlurmExecutor(folder=paths.submitit, python=agent_python(plan))
        executor.update_parameters(**submitit_parameters(plan, file.working_folder))
        try:
            with refusal_told_once():
                known[name] = str(executor.submit(run_in_job, str(paths.folder), mode).job_id)
        except (FailedJobError, FailedSubmissionError) as error:
            raise UserError(
                f"sbatch refused the job of mode {name}: {str(error).strip()}\nThe experiment is kept; correct the "
                f"value in question and go on with --resume {shlex.quote(str(paths.folder))} --set KEY=VALUE"
            ) from None
        write_atomically(paths.jobs, json.dumps(known))
        show(f"mode {name}: job {known[name]}")


def recorded(paths: ThroughputPaths) -> dict[str, str]:
    """Slurm's job ids by mode.

    Raises:
        UserError: the record is damaged.
    """
    if not paths.jobs.exists():
        return {}
    try:
        return {str(mode): str(job_id) for mode, job_id in json.loads(paths.jobs.read_bytes()).items()}
    except (ValueError, AttributeError):
        raise UserError(
            f"{paths.jobs}: found no record of jobs; allowed: what this command wrote there; end the experiment's jobs "
            "that squeue shows (scancel), and remove the file"
        ) from None


def _alive(job_ids: list[str]) -> bool:
    states = slurm_control.job_states(job_ids).values()
    return any(state.state in slurm_control.ALIVE | slurm_control.WAITING for state in states)


def _is_queued(job_id: str) -> bool:
    try:
        return _alive([job_id])
    except slurm_control.SlurmUnavailableError as error:
        raise UserError(
            f"Slurm does not answer, so that nothing is known of job {job_id}: {error}\nTry again where it answers"
        ) from None


def wait_for_jobs(paths: ThroughputPaths, file: ThroughputFile, show: Callable[[str], None]) -> bool:
    """Until every cell is done (True), or no job is left that could do one (False)."""
    left_before, asked, gone = -1, time.monotonic(), 0
    while modes := open_modes(paths, file):
        left = sum(_left(paths, file, mode) for mode in modes)
        if left != left_before:
            show(f"{counted(left, 'cell')} left, of mode {', '.join(str(mode or 'as-is') for mode in modes)}")
            left_before = left
        if time.monotonic() - asked > ASK_SLURM_S:
            asked = time.monotonic()
            try:
                gone = 0 if _alive(list(recorded(paths).values())) else gone + 1
            except slurm_control.SlurmUnavailableError as error:
                print(f"Slurm does not answer: {error}", file=sys.stderr)
            if gone >= GONE_LOOKS:
                return False
        time.sleep(POLL_S)
    return True


def job_script(paths: ThroughputPaths, file: ThroughputFile, mode: PartitionMode | None) -> str:
    """The sbatch text of the job of one mode."""
    from hpcjobs.slurm import job_script as script

    plan = file.plan(Setup(mode, max(file.per_gpu)), 1)
    return script(plan, StudyPaths(paths.folder), 1, file.working_folder)
