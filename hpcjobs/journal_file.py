"""The journal's file: reads that never see half a record, appends that are whole or not there, damage that is repaired.

It is a backend of Optuna's ``JournalStorage`` and the file stays one that stock Optuna opens. Rules:

- A reader takes whole lines only. A line at the end without its newline does not exist yet.
- A writer holds the lock, looks whether the file ends with a newline, and appends with one ``write``. If the disk is
  full, it cuts off what it wrote itself, frees the lock, waits and tries again.
- A line that is no record, and what a dead writer left behind the last newline, is looked at again under the lock (it
  may have been half visible on a network filesystem) and then blanked in place: no offset and no log number changes,
  so readers go on that are open, also those that have passed over the damage. The next record may follow the blanks.
- What is blanked is kept in ``journal.lost.jsonl`` and reported.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from hpcjobs import journal_repair, journal_snapshot
from hpcjobs.filesystem import mount_of, shares_unsynced_writes
from hpcjobs.journal_client import JournalClient, ServerGoneError
from hpcjobs.journal_lock import FencedError, JournalLock, inode, open_for_reading, status_of
from hpcjobs.journal_records import Damage, Record, UnusualRecord, encode, find_altered, find_damage, parse_lines
from hpcjobs.journal_replay import Replay

log = logging.getLogger(__name__)

_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SMALL_READ, _LARGE_READ = 1 << 15, 1 << 23
# Records that another worker may act on at once: studies, new trials, states. The rest may be lost with the machine.
_SYNCED_OPERATIONS = {0, 1, 2, 3, 4, 6, 10}
# An unfinished line may be a stock writer's that is just being written: it gets this long before it counts as torn.
_TORN_AFTER_S = 0.05
# How often a reader looks whether the file was replaced, and how much of what it read it then compares.
_FOLLOW_EVERY_S = 0.5
_REMEMBERED = 512

StatusCallback = Callable[[str], None]


class FileBackend(BaseJournalBackend):
    """Appends to and reads from one journal file.

    Args:
        path: the journal; created if it is missing.
        lock: what excludes other writers.
        socket: where the node's journal server listens, if there is one.
        full_disk_patience_s: how long an append waits for room on a full disk or quota before its OSError is raised.
        on_status: told in one sentence what a call waits for, when it waits long.
    """

    def __init__(
        self,
        path: Path,
        lock: JournalLock,
        *,
        socket: str | None = None,
        full_disk_patience_s: float = 3600.0,
        on_status: StatusCallback | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.damages: list[Damage] = []
        self._lock = lock
        self._patience_s = full_disk_patience_s
        self._on_status = on_status or log.warning
        self._client = JournalClient(socket, self._on_status) if socket else None
        self._always_sync = not shares_unsynced_writes(mount_of(self.path.parent))
        self._descriptor = open_for_reading(self.path)
        self._inode = inode(os.fstat(self._descriptor))
        self._offsets = {0: 0}
        self._read_end = 0
        self._last_read = b""
        self._restarted = False
        self._followed_at = time.monotonic()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._exclusive = threading.RLock()
        self._depth = 0
        self._end = 0  # where the file ends, while the lock is held
        self._sync_due = False
        self._counters: dict[str, int] = {}

    @property
    def inode(self) -> int:
        """The inode number of the journal, which changes when a lock is broken."""
        return self._inode[1]

    @property
    def holds_lock(self) -> bool:
        return self._depth > 0

    # Reading

    def load_snapshot(self, worker_id_prefix: str) -> Replay | None:
        """The state that a snapshot has kept; reading then goes on behind it."""
        found = journal_snapshot.load(worker_id_prefix, self.path, self._descriptor)
        if found is None:
            return None
        replay, self._read_end = found
        start = max(0, self._read_end - _REMEMBERED)
        self._last_read = os.pread(self._descriptor, self._read_end - start, start)
        return replay

    def save_snapshot(self, replay: Replay) -> None:
        """Keep the state that all that was read so far leads to."""
        journal_snapshot.save(replay, self.path, self._descriptor, self._read_end)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Optuna's interface: the records from this number on."""
        known = max(number for number in self._offsets if number <= log_number_from)
        offset, number = self._offsets[known], known
        while data := self._whole_lines(offset):
            size = len(data)
            if parse_lines(data) is None:
                data, size = self._repaired(offset, data)
            for line in data.split(b"\n")[:-1]:
                if line.strip():
                    if number >= log_number_from:
                        yield json.loads(line)
                    number += 1
            offset += size
        self._offsets[number] = offset

    def read_new(self, check: bool = False) -> tuple[bool, list[Record | UnusualRecord]]:
        """The records behind those read before, as ``parse_lines`` gives them; ``check`` their checksums too.

        The first value is True if all of them are given, from the start of the file, because what was read before is
        no longer in it: a writer that had lost its lock wrote it.
        """
        if time.monotonic() > self._followed_at + _FOLLOW_EVERY_S:
            self._follow()
        records: list[Record | UnusualRecord] = []
        while data := self._whole_lines(self._read_end):
            found, size = parse_lines(data), len(data)
            if found is None:
                file = self._inode
                data, size = self._repaired(self._read_end, data)
                if file != self._inode:  # replaced meanwhile, and perhaps to be read from its start
                    if self._read_end == 0:
                        records.clear()
                    continue
                found = parse_lines(data)
                assert found is not None, "damage that repair does not find"
            if check:
                self.report_altered(data, self._read_end)
            records += found
            self._read_end += size
            self._last_read = data[-_REMEMBERED:]
        restarted, self._restarted = self._restarted, False
        return restarted, records

    def report_altered(self, data: bytes, offset: int) -> None:
        """Report records that were altered since they were written. They count as they stand, since they do for stock
        Optuna and for all that have read them, and nobody knows what they were."""
        altered = list(find_altered(data, offset))
        if not altered:
            return
        self.damages += altered
        try:
            with self.exclusive():
                known = journal_repair.kept(self.path)
                new = [span for span in altered if (span.offset, span.text) not in known]
                journal_repair.keep(self.path, new)
        except OSError as error:
            if error.errno not in _READ_ONLY | _FULL:
                raise

    def _follow(self) -> None:
        """Go over to the file that has the journal's name now, if it is another one."""
        self._followed_at = time.monotonic()
        status = status_of(self.path)
        if status is None or inode(status) == self._inode:
            return
        os.close(self._descriptor)
        self._descriptor = open_for_reading(self.path)
        self._inode = inode(os.fstat(self._descriptor))
        self._offsets = {0: 0}
        known = os.pread(self._descriptor, len(self._last_read), self._read_end - len(self._last_read))
        if known != self._last_read:
            log.warning("%s was replaced and differs from what was read of it: reading it again", self.path)
            self._read_end, self._last_read, self._restarted = 0, b"", True

    def _whole_lines(self, offset: int) -> bytes:
        """At most some megabytes of whole lines. A longer line is read as a whole."""
        size = _SMALL_READ
        while True:
            data = os.pread(self._descriptor, size, offset)
            end = data.rfind(b"\n") + 1
            if len(data) < size or (end and size >= _LARGE_READ):
                return data[:end]
            size *= 16

    def _repaired(self, offset: int, data: bytes) -> tuple[bytes, int]:
        """Damaged lines after repair: looks again under the lock, and blanks what is still damaged there.

        Returned are whole lines again, and how many bytes of the file they stand for; blanks at the end that joined the
        line behind them are left out.
        """
        try:
            with self.exclusive():
                data = os.pread(self._descriptor, len(data), offset)
                self._blank(list(find_damage(data, offset)))
                data = os.pread(self._descriptor, len(data), offset)
        except OSError as error:
            if error.errno not in _READ_ONLY | _FULL:
                raise
            # One who may only read, or a full disk: the same records count, the file stays as it is.
            size = len(data)
            for span in reversed(list(find_damage(data, offset))):
                at = span.offset - offset
                data = data[:at] + data[at + span.length :]
            return data, size
        data = data[: data.rfind(b"\n") + 1]
        return data, len(data)

    # Writing

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Optuna's interface: append these records as one write. Records that others act on are synced to the disk.

        Raises JournalTimeoutError if the lock cannot be had, and OSError if the disk stays full.
        """
        lines = self._encode(logs)
        synced = any(entry["op_code"] in _SYNCED_OPERATIONS for entry in logs)
        since = None
        if self._client is not None and not self._depth and self._client.available():
            try:
                if self._client.commit(b"".join(lines), synced) != self._inode[1]:
                    self._follow()
                return
            except ServerGoneError as error:
                log.info("appending without the node's journal server: %s", error)
                since = self._read_end
        self.append(lambda: lines, synced, since)

    def _encode(self, logs: list[dict[str, Any]]) -> list[bytes]:
        """The lines of records of this process, each with the next number of its writer."""
        lines = []
        for entry in logs:
            n = self._counters.get(entry["worker_id"], 0) + 1
            self._counters[entry["worker_id"]] = n
            lines.append(encode(entry, n))
        return lines

    def _missing(self, lines: list[bytes], since: int) -> list[bytes]:
        """Those of the lines that are not in the file yet: no two lines are equal, their writer numbers them."""
        written = b""
        while data := self._whole_lines(since + len(written)):
            written += data
        return [line for line in lines if line not in written]

    def append(self, lines: Callable[[], list[bytes]], synced: bool, since: int | None = None) -> None:
        """Append the lines that ``lines`` returns; it is asked anew, under the lock, at every attempt.

        On return they are in the file and, with ``synced``, on the disk. ``since`` tells that they may be in the file
        already, behind this offset.
        """
        end = time.monotonic() + self._patience_s
        pause, file = 0.1, self._inode
        while True:
            try:
                with self._locked():
                    start = self._end
                    if since is not None and self._inode != file:  # a compacted file has them elsewhere
                        since, file = 0, self._inode
                    data = b"".join(lines() if since is None else self._missing(lines(), since))
                    if data:
                        self._append_locked(data)
                    elif since is not None:  # they are in the file; is it the one that stays?
                        self._lock.confirm()
                    self._sync_due |= synced
                break
            except FencedError:
                if self._depth:  # what was read in the exclusive section around us may be wrong
                    raise
                since = start if since is None else since
            except OSError as error:
                if error.errno not in _FULL or time.monotonic() + pause > end:
                    raise
                self._on_status(f"{self.path}: {os.strerror(error.errno)}; waiting for room to go on")
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
        self._sync_if_due()

    def _append_locked(self, data: bytes) -> None:
        self._blank_torn_tail()
        journal_repair.append_whole(self._lock.descriptor, data, synced=self._always_sync)
        self._lock.confirm()
        self._end += len(data)

    def _sync_if_due(self) -> None:
        """Not while the lock is held: a sync takes many times as long as an append, and syncs of many nodes overlap."""
        if self._sync_due and not self._depth:
            self._sync_due = False
            self.sync()

    def sync(self) -> None:
        """Return when all that is in the file is on the disk, by whomever it was written."""
        os.fdatasync(self._descriptor)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock: what is read inside stays true until the block ends. Appends inside do not lock again."""
        try:
            with self._locked():
                yield
        finally:
            self._sync_if_due()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._exclusive:
            if self._depth == 0:
                self._lock.acquire()
                status = self._lock.status
                assert status is not None, "a lock that is held knows its file"
                self._end = status.st_size
                if inode(status) != self._inode:
                    self._follow()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._lock.release()

    def replace_beginning(self, file: tuple[int, int], old: bytes, new: bytes) -> tuple[int, int] | None:
        """Replace the journal by a file that begins with ``new`` where it began with ``old``.

        Returns its sizes before and after; None, with nothing done, if another file is the journal by now, or if it has
        another beginning.
        """
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("wb") as copy:
                copy.write(new)
                os.fsync(copy.fileno())
                with self._locked():
                    if self._inode != file or os.pread(self._descriptor, len(old), 0) != old:
                        return None
                    self._blank_torn_tail()
                    copy.write(os.pread(self._descriptor, self._end - len(old), len(old)))
                    copy.flush()
                    os.fchmod(copy.fileno(), os.fstat(self._descriptor).st_mode & 0o777)
                    os.fsync(copy.fileno())
                    self._lock.replace_journal(temporary)
                    return self._end, copy.tell()
        finally:
            temporary.unlink(missing_ok=True)

    # Repair

    def repair_tail(self) -> None:
        """Blank what a dead writer left behind the last newline. Whole lines are repaired when read."""
        end = os.fstat(self._descriptor).st_size
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            try:
                with self.exclusive():
                    self._blank_torn_tail()
            except OSError as error:
                if error.errno not in _READ_ONLY | _FULL:
                    raise

    def _blank_torn_tail(self) -> None:
        """Blank what stands behind the last newline; the lock is held."""
        descriptor = self._lock.descriptor
        if self._end == 0 or os.pread(descriptor, 1, self._end - 1) == b"\n":
            return
        if journal_repair.torn_tail(descriptor) is not None:
            time.sleep(_TORN_AFTER_S)
            torn = journal_repair.torn_tail(descriptor)
            self._blank([torn] if torn is not None else [])

    def _blank(self, spans: list[Damage]) -> None:
        if spans:
            journal_repair.keep(self.path, spans)
            self.damages += spans
            journal_repair.blank(self._lock.descriptor, spans)

    def close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
        self._lock.close()
        if self._client is not None:
            self._client.close()

    def after_fork(self) -> None:
        """In a child: nothing is shared with the parent but the file."""
        self._lock.after_fork()
        if self._client is not None:
            self._client.close()
        self._descriptor = os.dup(self._descriptor)
        self._start_afresh()
