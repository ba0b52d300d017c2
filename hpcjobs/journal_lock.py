"""Who may write to the journal: a lock behind Optuna's lock interface, with its owner written in it.

Where the filesystem has kernel locks, the lock is ``flock`` on the journal's own inode, taken through the ``filelock``
package. The kernel frees it when its holder dies, nobody can break it, and it cannot be deleted apart from the data
that it guards. The owner stands in ``journal.lock`` beside it, for the messages of those who wait.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor
from optuna.storages.journal._file import BaseJournalFileLock

OWNER_BYTES = 512
DEFAULT_DEADLINE_S = 300.0


class JournalTimeoutError(TimeoutError):
    """A call on the journal reached its deadline. Nothing of it was acknowledged."""


def process_start(pid: int | str = "self") -> int | None:
    """When a process here started, in clock ticks since boot: tells it from a later one with its number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock. ``step`` is Slurm's ``<job>.<step>`` name of it, where there is one."""

    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=boot_id)
    pid: int = field(default_factory=os.getpid)
    start: int | None = field(default_factory=process_start)
    job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    step: str | None = field(default_factory=lambda: os.environ.get("SLURM_STEP_ID"))
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        """One padded line, so that an owner always overwrites the whole of the one before."""
        return json.dumps(asdict(self)).encode().ljust(OWNER_BYTES - 1) + b"\n"

    @staticmethod
    def decode(text: bytes) -> LockOwner | None:
        try:
            return LockOwner(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def describe(self) -> str:
        where = f"process {self.pid} on {self.host}"
        return f"{where} (job {self.job}, step {self.step})" if self.job else where


class KernelLock(BaseJournalFileLock):
    """``flock`` on the journal itself; for filesystems on which all nodes see each other's kernel locks.

    Args:
        journal: the file that is guarded and locked; created if it is missing.
        deadline_s: how long ``acquire`` waits before it raises :class:`JournalTimeoutError`; infinity: for ever.
    """

    def __init__(self, journal: Path, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._journal = journal
        self._owner_file = owner_file(journal)
        self._deadline_s = deadline_s
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._owner = LockOwner()
        self._descriptor = -1
        self._owner_descriptor = -1
        self._held = False

    @property
    def descriptor(self) -> int:
        """The locked inode, open for reading and appending. Valid while the lock is held."""
        return self._descriptor

    def acquire(self, deadline_s: float | None = None) -> bool:
        """Wait for the lock. Raises :class:`JournalTimeoutError`, which names the holder, when the deadline passes."""
        end = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        while True:
            if self._descriptor < 0:
                self._descriptor = open_journal(self._journal)
            if not lock_descriptor(self._descriptor, blocking=False):
                if math.isinf(end):
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                else:
                    self._wait(end)
            if is_current(self._descriptor, self._journal):
                break
            # The file was replaced (compaction) while we waited: what we have locked is no longer the journal.
            self._close_journal()
        self._held = True
        self._write_owner()
        return True

    def release(self) -> None:
        """Free the lock. Raises RuntimeError if this object does not hold it."""
        if not self._held:
            raise RuntimeError(f"the lock of {self._journal} is not held by this process")
        self._held = False
        unlock_descriptor(self._descriptor)

    def _wait(self, end: float) -> None:
        """Wait in the kernel's queue, which is fairer than asking again and again and wakes nobody in vain.

        A blocking ``flock`` has no deadline, hence the thread: one that comes too late gives back what it got.
        """
        descriptor, outcome, guard = self._descriptor, _Outcome(), threading.Lock()

        def block() -> None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                outcome.error = error
            with guard:
                outcome.done.set()
                if outcome.abandoned:
                    os.close(descriptor)

        threading.Thread(target=block, name="journal lock", daemon=True).start()
        if not outcome.done.wait(max(0.0, end - time.monotonic())):
            with guard:
                if not outcome.done.is_set():
                    outcome.abandoned = True
                    self._descriptor = -1
                    raise JournalTimeoutError(f"{self._journal} is locked by {self._holder()}: gave up waiting for it")
        if outcome.error is not None:
            raise outcome.error

    def _holder(self) -> str:
        owner = read_owner(self._owner_file)
        return owner.describe() if owner else "an unknown process"

    def _write_owner(self) -> None:
        if self._owner_descriptor < 0:
            self._owner_descriptor = os.open(self._owner_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        text = self._owner.encode()
        if os.pread(self._owner_descriptor, OWNER_BYTES, 0) != text:
            os.pwrite(self._owner_descriptor, text, 0)

    def _close_journal(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def close(self) -> None:
        """Give the descriptors back; a lock that is held is freed by it."""
        for descriptor in (self._descriptor, self._owner_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._start_afresh()

    def after_fork(self) -> None:
        """In a child: forget the parent's descriptors without freeing its lock, and become an owner of its own."""
        self.close()


@dataclass
class _Outcome:
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False
    error: OSError | None = None


def owner_file(journal: Path) -> Path:
    return journal.with_suffix(".lock")


def read_owner(path: Path) -> LockOwner | None:
    """Who stands in a lock's file; None where there is nobody or it cannot be read."""
    try:
        return LockOwner.decode(path.read_bytes()[:OWNER_BYTES])
    except OSError:
        return None


def open_journal(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o664)


def is_current(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def lock_for(journal: Path, deadline_s: float = DEFAULT_DEADLINE_S) -> KernelLock:
    return KernelLock(journal, deadline_s)
