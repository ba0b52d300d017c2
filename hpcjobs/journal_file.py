"""The journal's file: reads that never see half a record, appends that are whole or not there, damage that is repaired.

It is a backend of Optuna's ``JournalStorage`` and the file stays one that stock Optuna opens. Rules:

- A reader takes whole lines only. A line at the end without its newline does not exist yet.
- A writer holds the lock, looks whether the file ends with a newline, and appends with one ``write``. What a dead
  writer left behind the last newline is cut off. If the disk is full, the writer cuts off what it wrote itself, frees
  the lock, waits and tries again.
- A line in the middle that is no record is looked at again under the lock (it may have been half visible on a network
  filesystem) and then blanked in place: no offset and no log number changes, so readers that are open go on.
- What is cut or blanked is kept in ``journal.lost.jsonl`` and reported.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from optuna.storages.journal import BaseJournalBackend

from hpcjobs.journal_client import JournalClient, ServerGoneError
from hpcjobs.journal_lock import KernelLock, is_current, open_journal
from hpcjobs.journal_records import Damage, Record, Report, damage, encode, find_damage, parse_lines

log = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CHUNK = 8 << 20
# Records that another worker may act on at once: studies, new trials, states. The rest may be lost with the machine.
_SYNCED_OPERATIONS = {0, 1, 2, 3, 4, 6, 10}
# An unfinished line may be a stock writer's that is just being written: it gets this long before it counts as torn.
_TORN_AFTER_S = 0.05

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
        lock: KernelLock,
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
        self._descriptor = open_journal(self.path)
        self._offsets = {0: 0}
        self._read_end = 0
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._exclusive = threading.RLock()
        self._depth = 0
        self._counters: dict[str, int] = {}

    # Reading

    def read_logs(self, log_number_from: int) -> Iterator[Record]:
        """Optuna's interface: the records from this number on."""
        known = max(number for number in self._offsets if number <= log_number_from)
        offset, number = self._offsets[known], known
        while data := self._whole_lines(offset):
            if parse_lines(data) is None:
                data = self._repaired(offset, data)
            for line in data.split(b"\n")[:-1]:
                if line.strip():
                    if number >= log_number_from:
                        yield json.loads(line)
                    number += 1
            offset += len(data)
        self._offsets[number] = offset

    def read_from(self, offset: int) -> tuple[list[Record | Report], int]:
        """The records between ``offset`` and the last newline as ``parse_lines`` gives them, and the offset behind."""
        records: list[Record | Report] = []
        while data := self._whole_lines(offset):
            found = parse_lines(data)
            if found is None:
                data = self._repaired(offset, data)
                found = parse_lines(data)
                assert found is not None, "damage that repair does not find"
            records += found
            offset += len(data)
        self._read_end = offset
        return records, offset

    def _whole_lines(self, offset: int) -> bytes:
        """At most some megabytes of whole lines. A longer line is read as a whole."""
        size = _CHUNK
        while True:
            data = os.pread(self._descriptor, size, offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                return data[:end]
            size *= 2

    def _repaired(self, offset: int, data: bytes) -> bytes:
        """Damaged lines after repair: looks again under the lock, and blanks what is still damaged there.

        Returned are whole lines again; blanks at the end that joined the line behind them are left out.
        """
        try:
            with self.exclusive():
                data = os.pread(self._descriptor, len(data), offset)
                self._blank(list(find_damage(data, offset)))
                data = os.pread(self._descriptor, len(data), offset)
        except PermissionError:
            # A person who may only read: the same records count, the file stays as it is.
            for span in find_damage(data, offset):
                at = span.offset - offset
                data = data[:at] + b" " * span.length + data[at + span.length :]
        return data[: data.rfind(b"\n") + 1]

    # Writing

    def append_logs(self, logs: list[Record]) -> None:
        """Optuna's interface: append these records as one write. Records that others act on are synced to the disk.

        Raises JournalTimeoutError if the lock cannot be had, and OSError if the disk stays full.
        """
        lines = self._encode(logs)
        synced = any(entry["op_code"] in _SYNCED_OPERATIONS for entry in logs)
        if self._client is not None and not self._depth and self._client.available():
            since = self._read_end
            try:
                self._client.commit(b"".join(lines), synced)
            except ServerGoneError as error:
                log.info("appending without the node's journal server: %s", error)
                self.append(lambda: self._missing(lines, since), synced)
        else:
            self.append(lambda: b"".join(lines), synced)

    def _encode(self, logs: list[Record]) -> list[bytes]:
        """The lines of records of this process, each with the next number of its writer."""
        lines = []
        for entry in logs:
            n = self._counters.get(entry["worker_id"], 0) + 1
            self._counters[entry["worker_id"]] = n
            lines.append(encode(entry, n))
        return lines

    def _missing(self, lines: list[bytes], since: int) -> bytes:
        """Those of our lines that are not in the file yet: no two lines are equal, their writer numbers them."""
        written = b""
        while data := self._whole_lines(since + len(written)):
            written += data
        return b"".join(line for line in lines if line not in written)

    def append(self, lines: Callable[[], bytes], synced: bool) -> None:
        """Append what ``lines`` returns; it is asked anew, under the lock, at every attempt.

        On return the lines are in the file and, with ``synced``, on the disk.
        """
        end = time.monotonic() + self._patience_s
        pause = 0.1
        while True:
            try:
                with self.exclusive():
                    self._append_locked(lines(), synced)
                return
            except OSError as error:
                if error.errno not in _FULL or time.monotonic() + pause > end:
                    raise
                self._on_status(f"{self.path}: {os.strerror(error.errno)}; waiting for room to go on")
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _append_locked(self, data: bytes, synced: bool) -> None:
        descriptor = self._lock.descriptor
        end = self._cut_torn_tail(descriptor)
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
            if synced:
                os.fdatasync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock: what is read inside stays true until the block ends. Appends inside do not lock again."""
        with self._exclusive:
            if self._depth == 0:
                self._lock.acquire()
            self._depth += 1
            try:
                if self._depth == 1:
                    self._follow_replaced_file()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._lock.release()

    def _follow_replaced_file(self) -> None:
        if not is_current(self._descriptor, self.path):
            os.close(self._descriptor)
            self._descriptor = open_journal(self.path)

    # Repair

    def repair_tail(self) -> None:
        """Cut off what a dead writer left behind the last newline. Lines in the middle are repaired when read."""
        end = os.fstat(self._descriptor).st_size
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            with self.exclusive():
                self._cut_torn_tail(self._lock.descriptor)

    def _blank(self, spans: list[Damage]) -> None:
        if not spans:
            return
        self._keep(spans)
        # O_APPEND makes pwrite append: this needs a descriptor without it.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for span in spans:
                os.pwrite(descriptor, b" " * span.length, span.offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _cut_torn_tail(self, descriptor: int) -> int:
        """Remove what stands behind the last newline; returns where the file then ends. The lock is held."""
        end = os.fstat(descriptor).st_size
        if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
            return end
        time.sleep(_TORN_AFTER_S)
        end = os.fstat(descriptor).st_size
        start, tail = end, b""
        while start and b"\n" not in tail:
            start = max(0, start - 65536)
            tail = os.pread(descriptor, end - start, start)
        start += tail.rfind(b"\n") + 1
        tail = tail[tail.rfind(b"\n") + 1 :]
        if not tail:
            return end
        self._keep([damage(start, tail, "torn at the end")])
        os.ftruncate(descriptor, start)
        os.fsync(descriptor)
        return start

    def _keep(self, spans: list[Damage]) -> None:
        """Report damage, and keep its bytes beside the journal before they are removed from it."""
        self.damages += spans
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        lines = [json.dumps({"time": when, **span.as_dict(), "lost": span.lost}) for span in spans]
        with self.path.with_suffix(".lost.jsonl").open("a") as file:
            file.write("\n".join(lines) + "\n")
        for span in spans:
            log.warning("%s: repaired damage at %s", self.path, span.describe())

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
