"""Studies for tests of the launcher: real folders, journals and processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.budget import Counts, count
from hpcjobs.checked_study import write_checked
from hpcjobs.config import RunConfig, StudyConfig, StudyFile, Uniform
from hpcjobs.heartbeat import read_nodes
from hpcjobs.launch import launch
from hpcjobs.owners import process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import make_plan
from hpcjobs.spec import NODE_FOLDER, Control, WorkerSpec, control_file, spec_file, status_file
from hpcjobs.study import OpenStudy, create_study

HERE = Path(__file__).parent


def wait_for(condition: Callable[[], Any], seconds: float = 300.0, what: str = "the condition") -> Any:
    """Poll until ``condition`` is true and return its value; fail the test after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"waited {seconds:.0f} s for {what}")


def study_file(objective: str, **more: Any) -> StudyFile:
    """A study of one parameter ``x`` whose objective is in objectives.py, or is named with its module."""
    workers = more.pop("workers", 2)
    settings = {"trials": 6, "epochs": 3, "direction": "minimize", **more}
    space = {"x": Uniform(type="uniform", min=-1.0, max=5.0)}
    study = StudyConfig(
        objective=objective if ":" in objective else f"objectives:{objective}", parameters=space, **settings
    )
    return StudyFile(name="a study", study=study, run=RunConfig(workers_per_node=workers, working_folder=HERE))


class Studies:
    """Makes studies and starts agents and workers; ends what is still there after the test."""

    wait_for = staticmethod(wait_for)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: list[subprocess.Popen[bytes]] = []
        self._studies: list[OpenStudy] = []
        self._launched: Counter[Path] = Counter()

    def create(self, objective: str, *, starts: Sequence[dict[str, Any]] = (), **more: Any) -> OpenStudy:
        # every test goes through a path that shells and formats stumble over
        paths = StudyPaths(self._folder / 'étude d\'un "soir"' / str(len(self._studies)))
        study = create_study(paths, study_file(objective, **more), starts)
        self._studies.append(study)
        return study

    def launch(self, study: OpenStudy) -> None:
        """Start a node agent on this machine, as submit does."""
        launch(study.paths, study.file, make_plan(study.file, local_cores=2))
        self._launched[study.paths.folder] += 1

    def let_go(self, study: OpenStudy) -> None:
        """Let the trials of ``held_epochs`` go on."""
        (study.paths.folder / "go").touch()

    def finish(self, study: OpenStudy) -> Counts:
        """Wait until the budget is spent and all nodes have ended, also those that come when there is nothing left."""
        wait_for(lambda: count(study).left == 0, what="the budget to be spent")

        def ended() -> bool:
            states = [report.state for report in read_nodes(study.paths)]
            return states == ["ended"] * self._launched[study.paths.folder]

        wait_for(ended, what="the nodes' end")
        return count(study)

    def worker(
        self,
        study: OpenStudy,
        number: int = 0,
        control: Control | None = None,
        prepare: Callable[[Path], None] = lambda folder: None,
        **spec: Any,
    ) -> Any:
        """Start one worker process without an agent; this process plays the agent and prepares the node's folder."""
        folder = study.paths.folder.parent / f"node {len(self._workers)}"
        folder.mkdir()
        prepare(folder)
        write_checked(study.file, folder)
        (control or Control()).write(control_file(folder))
        told = {
            "folder": study.paths.folder,
            "element": "here_1",
            "worker": number,
            "token": f"token {len(self._workers)}",
            "agent": "test",
            "agent_pid": os.getpid(),
            "agent_start": process_start(os.getpid()),
            "status": status_file(folder, number),
            "control": control_file(folder),
            **spec,
        }
        WorkerSpec(**told).write(spec_file(folder, number))
        command = [sys.executable, "-m", "hpcjobs.worker", str(study.paths.folder), "--worker", str(number)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, NODE_FOLDER: str(folder)}, stdout=log, stderr=log)
        self._workers.append(process)
        process.folder = folder  # type: ignore[attr-defined]
        return process

    def close(self) -> None:
        for process in self._workers:
            process.kill()
            process.wait()
        for study in self._studies:
            for report in read_nodes(study.paths):
                for pid, start in [(report.pid, report.start), *((w.pid, w.start) for w in report.workers)]:
                    # some tests are the agent themselves, with a worker that is no process
                    if pid not in (0, os.getpid()) and process_start(pid) == start:
                        with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """What a pulse or an agent does to this process's signals is undone: processes that later tests fork inherit it."""
    numbers = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def studies(tmp_path: Path) -> Iterator[Studies]:
    made = Studies(tmp_path)
    yield made
    made.close()
