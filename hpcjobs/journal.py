"""The study's Optuna storage on the shared folder.

storage = open_storage(StudyPaths(folder))
with storage.exclusive():      # nobody else writes: read, check, append
    ...
with storage.batch():          # parameters, attributes and reports of one trial as one append
    ...
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from optuna.storages import JournalStorage

from hpcjobs.journal_file import FileBackend, StatusCallback
from hpcjobs.journal_lock import DEFAULT_DEADLINE_S
from hpcjobs.journal_records import Damage
from hpcjobs.paths import StudyPaths


def open_storage(
    paths: StudyPaths, *, deadline_s: float = DEFAULT_DEADLINE_S, on_status: StatusCallback | None = None
) -> StudyStorage:
    """Open (or create) the journal of a study folder.

    Damage in it is repaired, listed in ``storage.damages`` and logged.

    Args:
        deadline_s: how long any call waits for the lock before it raises JournalTimeoutError.
        on_status: told in one sentence what a call waits for (a full disk); by default it is logged.
    """
    return StudyStorage(FileBackend(paths.journal, deadline_s=deadline_s, on_status=on_status))


class StudyStorage(JournalStorage):
    """Optuna's JournalStorage with an exclusive section, batches, and safety across ``fork``."""

    def __init__(self, backend: FileBackend) -> None:
        backend.repair_tail()
        super().__init__(backend)
        self._file: FileBackend = backend
        self._thread_lock = threading.RLock()  # type: ignore[assignment]  # exclusive() calls the storage inside
        self._batch: list[dict[str, Any]] | None = None
        _storages.add(self)

    @property
    def damages(self) -> list[Damage]:
        """What this process has found damaged in the journal and repaired."""
        return self._file.damages

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the journal's lock: what is read inside stays true until the block ends."""
        with self._thread_lock, self._file.exclusive():
            yield

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Collect the records written inside (parameters, attributes, reports) and append them at the end as one write.

        They are not seen by reads inside the block, and are lost if the block raises.
        """
        with self._thread_lock:
            self._batch = []
            try:
                yield
                logs, self._batch = self._batch, None
                if logs:
                    self._file.append_logs(logs)
                    self._sync_with_backend()
            finally:
                self._batch = None

    def _write_log(self, op_code: int, extra_fields: dict[str, Any]) -> None:
        entry = {"op_code": op_code, "worker_id": self._replay_result.worker_id, **extra_fields}
        if self._batch is not None:
            self._batch.append(entry)
        else:
            self._file.append_logs([entry])

    def _after_fork(self) -> None:
        """In a child: another writer than the parent, else both would take one trial for their own."""
        self._thread_lock = threading.RLock()  # type: ignore[assignment]
        self._batch = None
        self._worker_id_prefix = f"{uuid.uuid4()}-"
        self._replay_result._worker_id_prefix = self._worker_id_prefix
        self._replay_result._worker_id_to_owned_trial_id = {}
        self._file.after_fork()


_storages: weakref.WeakSet[StudyStorage] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for storage in list(_storages):
        storage._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
