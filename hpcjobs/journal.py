"""The study's Optuna storage on the shared folder.

storage = open_storage(StudyPaths(folder))
with storage.exclusive():      # nobody else writes: read, check, append
    ...
with storage.batch():          # parameters, attributes and reports of one trial as one append
    ...
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages import JournalStorage
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import FrozenTrial, TrialState

from hpcjobs.journal_client import SOCKET_VARIABLE
from hpcjobs.journal_file import FileBackend, StatusCallback
from hpcjobs.journal_lock import DEFAULT_DEADLINE_S
from hpcjobs.journal_records import Damage
from hpcjobs.journal_replay import Replay, no_garbage_collection
from hpcjobs.journal_soft_lock import lock_for
from hpcjobs.paths import StudyPaths

# How often a worker that only writes looks whether its trial was taken from it.
_LOOK_EVERY_S = 2.0
# A snapshot is written by whoever replayed this much on opening, and by the worker that ends every so-many-th trial.
_SNAPSHOT_AFTER_RECORDS = 5000
_SNAPSHOT_EVERY_TRIALS = 1000


def open_storage(
    paths: StudyPaths,
    *,
    socket: str | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
    on_status: StatusCallback | None = None,
) -> StudyStorage:
    """Open (or create) the journal of a study folder.

    Damage in it is repaired, listed in ``storage.damages`` and logged. So are records that were altered since they were
    written, which count as they stand; only here, not by those that have the journal open.

    Args:
        socket: where the node's journal server listens; by default what ``HPCJOBS_JOURNAL_SOCKET`` says. Without a
            server, and whenever it does not answer, records are appended directly.
        deadline_s: how long any call waits for the lock before it raises JournalTimeoutError.
        on_status: told in one sentence what a call waits for (a full disk); by default it is logged.
    """
    socket = socket if socket is not None else os.environ.get(SOCKET_VARIABLE)
    lock = lock_for(paths.journal, deadline_s)
    return StudyStorage(FileBackend(paths.journal, lock, socket=socket, on_status=on_status))


class StudyStorage(JournalStorage):
    """Optuna's JournalStorage with an exclusive section, batches, a quicker replay, and safety across ``fork``."""

    def __init__(self, backend: FileBackend) -> None:
        # The base class's own initialisation would replay with its slower rules.
        self._file = self._backend = backend
        self._thread_lock = threading.RLock()  # type: ignore[assignment]  # exclusive() calls the storage inside
        self._batch: list[dict[str, Any]] | None = None
        self._snapshot_due = False
        self._worker_id_prefix = _new_prefix()
        self._replay_result: Replay = backend.load_snapshot(self._worker_id_prefix) or Replay(self._worker_id_prefix)
        backend.repair_tail()
        known = self._replay_result.log_number_read
        self._sync_with_backend(check=True)
        if self._replay_result.log_number_read > known + _SNAPSHOT_AFTER_RECORDS:
            self.save_snapshot()
        _storages.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Opened anew where it arrives."""
        return open_storage, (StudyPaths(self._file.path.parent),)

    def _sync_with_backend(self, check: bool = False) -> None:
        with no_garbage_collection():
            restarted, records = self._file.read_new(check)
            if restarted:
                self._replay_result = Replay(self._worker_id_prefix)
            self._synced_at = time.monotonic()
            if records:
                self._replay_result.apply_logs(records)

    def save_snapshot(self) -> None:
        """Keep what has been read, so that the next one to open the study need not replay it."""
        with self._thread_lock:
            self._file.save_snapshot(self._replay_result)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        done = super().set_trial_state_values(trial_id, state, values)
        with self._thread_lock:
            self._snapshot_due |= state.is_finished() and (trial_id + 1) % _SNAPSHOT_EVERY_TRIALS == 0
            self._save_due_snapshot()
        return done

    def _save_due_snapshot(self) -> None:
        """Not while we hold the lock: a long study takes a good part of a second."""
        if self._snapshot_due and not self._file.holds_lock:
            self._snapshot_due = False
            self.save_snapshot()

    @property
    def damages(self) -> list[Damage]:
        """What this process has found damaged in the journal and repaired."""
        return self._file.damages

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the journal's lock: what is read inside stays true until the block ends."""
        with self._thread_lock:
            with self._file.exclusive():
                yield
            self._save_due_snapshot()

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

    def next_waiting(self, study_id: int) -> FrozenTrial | None:
        """The waiting trial to take next, begun ones first. Quick, however many wait. Do not change it."""
        with self._thread_lock:
            self._sync_with_backend()
            return self._replay_result.next_waiting(study_id)

    def last_ended(self, study_id: int) -> list[FrozenTrial]:
        """The last completed and pruned trials by number. Quick, however many have ended. Do not change them."""
        with self._thread_lock:
            self._sync_with_backend()
            return self._replay_result.last_ended(study_id)

    def successor(self, study_id: int, number: int) -> FrozenTrial | None:
        """The trial that continues trial ``number`` (Optuna's attribute ``retry_history``). Do not change it."""
        with self._thread_lock:
            self._sync_with_backend()
            return self._replay_result.successor(study_id, number)

    # After a parameter or a report Optuna reads the journal to learn whether the record counted. Here it is checked
    # before, against what is known: a worker that reports often need not replay everybody's records each time.

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        with self._thread_lock:
            self._check_updatable(trial_id)
            self._replay_result.check_distribution(trial_id, param_name, distribution)
            fields = {"trial_id": trial_id, "param_name": param_name, "param_value_internal": param_value_internal}
            text = distribution_to_json(distribution)
            self._write_log(JournalOperation.SET_TRIAL_PARAM, {**fields, "distribution": text})

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        with self._thread_lock:
            self._check_updatable(trial_id)
            fields = {"trial_id": trial_id, "step": step, "intermediate_value": intermediate_value}
            self._write_log(JournalOperation.SET_TRIAL_INTERMEDIATE_VALUE, fields)

    def _check_updatable(self, trial_id: int) -> None:
        """Raises Optuna's error if the trial has ended, as far as is known; looks into the journal now and then."""
        if time.monotonic() > self._synced_at + _LOOK_EVERY_S:
            self._sync_with_backend()
        self._replay_result.check_updatable(trial_id)

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
        self._worker_id_prefix = _new_prefix()
        self._replay_result._worker_id_prefix = self._worker_id_prefix
        self._replay_result._worker_id_to_owned_trial_id = {}
        self._file.after_fork()


def _new_prefix() -> str:
    return f"{secrets.token_hex(8)}-"


_storages: weakref.WeakSet[StudyStorage] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for storage in list(_storages):
        storage._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
