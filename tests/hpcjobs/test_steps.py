"""How a node's agent starts its steps: a few at a time, and none waits for one that cannot start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpcjobs import steps
from hpcjobs.devices import Place
from hpcjobs.owners import process_start
from hpcjobs.spec import WorkerSpec, control_file, status_file
from hpcjobs.steps import Step, start_due
from tests.hpcjobs.conftest import wait_for

SILENT = "import time; time.sleep(60)"


def silent_step(folder: Path, worker: int, code: str = SILENT, **environment: str) -> Step:
    """A step whose process never says anything, as when Slurm does not create it."""
    spec = WorkerSpec(
        folder=folder, element="1_0", worker=worker, token="", agent="a", agent_pid=os.getpid(),
        agent_start=process_start(os.getpid()) or "", status=status_file(folder, worker), control=control_file(folder),
        environment=environment,
    )  # fmt: skip
    command = [sys.executable, "-c", code]
    return Step(spec, Place(), folder, folder / f"{worker}.log", command, writes_own_log=False)


def test_only_so_many_steps_are_at_their_start_at_any_time(tmp_path: Path) -> None:
    crew = [silent_step(tmp_path, worker) for worker in range(5)]
    pauses: list[float] = []
    try:
        for _ in range(3):
            start_due(crew, 2, 0.05, pauses.append)
        assert [step.live for step in crew] == [True, True, False, False, False]
        assert pauses == [0.05, 0.05]
    finally:
        for step in crew:
            step.kill()


def test_a_step_that_does_not_start_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = [silent_step(tmp_path, worker) for worker in range(4)]
    try:
        start_due(crew, 2, 0.0, lambda seconds: None)
        monkeypatch.setattr(steps, "SLOW_START_S", 0.0)
        start_due(crew, 2, 0.0, lambda seconds: None)
        assert all(step.live for step in crew)
    finally:
        for step in crew:
            step.kill()


def test_threads_are_set_before_a_workers_first_import(tmp_path: Path) -> None:
    code = "import os; print(os.environ['OMP_NUM_THREADS'], flush=True)"
    step = silent_step(tmp_path, 0, code, OMP_NUM_THREADS="3")
    step.start()
    wait_for(lambda: step.reap() is not None)
    assert (tmp_path / "0.log").read_text() == "3\n"
