"""A node whose own disk is full: workers are not taken for hung, and are stopped all the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hpcjobs import pulse
from hpcjobs.agent import NodeAgent
from hpcjobs.heartbeat import WorkerStatus, sign_of_life
from hpcjobs.job import Job
from hpcjobs.launch import request_cancel
from hpcjobs.owners import process_start
from hpcjobs.plan import make_plan
from hpcjobs.pulse import Pulse
from hpcjobs.spec import WorkerSpec, control_file, status_file
from tests.hpcjobs.conftest import study_file


def test_a_worker_without_room_for_its_status_still_shows_life_and_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, studies: Any
) -> None:
    def no_room(path: Path, status: WorkerStatus) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    monkeypatch.setattr(pulse, "TICK_S", 0.01)
    own = {"agent_pid": os.getpid(), "agent_start": process_start(os.getpid()) or ""}
    files = {"status": status_file(tmp_path, 0), "control": control_file(tmp_path)}
    spec = WorkerSpec(folder=tmp_path, element="e", worker=0, token="t", agent="a", **own, **files)
    beating = Pulse(spec, study_file("quadratic"))
    beating.start()
    monkeypatch.setattr(pulse, "write_status", no_room)
    first = sign_of_life(files["status"])
    studies.wait_for(lambda: sign_of_life(files["status"]) != first)
    second = sign_of_life(files["status"])
    studies.wait_for(lambda: sign_of_life(files["status"]) != second)
    beating.stop(0)


class FakeStep:
    """A worker that can only hear signals."""

    state, live, index = "live", True, 0

    def look(self) -> None:
        pass

    reap = kill = due = look

    def report(self) -> WorkerStatus:
        return WorkerStatus(0, "t", 0, "")

    def ask_to_stop(self) -> None:
        self.live, self.state = False, "handed back"


def test_workers_are_signalled_to_stop_where_no_order_can_be_written(tmp_path: Path, studies: Any) -> None:
    study = studies.create("epochs", trials=2)
    (tmp_path / "file").touch()
    step: Any = FakeStep()
    job = Job(element="host_1", slurm_id=None)
    agent = NodeAgent(study, make_plan(study.file), job, tmp_path / "file" / "node", [step], "token")
    request_cancel(study.paths)
    assert agent.run() == 0
    assert not step.live
