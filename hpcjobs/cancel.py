"""Entry: ends the jobs of a study. Trials that run are handed back; the study can be resumed."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from hpcjobs import slurm_control
from hpcjobs.budget import count
from hpcjobs.errors import UserError, run_entry
from hpcjobs.launch import request_cancel, slurm_jobs
from hpcjobs.paths import StudyPaths
from hpcjobs.progress import LIVE, StudyWatch
from hpcjobs.study import OpenStudy, open_study
from hpcjobs.text import seconds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.cancel",
        description="End all jobs of a study. Running trials are checkpointed and handed back as far as they listen.",
        epilog="example: python -m hpcjobs.cancel runs/experiment1",
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    parser.add_argument(
        "--wait", type=seconds, default=30.0, metavar="S", help="seconds to end by itself (default: 30)"
    )
    options = parser.parse_args(arguments)
    study = open_study(StudyPaths(options.folder))
    try:
        cancel(study, options.wait)
    except slurm_control.SlurmUnavailableError as error:
        raise UserError(
            f"Slurm does not answer: {error}\nNodes that run stop by themselves, since they look into the study's "
            "folder; what waits in the queue is still there: cancel again where Slurm answers"
        ) from None
    counts = count(study)
    done = "cancelled" if counts.left else "nothing is left to cancel"
    print(f"{done}: {counts.finished} of {counts.budget} trials have ended, {counts.left} are left")
    if counts.left:
        print(f"to go on: python -m hpcjobs.submit --resume {shlex.quote(str(study.paths.folder))}")
    return 0


def cancel(study: OpenStudy, wait_s: float) -> None:
    """Ask all nodes to stop, take what waits in Slurm's queue away, and end by force what is left after ``wait_s``."""
    request_cancel(study.paths)
    job_ids = slurm_jobs(study)
    slurm_control.cancel(job_ids, pending_only=True)
    watch = StudyWatch(study)
    end = time.monotonic() + wait_s
    while (now := watch.look()).live_nodes and time.monotonic() < end:
        time.sleep(0.5)
    slurm_control.cancel(job_ids)
    for line in now.nodes:
        # only on this host, and only if it is the same process: look() has checked both for "gone"
        if line.state in LIVE and not job_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(line.report.pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_entry(main))
