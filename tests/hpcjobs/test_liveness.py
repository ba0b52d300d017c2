"""When the owner of a trial is certainly gone. Every doubt keeps the trial with its owner."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.heartbeat import OLD_S, HeartbeatWatch, NodeReport
from hpcjobs.liveness import SILENT_WITHOUT_SLURM_S, gone
from hpcjobs.owners import Owner, process_alive, process_gone, process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.slurm_control import GONE, JobState

RUNNING, PENDING = JobState("RUNNING"), JobState("PENDING")
FAR = Owner("17", "0", "2", "n7", "another host", 5, "boot:1:99", "token", element="17_0", agent="agent")


class Watch(HeartbeatWatch):
    """A node's file as seen for so many seconds without a change."""

    def __init__(self, silent_s: float | None, **report: Any) -> None:
        super().__init__(StudyPaths(Path()))
        told = {"element": "17_0", "agent": "agent", "host": "another host", "node": "n7", "pid": 1, "start": "x"}
        self._silent = silent_s
        if silent_s is not None:
            self.reports = {"17_0": NodeReport(**{**told, "state": "running", **report})}

    def silent_s(self, element: str) -> float | None:
        return self._silent


@pytest.mark.parametrize(
    ("silent_s", "jobs", "is_gone"),
    [
        (1.0, {"17_0": RUNNING}, False),
        (OLD_S * 100, {"17_0": RUNNING}, False),  # a slow filesystem; Slurm knows better
        (OLD_S * 100, {"17_0": JobState("COMPLETING")}, False),
        (OLD_S * 100, None, False),  # Slurm was not asked, or did not answer
        (1.0, {"17_0": GONE}, False),  # Slurm forgot, but the node still beats
        (OLD_S * 2, {"17_0": GONE}, True),
        (OLD_S * 2, {}, True),
        (1.0, {"17_0": JobState("NODE_FAIL")}, True),
        (1.0, {"17_0": JobState("CANCELLED")}, True),
        (1.0, {"17_0": JobState("REVOKED")}, False),  # it runs in another cluster of a federation
        (1.0, {"17_0": PENDING}, True),  # requeued: the run that owned the trial has ended
        (None, {"17_0": JobState("FAILED")}, True),
        (OLD_S * 2, {"17": RUNNING}, False),  # a job that is no array
    ],
)
def test_an_owner_on_another_node_is_gone_when_slurm_and_silence_say_so(
    silent_s: float | None, jobs: dict[str, JobState] | None, is_gone: bool
) -> None:
    assert (gone(FAR, Watch(silent_s), jobs) is not None) == is_gone


def test_a_node_that_has_ended_or_runs_anew_has_no_old_workers() -> None:
    assert gone(FAR, Watch(1.0, state="ended"), {"17_0": RUNNING})
    assert gone(FAR, Watch(1.0, agent="a later one", run=1), {"17_0": RUNNING})


@pytest.mark.parametrize("state", ["running", "ended"])
def test_an_earlier_agent_that_wakes_up_and_writes_its_file_again_takes_nothing_from_its_successor(state: str) -> None:
    successor = dataclasses.replace(FAR, agent="a later one", run=1)
    assert gone(successor, Watch(1.0, state=state), {"17_0": RUNNING}) is None


def test_without_slurm_another_host_must_be_silent_for_long() -> None:
    owner = dataclasses.replace(FAR, job="", task="")
    assert gone(owner, Watch(SILENT_WITHOUT_SLURM_S - 1), None) is None
    assert gone(owner, Watch(SILENT_WITHOUT_SLURM_S + 1), None)


def test_a_process_is_known_by_its_start_not_by_its_number_alone() -> None:
    start = process_start(os.getpid())
    assert start is not None
    assert process_alive(os.getpid(), start)
    assert not process_gone(os.getpid(), start)
    boot, namespace, ticks = start.split(":")
    assert process_gone(os.getpid(), f"{boot}:{namespace}:{int(ticks) - 1}")
    assert process_gone(os.getpid(), f"rebooted:{namespace}:{ticks}")


def test_of_a_process_in_another_container_nothing_is_known() -> None:
    boot, namespace, ticks = (process_start(os.getpid()) or "").split(":")
    assert not process_gone(os.getpid(), f"{boot}:{namespace}1:{ticks}")
    assert not process_gone(1, f"{boot}:{namespace}:1", host="another host")


def test_a_process_that_nobody_has_reaped_is_gone() -> None:
    child = subprocess.Popen(["true"])
    start = process_start(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None
    assert start is None or process_gone(child.pid, start)
    child.wait()
