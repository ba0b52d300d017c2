"""A full disk or quota in the middle of an append: no half record stays, the study waits and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from hpcjobs.filesystem import decide_lock
from hpcjobs.journal import open_storage
from hpcjobs.journal_records import damage
from hpcjobs.journal_repair import keep
from hpcjobs.journal_server import serve
from hpcjobs.paths import StudyPaths
from tests.cluster.daemons import wait_until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of half a megabyte."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small filesystem needs root; test_append_cut_by_a_limit covers the append itself")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 512):
            pass
    return filler


def stock_trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name="s", storage=storage).get_trials()


@pytest.mark.parametrize("served", [False, True])
def test_study_waits_for_room_and_goes_on(served: bool, small_disk: Path) -> None:
    paths = StudyPaths(small_disk)
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        socket = str(stack.enter_context(serve(paths)).socket_path) if served else ""
        storage = open_storage(paths, socket=socket, on_status=said.append)
        study = optuna.create_study(study_name="s", storage=storage)
        study.tell(study.ask(), 0.0)
        filler = fill(small_disk)

        def work() -> None:
            for _ in range(60):
                study.tell(study.ask(), 1.0)

        worker = threading.Thread(target=work)
        worker.start()
        wait_until(lambda: bool(said), "the worker to say that it waits")
        assert "No space left on device" in said[0]
        # the worker tries again and again, and what went in of a record is there for a moment
        wait_until(lambda: paths.journal.read_bytes().endswith(b"}\n"), "no half record")
        assert worker.is_alive()
        filler.unlink()
        worker.join(timeout=300)
        assert not worker.is_alive()
    trials = stock_trials(small_disk)
    assert [trial.number for trial in trials] == list(range(61))
    assert all(trial.state.is_finished() for trial in trials)
    assert storage.damages == []


def test_append_cut_by_a_limit_leaves_no_half_record(tmp_path: Path) -> None:
    """A limit on the file's size cuts a write as a quota does: some bytes, then an error."""
    paths = StudyPaths(tmp_path)
    study = optuna.create_study(study_name="s", storage=open_storage(paths))
    size = paths.journal.stat().st_size
    pid = os.fork()
    if pid == 0:
        status = 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, size + 30))
        storage = open_storage(paths)
        storage._file._patience_s = 0.3
        try:
            optuna.load_study(study_name="s", storage=storage).ask()
        except OSError as error:
            status = 0 if "File too large" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert paths.journal.stat().st_size == size
    study.tell(study.ask(), 1.0)
    assert [trial.number for trial in stock_trials(tmp_path)] == [0]


@pytest.mark.parametrize("kind", ["kernel", "soft"])
def test_a_damaged_journal_on_a_full_disk_is_read_as_it_is_and_repaired_later(
    kind: Literal["kernel", "soft"], small_disk: Path
) -> None:
    paths = StudyPaths(small_disk)
    decide_lock(paths.journal, kind, "for this test")
    storage = open_storage(paths, socket="")
    study = optuna.create_study(study_name="s", storage=storage)
    study.tell(study.ask(), 0.0)
    study.tell(study.ask(), 1.0)
    with paths.journal.open("ab") as file:
        file.write(b'{"op_code": 6, torn\n')
    filler = fill(small_disk)
    again = open_storage(paths, socket="")
    assert [trial.values for trial in optuna.load_study(study_name="s", storage=again).trials] == [[0.0], [1.0]]
    if kind == "soft":  # no room for the lock either
        with pytest.raises(OSError, match="No space left"), again.exclusive():
            pass
    filler.unlink()
    with again.exclusive():
        pass
    assert [damage.reason for damage in open_storage(paths, socket="").damages] == ["not a record"]
    assert [trial.values for trial in stock_trials(small_disk)] == [[0.0], [1.0]]


def test_a_report_of_damage_that_finds_no_room_leaves_no_half_line(small_disk: Path) -> None:
    """It is longer than the room that is left in the file's last block."""
    journal = small_disk / "journal.log"
    spans = [damage(0, b"\0" * 4000 + b"\n", "not a record")]
    keep(journal, spans)
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        keep(journal, spans)
    filler.unlink()
    keep(journal, spans)
    lines = (small_disk / "journal.lost.jsonl").read_text().splitlines()
    assert [json.loads(line)["length"] for line in lines] == [4001, 4001]
