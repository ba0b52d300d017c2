"""Entry: makes a study's journal short. Each trial becomes one record; whoever has the study open goes on.

The records that are older than a grace period are replaced by what they came to, in a new file that takes the journal's
name under its lock; the younger ones follow as they are. Our readers and servers notice the new file and read it from
its start. The grace period is for a worker whose node's server died: it looks for its last record in the journal to
learn whether it was written, and must still find it there.

Stock Optuna opens the result. A stock process that has the study open (a dashboard) must be started again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal._storage import JournalOperation

from hpcjobs.errors import UserError, run_entry
from hpcjobs.journal import open_storage
from hpcjobs.journal_file import FileBackend
from hpcjobs.journal_lock import inode
from hpcjobs.journal_records import encode, parse_lines
from hpcjobs.journal_replay import Replay, no_garbage_collection
from hpcjobs.journal_soft_lock import lock_for
from hpcjobs.paths import StudyPaths

# Longer than a worker waits for an answer of its node's server and then for the lock of a busy study.
GRACE_S = 60.0
_ATTEMPTS = 5


class _Recorder(JournalStorage):
    """Writes records as Optuna does, into a list of lines instead of a file."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._worker_id = f"{secrets.token_hex(8)}-compact"
        self._thread_lock = threading.RLock()  # type: ignore[assignment]
        self._backend = None  # type: ignore[assignment]
        self._replay_result = Replay(self._worker_id)

    def _write_log(self, op_code: int, extra_fields: dict[str, Any]) -> None:
        record = {"op_code": op_code, "worker_id": self._worker_id, **extra_fields}
        self.lines.append(encode(record, len(self.lines) + 1))

    def _sync_with_backend(self) -> None:
        """Nothing is read back."""

    def write(self, replay: Replay) -> bytes:
        """The lines that lead to the state of ``replay``: every study and trial keeps its number."""
        studies = {study._study_id: study for study in replay.get_all_studies()}
        deleted = [study_id for study_id in range(replay._next_study_id) if study_id not in studies]
        for study_id in range(replay._next_study_id):
            name = f"deleted {self._worker_id} {study_id}" if study_id in deleted else studies[study_id].study_name
            directions = [] if study_id in deleted else studies[study_id]._directions
            self._write_log(JournalOperation.CREATE_STUDY, {"study_name": name, "directions": directions})
        for study_id, study in studies.items():
            for operation, key, attributes in (
                (JournalOperation.SET_STUDY_USER_ATTR, "user_attr", study.user_attrs),
                (JournalOperation.SET_STUDY_SYSTEM_ATTR, "system_attr", study.system_attrs),
            ):
                if attributes:
                    self._write_log(operation, {"study_id": study_id, key: attributes})
        for trial_id, trial in replay._trials.items():
            self.create_new_trial(replay._trial_id_to_study_id[trial_id], trial)
        for study_id in deleted:
            self._write_log(JournalOperation.DELETE_STUDY, {"study_id": study_id})
        return b"".join(self.lines)


def compact(paths: StudyPaths, grace_s: float = GRACE_S) -> tuple[int, int]:
    """Compact the journal of a study, also while it runs; returns its size in bytes before and after.

    Raises:
        UserError: if there is no journal.
        OSError: if the new file cannot be written, or the journal was repaired or replaced again and again meanwhile.
    """
    check_started(paths)
    for _ in range(_ATTEMPTS):
        # opening repairs what is damaged
        open_storage(paths, socket="")
        old, file = _old_records(paths.journal, grace_s)
        with no_garbage_collection():
            replay = Replay("")
            records = parse_lines(old)
            if records is None:
                continue
            replay.apply_logs(records)
            new = _Recorder().write(replay)
        backend = FileBackend(paths.journal, lock_for(paths.journal))
        try:
            backend.report_altered(old, 0)  # their checksums will be right again
            sizes = backend.replace_beginning(file, old, new)
        finally:
            backend.close()
        if sizes is not None:
            open_storage(paths, socket="").save_snapshot()
            return sizes
    raise OSError(f"{paths.journal} was changed in its midst {_ATTEMPTS} times; try again")


def check_started(paths: StudyPaths) -> None:
    """Raises UserError if there is no journal."""
    if not paths.journal.is_file():
        raise UserError(f"{paths.journal}: no such file; give the folder of a study that was started")


def _old_records(journal: Path, grace_s: float) -> tuple[bytes, tuple[int, int]]:
    """The whole lines that are in the file since ``grace_s`` at least, and the file's identity."""
    with journal.open("rb") as file:
        status = os.fstat(file.fileno())
        data = file.read(status.st_size)
        # file times may come from another clock: only a file that was silent for long needs no waiting
        if time.time() - status.st_mtime < 10 * grace_s:
            time.sleep(grace_s)
    return data[: data.rfind(b"\n") + 1], inode(status)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.compact",
        description="Make a study's journal short: one record for each trial. The study may be running.",
        epilog="example: python -m hpcjobs.compact runs/experiment1",
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    paths = StudyPaths(parser.parse_args().folder)
    check_started(paths)
    print(f"records of the last {GRACE_S:.0f} s stay as they are; waiting as long if there are any", flush=True)
    before, after = compact(paths)
    print(f"{before:,} bytes became {after:,}")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
