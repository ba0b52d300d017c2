"""Many processes, killed at random: no acknowledged record is lost, no number given twice, no two write at once."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hpcjobs.filesystem import decide_lock
from hpcjobs.journal import open_storage
from hpcjobs.journal_server import serve
from hpcjobs.paths import StudyPaths
from tests.cluster.daemons import wait_until

WORKERS, SERVERS, KILLS, TRIALS = 8, 2, 40, 30
PATIENCE_S = 600.0


def fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        os._exit(1)


def work(paths: StudyPaths, name: str, socket: str) -> None:
    """Run trials and write down, after each answer, what was answered. Every fifth time, count under the lock."""
    study = optuna.load_study(study_name="s", storage=open_storage(paths, socket=socket))
    storage = study._storage
    number = paths.folder / "number"
    with (paths.folder / f"{name}.acknowledged").open("a", buffering=1) as file:

        def acknowledge(*what: object) -> None:
            file.write(json.dumps(what) + "\n")

        while not (paths.folder / "enough").exists():
            trial = study.ask()
            acknowledge("asked", trial.number)
            trial.suggest_float("x", 0, 1)
            trial.report(trial.number / 2, step=1)
            acknowledge("reported", trial.number)
            study.tell(trial, float(trial.number))
            acknowledge("told", trial.number)
            if trial.number % 5 == 0:
                with storage.exclusive():  # type: ignore[attr-defined]
                    count = int(number.read_text()) + 1
                    acknowledge("counts", count)
                    time.sleep(0.001)
                    temporary = number.with_name(f"number.{name}")
                    temporary.write_text(str(count))
                    temporary.replace(number)
                acknowledge("counted", count)
    os._exit(0)


def serve_for_ever(paths: StudyPaths, path: Path) -> None:
    serve(paths, path)
    while True:
        signal.pause()


def rage(start: list[Callable[[], int]], folder: Path) -> None:
    """Keep these processes running, kill one of them again and again, then wait until they have told enough."""
    generator = random.Random(7)
    pids = [function() for function in start]
    for _ in range(KILLS):
        time.sleep(generator.uniform(0.01, 0.1))
        victim = generator.randrange(len(pids))
        if generator.random() < 0.3:
            os.kill(pids[victim], signal.SIGSTOP)
            time.sleep(generator.uniform(0, 0.1))
            os.kill(pids[victim], signal.SIGCONT)
        os.kill(pids[victim], signal.SIGKILL)
        os.waitpid(pids[victim], 0)
        pids[victim] = start[victim]()
    wait_until(
        lambda: sum(file.read_text().count('"told"') for file in folder.glob("*.acknowledged")) >= TRIALS,
        f"{TRIALS} told trials",
        PATIENCE_S,
    )
    (folder / "enough").touch()
    for pid in pids[:SERVERS]:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), "a worker failed"


@pytest.mark.slow
@pytest.mark.parametrize("lock", ["kernel", "soft"])
def test_kill_9_at_random_loses_no_acknowledged_record(lock: str, tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    decide_lock(paths.journal, lock, "told by the test")  # type: ignore[arg-type]
    optuna.create_study(study_name="s", storage=open_storage(paths, socket=""))
    (tmp_path / "number").write_text("0")
    sockets = [tmp_path / f"socket{server}" for server in range(SERVERS)]
    start: list[Callable[[], int]] = [
        lambda path=path: fork(lambda: serve_for_ever(paths, path))  # type: ignore[misc]
        for path in sockets
    ]
    for worker in range(WORKERS):
        socket = str(sockets[worker % SERVERS]) if worker % 4 else ""
        start.append(
            lambda worker=worker, socket=socket: fork(  # type: ignore[misc]
                lambda: work(paths, f"{worker}", socket)
            )
        )
    rage(start, tmp_path)

    acknowledged: dict[str, list[int]] = {"asked": [], "reported": [], "told": [], "counts": [], "counted": []}
    for file in tmp_path.glob("*.acknowledged"):
        for line in file.read_text().splitlines():
            what, number = json.loads(line)
            acknowledged[what].append(number)
    storage = open_storage(paths, socket="")
    trials = optuna.load_study(study_name="s", storage=storage).get_trials(deepcopy=False)

    assert len(set(acknowledged["asked"])) == len(acknowledged["asked"]), "a number was given twice"
    assert [n for n in acknowledged["told"] if trials[n].state != TrialState.COMPLETE or trials[n].value != n] == []
    assert [n for n in acknowledged["reported"] if trials[n].intermediate_values != {1: n / 2}] == []
    assert len(set(acknowledged["counted"])) == len(acknowledged["counted"]), (
        "two were in the exclusive section at once"
    )
    assert int((tmp_path / "number").read_text()) >= len(acknowledged["counted"])
    stock = JournalStorage(JournalFileBackend(str(paths.journal)))
    assert optuna.load_study(study_name="s", storage=stock).get_trials(deepcopy=False) == trials
