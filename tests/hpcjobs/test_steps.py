"""How a node's agent starts its steps: a few at a time, and none waits for one that cannot start."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from hpcjobs import steps
from hpcjobs.devices import Place
from hpcjobs.failures import EXIT_HANDED_BACK
from hpcjobs.owners import process_start
from hpcjobs.placement import UnfitNodeError
from hpcjobs.spec import WorkerSpec, control_file, status_file
from hpcjobs.steps import Step, allow_open_files, start_due
from tests.hpcjobs.conftest import wait_for

SILENT = [sys.executable, "-c", "import time; time.sleep(60)"]


def silent_step(
    folder: Path, worker: int, command: list[str] | None = None, writes_own_log: bool = False, **environment: str
) -> Step:
    """A step whose process never says anything, as when Slurm does not create it."""
    spec = WorkerSpec(
        folder=folder, element="1_0", worker=worker, token="", agent="a", agent_pid=os.getpid(),
        agent_start=process_start(os.getpid()) or "", status=status_file(folder, worker), control=control_file(folder),
        environment=environment,
    )  # fmt: skip
    return Step(spec, Place(), folder, folder / f"{worker}.log", command or SILENT, writes_own_log=writes_own_log)


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
    step = silent_step(tmp_path, 0, [sys.executable, "-c", code], OMP_NUM_THREADS="3")
    step.start()
    wait_for(lambda: step.reap() is not None)
    assert (tmp_path / "0.log").read_text() == "3\n"


UNTIL_THE_FOURTH_TIME = """
import pathlib, sys, time
tries = pathlib.Path(sys.argv[0]).with_name("tries")
with tries.open("a") as file:
    file.write(".")
if tries.stat().st_size < 4:
    sys.exit("srun: error: Unable to create step for job 1: Job/step creation temporarily disabled")
time.sleep(60)
"""


def test_a_step_that_is_not_created_is_tried_again_after_pauses_that_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    restart = Step.restart
    monkeypatch.setattr(Step, "restart", lambda step, after_s: (pauses.append(after_s), restart(step, after_s)))
    (tmp_path / "srun.py").write_text(UNTIL_THE_FOURTH_TIME)
    crew = [silent_step(tmp_path, 0, command=[sys.executable, str(tmp_path / "srun.py")]), silent_step(tmp_path, 1)]

    def tried_four_times() -> bool:
        start_due(crew, 2, 0.0, lambda seconds: None)
        crew[0].reap()
        return (tmp_path / "tries").exists() and (tmp_path / "tries").stat().st_size == 4

    try:
        wait_for(tried_four_times)
        assert [step.live for step in crew] == [True, True]
        assert pauses == sorted(set(pauses)) and len(pauses) == 3
    finally:
        for step in crew:
            step.kill()


def test_a_step_that_is_never_created_leaves_its_worker_out_and_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LONGEST_PAUSE_S", 0.0)
    step = silent_step(tmp_path, 0, command=[sys.executable, "-c", "import sys; sys.exit(1)"])

    def left_out() -> bool:
        start_due([step], 1, 0.0, lambda seconds: None)
        step.reap()
        return step.state == "out"

    wait_for(left_out)
    assert "died 8 times without finishing a trial; see " in step.message


WORKS_ONCE = """
import os, pathlib, sys
from hpcjobs.heartbeat import WorkerStatus, write_status
from hpcjobs.spec import NODE_FOLDER, WorkerSpec, spec_file
spec = WorkerSpec.read(spec_file(pathlib.Path(os.environ[NODE_FOLDER]), 0))
if not spec.restarts:
    write_status(spec.status, WorkerStatus(0, spec.token, os.getpid(), "", state="idle"))
sys.exit(1)
"""


def test_a_worker_is_not_given_up_while_slurm_creates_no_steps_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is away for some minutes, say. The worker has shown before that its command is right."""
    monkeypatch.setattr(steps, "LONGEST_PAUSE_S", 0.0)
    step = silent_step(tmp_path, 0, [sys.executable, "-c", WORKS_ONCE], writes_own_log=True)
    tries = 0

    def tried(often: int) -> bool:
        nonlocal tries
        start_due([step], 1, 0.0, lambda seconds: None)
        tries += step.reap() is not None
        return tries >= often or step.state == "out"

    wait_for(lambda: tried(steps.MOST_DEATHS + 2))
    assert step.state == "pending"
    monkeypatch.setattr(steps, "NO_STEP_S", 0.0)
    wait_for(lambda: tried(100))
    assert step.state == "out"


def test_a_command_that_is_not_on_the_node_leaves_its_worker_out_at_once(tmp_path: Path) -> None:
    step = silent_step(tmp_path, 0, ["srun-that-is-not-here"])
    start_due([step], 1, 0.0, lambda seconds: None)
    assert step.state == "out"
    assert step.message == "srun-that-is-not-here was not found on this node; correct PATH in the profile's setup"


def test_a_worker_that_handed_back_begins_again_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = silent_step(tmp_path, 0, [sys.executable, "-c", f"import sys; sys.exit({EXIT_HANDED_BACK})"])
    step.start()
    wait_for(lambda: step.reap() is not None)
    assert step.state == "handed back" and not step.due()
    monkeypatch.setattr(steps, "HANDED_BACK_PAUSE_S", 0.0)
    step.start()
    wait_for(lambda: step.reap() is not None)
    assert step.due()


def test_an_agent_may_hold_as_many_files_open_as_it_needs_or_says_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = (100_000, 200_000)  # whatever else this process holds open
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: raised.append(new))
    allow_open_files(16)
    assert not raised
    limits = (256, 200_000)
    allow_open_files(1000)
    ((soft, hard),) = raised
    assert 1000 < soft < hard == 200_000
    limits = (24, 24)
    with pytest.raises(UnfitNodeError, match=r"found a limit of 24 open files .* for 16 workers; raise it"):
        allow_open_files(16)
