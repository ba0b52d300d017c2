"""Group commit: an answered record is in the file once, whatever happens to the server, the worker or the lock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from hpcjobs import journal_client
from hpcjobs.journal import StudyStorage, open_storage
from hpcjobs.journal_client import JournalClient, ServerGoneError
from hpcjobs.journal_server import JournalServer, serve
from hpcjobs.paths import StudyPaths
from tests.cluster.daemons import wait_until


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    paths = StudyPaths(tmp_path)
    optuna.create_study(study_name="s", storage=open_storage(paths, socket=""))
    return paths


@pytest.fixture
def server(paths: StudyPaths) -> Iterator[JournalServer]:
    with serve(paths) as server:
        yield server


def study_of(storage: StudyStorage) -> optuna.Study:
    return optuna.load_study(study_name="s", storage=storage)


def server_process(paths: StudyPaths, path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcjobs.journal_server", str(paths.folder), str(path)], stdin=subprocess.PIPE
    )
    end = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, "the server did not start"
        time.sleep(0.02)
    return process


def run_trials(storage: StudyStorage, count: int) -> None:
    study = study_of(storage)
    for _ in range(count):
        trial = study.ask()
        trial.report(0.5, step=1)
        study.tell(trial, 1.0)


def open_served(paths: StudyPaths, path: Path) -> StudyStorage:
    """With all the patience that a busy machine needs: else a worker that waits long appends by itself."""
    storage = open_storage(paths, socket=str(path))
    assert storage._file._client is not None
    storage._file._client._patience_s = 240.0
    return storage


def numbers_and_states(paths: StudyPaths) -> tuple[list[int], set[TrialState]]:
    trials = study_of(open_storage(paths, socket="")).get_trials(deepcopy=False)
    return [trial.number for trial in trials], {trial.state for trial in trials}


def test_workers_of_a_server_number_no_trial_twice(paths: StudyPaths, server: JournalServer) -> None:
    storages = [open_served(paths, server.socket_path) for _ in range(6)]
    threads = [threading.Thread(target=run_trials, args=(storage, 10)) for storage in storages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers_and_states(paths) == (list(range(60)), {TrialState.COMPLETE})
    assert all(storage._file._client is not None and storage._file._client._socket for storage in storages)


def test_without_a_server_records_are_appended_directly(paths: StudyPaths, tmp_path: Path) -> None:
    run_trials(open_storage(paths, socket=str(tmp_path / "nobody")), 2)
    assert numbers_and_states(paths) == ([0, 1], {TrialState.COMPLETE})


def test_killed_server_loses_nothing_and_its_successor_is_found(paths: StudyPaths, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = server_process(paths, path)
    storage = open_served(paths, path)
    run_trials(storage, 2)
    first.kill()
    first.wait()
    run_trials(storage, 2)
    assert storage._file._client is not None
    assert storage._file._client._socket is None
    path.unlink()
    second = server_process(paths, path)
    storage._file._client._not_before = 0.0
    run_trials(storage, 1)
    assert storage._file._client._socket is not None
    second.communicate()
    assert second.returncode == 0
    assert numbers_and_states(paths) == (list(range(5)), {TrialState.COMPLETE})


def test_request_of_a_stalled_server_is_written_once(paths: StudyPaths, tmp_path: Path) -> None:
    """The worker gives up on it and writes by itself; when it wakes up it has the same request in its hands."""
    path = tmp_path / "socket"
    process = server_process(paths, path)
    storage = open_served(paths, path)
    run_trials(storage, 1)
    client = storage._file._client
    assert client is not None and client._socket is not None
    client._socket.settimeout(0.5)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    study = study_of(storage)
    trial = study.ask()
    process.send_signal(signal.SIGCONT)
    study.tell(trial, 1.0)
    process.communicate()
    assert numbers_and_states(paths) == ([0, 1], {TrialState.COMPLETE})


def fake_server(path: Path, paths: StudyPaths, writes: bool) -> threading.Thread:
    """A server that takes one request and dies before it answers, having written it or not."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        connection, _ = listener.accept()
        request = connection.recv(1 << 16)
        if writes:
            with paths.journal.open("ab") as file:
                file.write(request[5:])
        connection.close()
        listener.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("writes", [True, False])
def test_retry_after_a_lost_answer_writes_once(writes: bool, paths: StudyPaths, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    dying = fake_server(path, paths, writes)
    trial = study_of(open_storage(paths, socket=str(path))).ask()
    dying.join()
    assert trial.number == 0
    assert numbers_and_states(paths)[0] == [0]


def test_worker_killed_while_it_waits_leaves_the_server_serving(paths: StudyPaths, server: JournalServer) -> None:
    storage = open_storage(paths, socket="")
    with storage.exclusive():
        pid = os.fork()
        if pid == 0:
            run_trials(open_storage(paths, socket=str(server.socket_path)), 1)
            os._exit(0)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    run_trials(open_storage(paths, socket=str(server.socket_path)), 1)
    numbers, states = numbers_and_states(paths)
    assert numbers == [0]
    assert states == {TrialState.COMPLETE}


def test_worker_without_an_answer_from_the_socket_does_not_hang(tmp_path: Path) -> None:
    """Something else listens there, and never says a word."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    client = JournalClient(str(tmp_path / "socket"), print, patience_s=0.2)
    assert client.available()
    with pytest.raises(ServerGoneError):
        client.commit(b"{}\n", synced=False)
    assert not client.available()
    listener.close()


def test_rounds_are_shared(paths: StudyPaths, server: JournalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve workers that wait for the lock get into the file with few appends."""
    rounds = []
    append = server._backend.append
    server._backend.append = lambda *args, **options: (rounds.append(1), append(*args, **options))[1]  # type: ignore
    storages = [open_served(paths, server.socket_path) for _ in range(12)]
    assert all(storage._file._client is not None and storage._file._client.available() for storage in storages)
    # beside its listener and what wakes it up
    wait_until(lambda: len(server._selector.get_map()) == 2 + 12, "the server to know all workers")
    waiting: set[socket.socket] = set()
    receive = journal_client._receive
    monkeypatch.setattr(journal_client, "_receive", lambda at, size: (waiting.add(at), receive(at, size))[1])
    threads = [threading.Thread(target=study_of(storage).ask) for storage in storages]
    with open_storage(paths, socket="").exclusive():
        for thread in threads:
            thread.start()
        wait_until(lambda: len(waiting) == 12, "all requests to be on their way")
    for thread in threads:
        thread.join()
    assert numbers_and_states(paths)[0] == list(range(12))
    assert len(rounds) <= 4


def test_answer_to_an_interrupted_request_is_not_taken_for_the_next_one(
    paths: StudyPaths, server: JournalServer
) -> None:
    """A signal's handler raises while the worker waits; the records after it must be in the file when they return."""
    storage = open_served(paths, server.socket_path)
    study = study_of(storage)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with open_storage(paths, socket="").exclusive(), pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            study.ask()
    finally:
        signal.signal(signal.SIGALRM, before)
    trial = study.ask()
    assert trial.number == len(open_storage(paths, socket="").get_all_trials(0)) - 1
    assert storage._file._client is not None
    assert storage._file._client._socket is not None
