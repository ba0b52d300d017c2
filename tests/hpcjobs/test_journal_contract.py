"""Optuna's own contract of a storage, on ours: alone, with a journal server, and with the soft lock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("optuna.testing.pytest_storages", reason="Optuna 5 brings the contract as tests")
from optuna.testing.pytest_storages import StorageTestCase

from hpcjobs.filesystem import decide_lock
from hpcjobs.journal import StudyStorage, open_storage
from hpcjobs.journal_server import serve
from hpcjobs.paths import StudyPaths


class TestAlone(StorageTestCase):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> StudyStorage:
        decide_lock(StudyPaths(tmp_path).journal, "kernel", "told by the test")
        return open_storage(StudyPaths(tmp_path), socket="")


class TestWithServer(StorageTestCase):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[StudyStorage]:
        with serve(StudyPaths(tmp_path)) as server:
            yield open_storage(StudyPaths(tmp_path), socket=str(server.socket_path))


class TestWithSoftLock(StorageTestCase):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> StudyStorage:
        decide_lock(StudyPaths(tmp_path).journal, "soft", "told by the test")
        return open_storage(StudyPaths(tmp_path), socket="")
