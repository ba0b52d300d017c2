"""Who may write to the journal: a lock behind Optuna's lock interface, with its owner written in it.

Where all nodes see each other's kernel locks, the lock is ``flock`` on the journal's own inode, taken through the
``filelock`` package. The kernel frees it when its holder dies, nobody can break it, and it cannot be deleted apart from
the data that it guards. The owner stands in ``journal.lock`` beside it, for the messages of those who wait.

Elsewhere it is a file that names its owner (:mod:`hpcjobs.journal_soft_lock`). Which of the two a study has is decided
once and kept in its folder, since all its processes must take the same.
"""

from __future__ import annotations

import abc
import fcntl
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from optuna.storages.journal._file import BaseJournalFileLock

log = logging.getLogger(__name__)

OWNER_BYTES = 512
DEFAULT_DEADLINE_S = 300.0
_PF_EXITING = 0x4  # of the kernel's task flags


class JournalTimeoutError(TimeoutError):
    """A call on the journal reached its deadline. Nothing of it was acknowledged."""


class FencedError(OSError):
    """This process stalled longer than its lease and the lock was taken from it. It must start its work again."""


def process_start(pid: int | str = "self") -> int | None:
    """When a process here started, in clock ticks since boot: tells it from a later one with its number.

    None if there is none, or if it is ending: it runs no code of its own any more.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    state, flags = fields[0], int(fields[6])
    return None if state in "ZX" or flags & _PF_EXITING else int(fields[19])


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_namespace() -> str:
    """Process ids of two containers on one machine are not the same thing."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock. ``step`` is Slurm's ``<job>.<step>`` name of it, where there is one."""

    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=boot_id)
    namespace: str = field(default_factory=process_namespace)
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

    def again(self) -> LockOwner:
        """The same owner with a new token, for a new acquisition."""
        return replace(self, token=secrets.token_hex(8))

    def describe(self) -> str:
        where = f"process {self.pid} on {self.host}"
        return f"{where} (job {self.job}, step {self.step})" if self.job else where


class JournalLock(BaseJournalFileLock, abc.ABC):
    """A lock on a journal. While it is held, ``descriptor`` is the journal, open for reading and appending.

    Args:
        journal: the file that is guarded; created if it is missing.
        deadline_s: how long ``acquire`` waits before it raises :class:`JournalTimeoutError`; infinity: for ever.
    """

    def __init__(self, journal: Path, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._journal = journal
        self._deadline_s = deadline_s
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._owner = LockOwner()
        self._held = False
        self.descriptor = -1
        self.status: os.stat_result | None = None  # of the journal, when the lock was taken

    @abc.abstractmethod
    def acquire(self, deadline_s: float | None = None) -> bool:
        """Wait for the lock. Raises JournalTimeoutError, which names the holder, when the deadline passes."""

    def confirm(self) -> None:
        """Raises FencedError if the lock was taken from us: what we appended since may be lost.

        A kernel lock cannot be taken from a process that lives.
        """

    def replace_journal(self, new: Path) -> None:
        """Give the journal's name to the file ``new``, while the lock is held. FencedError: nothing was done."""
        rename_durably(new, self._journal)

    @abc.abstractmethod
    def close(self) -> None:
        """Give the descriptors back."""

    def after_fork(self) -> None:
        """In a child: forget the parent's descriptors without freeing its lock, and become an owner of its own."""
        self.close()

    def _end(self, deadline_s: float | None) -> float:
        return time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)

    def _timeout(self, owner: LockOwner | None) -> JournalTimeoutError:
        holder = owner.describe() if owner else "an unknown process"
        return JournalTimeoutError(f"{self._journal} is locked by {holder}: gave up waiting for it")


class KernelLock(JournalLock):
    """``flock`` on the journal itself; for filesystems on which all nodes see each other's kernel locks."""

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._owner_text = self._owner.encode()
        self._inode = (0, 0)
        self._owner_descriptor = -1

    def acquire(self, deadline_s: float | None = None) -> bool:
        # not above: most workers never lock, their node's journal server does, and this is a fifth of all our imports
        from filelock import lock_descriptor

        end = self._end(deadline_s)
        while True:
            if self.descriptor < 0:
                self.descriptor = open_journal(self._journal)
                self._inode = inode(os.fstat(self.descriptor))
            if not lock_descriptor(self.descriptor, blocking=False):
                if math.isinf(end):
                    fcntl.flock(self.descriptor, fcntl.LOCK_EX)
                else:
                    self._wait(end)
            self.status = status_of(self._journal)
            if self.status is not None and inode(self.status) == self._inode:
                break
            # The file was replaced while we waited: what we have locked is no longer the journal.
            os.close(self.descriptor)
            self.descriptor = -1
        self._held = True
        self._write_owner()
        return True

    def release(self) -> None:
        """Free the lock. Raises RuntimeError if this object does not hold it."""
        if not self._held:
            raise RuntimeError(f"the lock of {self._journal} is not held by this process")
        from filelock import unlock_descriptor

        self._held = False
        unlock_descriptor(self.descriptor)

    def _wait(self, end: float) -> None:
        """Wait in the kernel's queue, which is fairer than asking again and again and wakes nobody in vain.

        A blocking ``flock`` has no deadline, hence the thread: one that comes too late gives back what it got.
        """
        descriptor, outcome, guard = self.descriptor, _Outcome(), threading.Lock()

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
                    self.descriptor = -1
                    raise self._timeout(read_owner(owner_file(self._journal)))
        if outcome.error is not None:
            raise outcome.error

    def _write_owner(self) -> None:
        """Leave our name for those who wait. On a full disk they do without it: the lock itself is the kernel's."""
        try:
            if self._owner_descriptor < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._owner_descriptor = os.open(owner_file(self._journal), flags, 0o664)
            os.pwrite(self._owner_descriptor, self._owner_text, 0)
        except OSError as error:
            log.info("could not write the owner of the lock: %s", error)

    def close(self) -> None:
        for descriptor in (self.descriptor, self._owner_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._start_afresh()


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


def open_for_reading(path: Path) -> int:
    """Open the journal, and create it if it is missing. Enough for those who may only read."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return open_journal(path)


def rename_durably(new: Path, name: Path) -> None:
    """Rename; records that are then synced to the new file must not be lost with the rename."""
    new.replace(name)
    folder = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def status_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
