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
from hpcjobs.heartbeat import NodeReport
from hpcjobs.launch import is_agent_of, request_cancel, slurm_jobs
from hpcjobs.owners import process_alive
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
        left_alone = cancel(study, options.wait)
    except slurm_control.SlurmUnavailableError as error:
        raise UserError(
            f"Slurm does not answer: {error}\nNodes that run stop by themselves, since they look into the study's "
            "folder; what waits in the queue is still there: cancel again where Slurm answers"
        ) from None
    for line in left_alone:
        print(line)
    counts = count(study)
    done = "cancelled" if counts.left else "nothing is left to cancel"
    print(f"{done}: {counts.finished} of {counts.budget} trials have ended, {counts.left} are left")
    if counts.left:
        print(f"to go on: python -m hpcjobs.submit --resume {shlex.quote(str(study.paths.folder))}")
    return 0


def cancel(study: OpenStudy, wait_s: float) -> list[str]:
    """Ask all nodes to stop, take what waits in Slurm's queue away, and end by force what is left after ``wait_s``.

    Only what is the study's own: a folder that was copied names what belongs to another. Returns what was left alone.
    """
    request_cancel(study.paths)
    job_ids, others = slurm_jobs(study)
    slurm_control.cancel(job_ids, pending_only=True)
    watch = StudyWatch(study)
    end = time.monotonic() + wait_s
    while (left := _live(watch, others, study.paths))[0] and time.monotonic() < end:
        time.sleep(0.5)
    slurm_control.cancel(job_ids)
    own, strangers = left
    for report in own:
        if process_alive(report.pid, report.start) and not job_ids:  # only on this host, and only the same process
            with contextlib.suppress(ProcessLookupError):
                os.kill(report.pid, signal.SIGTERM)
    return [
        *(
            f"left alone: job {job_id}, which a record in this folder names: its batch script is not in "
            f"{study.paths.submitit}, or it is another user's. If it is of this study: scancel {job_id}"
            for job_id in others
        ),
        *(
            f"left alone: process {report.pid}, whose file in this folder is a copy: it works for another folder"
            for report in strangers
        ),
    ]


def _live(watch: StudyWatch, other_jobs: list[str], paths: StudyPaths) -> tuple[list[NodeReport], list[NodeReport]]:
    """Nodes that work for this study, and processes of this host that work for another one."""
    own: list[NodeReport] = []
    strangers: list[NodeReport] = []
    for line in watch.look().nodes:
        report = line.report
        if line.state not in LIVE or report.element.partition("_")[0] in other_jobs:
            continue
        # in this order: of one that ends meanwhile no command line is left
        is_stranger = not is_agent_of(paths, report.pid) and process_alive(report.pid, report.start)
        (strangers if is_stranger else own).append(report)
    return own, strangers


if __name__ == "__main__":
    sys.exit(run_entry(main))
