"""Compaction: the same studies and trials in fewer bytes, while others read, write and are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.trial import TrialState

from hpcjobs.compact import _Recorder, compact
from hpcjobs.errors import UserError
from hpcjobs.filesystem import LockKind, decide_lock
from hpcjobs.journal import open_storage
from hpcjobs.journal_file import FileBackend
from hpcjobs.journal_server import serve
from hpcjobs.paths import StudyPaths
from tests.hpcjobs.test_journal_replay import line_of, records, replayed, start, state_of


@pytest.fixture(params=["kernel", "soft"])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> StudyPaths:
    paths = StudyPaths(tmp_path)
    lock: LockKind = request.param
    decide_lock(paths.journal, lock, "told by the test")
    optuna.create_study(study_name="s", storage=open_storage(paths, socket=""))
    return paths


def study_of(paths: StudyPaths, socket: str = "") -> optuna.Study:
    return optuna.load_study(study_name="s", storage=open_storage(paths, socket=socket))


def stock_trials(paths: StudyPaths) -> list[optuna.trial.FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(paths.journal)))
    return optuna.load_study(study_name="s", storage=storage).get_trials(deepcopy=False)


def run_trial(study: optuna.Study) -> None:
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    for step in range(5):
        trial.report(step / 4, step)
    study.tell(trial, float(trial.number))


@settings(max_examples=100, deadline=None)
@given(st.lists(records, max_size=25))
def test_compacted_records_lead_to_the_same_state(log: list[dict[str, Any]]) -> None:
    replay = replayed(b"".join(line_of(record, n) for n, record in enumerate(start + log)))
    data = _Recorder().write(replay)
    stock = JournalStorageReplayResult("me-")
    stock.apply_logs(json.loads(line) for line in data.splitlines())
    for found in (replayed(data), stock):
        before, after = state_of(replay), state_of(found)
        assert {**after, "read": 0} == {**before, "read": 0}
        assert found._next_study_id == replay._next_study_id


def test_open_study_goes_on_and_stock_optuna_opens_the_result(paths: StudyPaths) -> None:
    study, reader = study_of(paths), study_of(paths)
    for _ in range(10):
        run_trial(study)
    running = study.ask()
    study.enqueue_trial({"x": 0.25})
    before = study.get_trials()
    sizes = compact(paths, grace_s=0.0)
    assert sizes[1] < sizes[0] / 2
    assert stock_trials(paths) == before
    running.report(0.5, 1)
    study.tell(running, 0.5)
    assert study.ask().suggest_float("x", 0, 1) == 0.25
    reader._storage._file._followed_at = 0.0  # type: ignore[attr-defined]  # as half a second later
    assert reader.get_trials() == study.get_trials() == stock_trials(paths)
    assert [trial.number for trial in reader.get_trials()] == list(range(12))
    assert reader.get_trials()[:10] == before[:10]


def test_young_records_stay_as_they_are(paths: StudyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(paths)
    run_trial(study)
    monkeypatch.setattr(time, "sleep", lambda seconds: run_trial(study) if seconds == 7.0 else None)
    size = paths.journal.stat().st_size
    young = []
    replace = FileBackend.replace_beginning

    def replace_and_keep(self: FileBackend, *args: Any) -> Any:
        young.append(paths.journal.read_bytes()[size:])
        return replace(self, *args)

    monkeypatch.setattr(FileBackend, "replace_beginning", replace_and_keep)
    compact(paths, grace_s=7.0)
    assert young[0]
    assert paths.journal.read_bytes().endswith(young[0])
    assert [trial.value for trial in stock_trials(paths)] == [0.0, 1.0]


def test_request_that_a_dead_server_wrote_is_found_in_a_compacted_file(paths: StudyPaths) -> None:
    storage = open_storage(paths, socket="")
    for _ in range(5):
        run_trial(study_of(paths))
    backend = storage._file
    backend.read_new()
    lines = backend._encode([{"op_code": 4, "worker_id": "w", "study_id": 0, "datetime_start": None}])
    since = backend._read_end
    old = paths.journal.read_bytes()
    open_storage(paths, socket="")._file.append(lambda: lines, synced=True)
    other = FileBackend(paths.journal, type(backend._lock)(paths.journal, 10.0))
    assert other.replace_beginning(other._inode, old, _Recorder().write(replayed(old))) is not None
    backend.append(lambda: lines, synced=True, since=since)
    assert [trial.state for trial in stock_trials(paths)][5:] == [TrialState.RUNNING]


def test_changed_beginning_is_not_replaced(paths: StudyPaths) -> None:
    backend = FileBackend(paths.journal, open_storage(paths, socket="")._file._lock)
    before = paths.journal.read_bytes()
    assert backend.replace_beginning(backend._inode, b"x" + before[1:], b"") is None
    assert backend.replace_beginning((0, 0), before, b"") is None
    assert paths.journal.read_bytes() == before
    assert not list(paths.folder.glob(".journal.log.*"))


def test_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        compact(StudyPaths(tmp_path))


def work(paths: StudyPaths, socket: str) -> None:
    study = study_of(paths, socket)
    with (paths.folder / f"told{os.getpid()}").open("a", buffering=1) as file:
        while not (paths.folder / "enough").exists():
            trial = study.ask()
            trial.report(trial.number / 2, 1)
            study.tell(trial, float(trial.number))
            file.write(f"{trial.number}\n")


def test_writers_and_killed_compactions_at_once_lose_nothing(paths: StudyPaths) -> None:
    """Two workers with a server and two without, while compactions run one after another and are killed at random."""
    generator = random.Random(3)
    compactor = f"from hpcjobs.compact import *; compact(StudyPaths(Path({str(paths.folder)!r})), grace_s=0.1)"
    with serve(paths) as server:
        workers = []
        for worker in range(4):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    work(paths, str(server.socket_path) if worker % 2 else "")
                    status = 0
                finally:
                    os._exit(status)
            workers.append(pid)
        files, compacted, killed = set(), 0, 0
        until = time.monotonic() + 600
        while (compacted < 3 or killed < 2) and time.monotonic() < until:
            process = subprocess.Popen([sys.executable, "-c", compactor])
            if killed <= compacted:
                time.sleep(generator.uniform(0.5, 1.5))
                process.send_signal(signal.SIGKILL)
            done = process.wait() == 0
            compacted, killed = compacted + done, killed + (not done)
            files.add(paths.journal.stat().st_ino)
        (paths.folder / "enough").touch()
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers] == [0] * 4
    told = [int(line) for file in paths.folder.glob("told*") for line in file.read_text().split()]
    compact(paths, grace_s=0.0)
    trials = stock_trials(paths)
    assert sorted(told) == [trial.number for trial in trials] == list(range(len(told)))
    assert all(trial.value == trial.number and trial.intermediate_values == {1: trial.number / 2} for trial in trials)
    assert compacted >= 3 and len(files) > 1
