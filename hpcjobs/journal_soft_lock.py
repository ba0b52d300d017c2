"""The journal's lock where kernel locks do not reach other nodes: a file that names its owner, and a fence.

Holding the lock of a journal means to have created ``journal.lock.<inode>``, for the journal's inode of that moment.
A lock is never removed by others, because whoever removes it may already hit its successor. It is broken by replacing
the journal: the breaker copies it to a new file and renames that over it. The new inode has no lock yet; a former
owner who wakes up appends to a file that no name leads to any more, sees it (``confirm``), and starts again. So the
inode is the generation number, and the filesystem itself checks it at the append.

One breaker for one inode: who has created ``journal.break.<inode>``. A breaker's place is taken only when it is gone
for certain, never because it is slow, since it may be about to rename. It announces itself before it copies, and owners
look for that before and after they write: what an owner has confirmed is in the copy, also if the lock changed hands
while the breaker took its former owner for dead.

A lock is broken when its owner is gone for certain (same machine: no such process), or when it has not changed for
``lease_s`` of the waiter's own time: clocks of nodes are never compared. The length of a lease decides how long others
wait and how often a slow owner starts again, never what is written. A breaker has no lease: Slurm is asked about one on
another machine.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcjobs.filesystem import lock_kind
from hpcjobs.journal_lock import (
    DEFAULT_DEADLINE_S,
    FencedError,
    JournalLock,
    KernelLock,
    LockOwner,
    boot_id,
    inode,
    open_journal,
    process_namespace,
    process_start,
    read_owner,
    rename_durably,
    status_of,
)

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.03
# Whoever has broken a lock lets those go first who have waited for it, and may have waited longer.
_PAUSE_AFTER_BREAKING_S = 0.1
_ASK_SLURM_EVERY_S = 20.0
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def lock_for(journal: Path, deadline_s: float = DEFAULT_DEADLINE_S) -> JournalLock:
    """The lock of this study. It also fits stock Optuna: ``JournalFileBackend(path, lock_obj=lock_for(path))``."""
    return KernelLock(journal, deadline_s) if lock_kind(journal) == "kernel" else SoftLock(journal, deadline_s)


class SoftLock(JournalLock):
    """See the module. ``lease_s``: how long a holder may stall before it is fenced off, which costs it nothing but its
    time. Whoever dies with the lock keeps all others waiting so long, if nobody waits on the same machine."""

    def __init__(self, journal: Path, deadline_s: float, lease_s: float = 5.0) -> None:
        self._lease_s = lease_s
        super().__init__(journal, deadline_s)

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._lock_file: Path | None = None
        self._watched = _Watched()

    def acquire(self, deadline_s: float | None = None) -> bool:
        end, pause = self._end(deadline_s), _FIRST_PAUSE_S
        while not self._try():
            if self._break_if_abandoned():
                pause = _PAUSE_AFTER_BREAKING_S
            if time.monotonic() > end:
                raise self._timeout(self._watched.owner)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def _try(self) -> bool:
        self._owner = self._owner.again()
        descriptor = open_journal(self._journal)
        status = os.fstat(descriptor)
        lock_file = _beside(self._journal, "lock", status)
        try:
            created = create_owned(lock_file, self._owner)
        except OSError:  # a full disk, say
            os.close(descriptor)
            raise
        if not created:
            os.close(descriptor)
            self._watched.look(lock_file)
            return False
        # Opening a file anew asks the server for its true size, on NFS too.
        named = status_of(self._journal)
        if named is None or inode(named) != inode(status) or self._is_being_replaced(lock_file):
            os.close(descriptor)
            lock_file.unlink(missing_ok=True)  # a breaker may have been quicker
            return False
        self.descriptor, self.status, self._lock_file, self._held = descriptor, os.fstat(descriptor), lock_file, True
        return True

    def _break_if_abandoned(self) -> bool:
        """Whether the lock was broken."""
        owner, lock_file = self._watched.owner, self._watched.path
        stalled = time.monotonic() - self._watched.since > self._lease_s
        if lock_file is None or not (stalled or (owner is not None and has_ended_here(owner))):
            return False
        with self._only_replacer(lock_file) as alone:
            # the lock may have changed hands before we announced ourselves; from now on nobody confirms a record
            unchanged = alone and lock_file.exists() and read_owner(lock_file) == owner
            if unchanged and self._replace_journal(lock_file):
                who = owner.describe() if owner else "an unknown process"
                why = "stalled" if stalled else "is gone"
                log.warning("%s: broke the lock of %s, which %s", self._journal, who, why)
                lock_file.unlink(missing_ok=True)
                return True
        return False

    @contextmanager
    def _only_replacer(self, lock_file: Path) -> Iterator[bool]:
        """Be the only one who may replace the journal that this lock is for; False if somebody else is."""
        first = breaking = _announcement(lock_file)
        while not create_owned(breaking, self._owner):
            other = read_owner(breaking)
            if other is None or not is_gone(other, self._watched.asked_slurm):
                yield False
                return
            breaking = breaking.with_name(f"{breaking.name}.{other.token}")
        try:
            yield True
        finally:
            # Ours last: while it stands nobody else breaks this lock.
            for passed_over in self._journal.parent.glob(f"{first.name}.*"):
                if passed_over != breaking:
                    passed_over.unlink(missing_ok=True)
            first.unlink(missing_ok=True)
            breaking.unlink(missing_ok=True)

    def _is_being_replaced(self, lock_file: Path) -> bool:
        """Whether somebody else has announced to replace the journal that this lock is for, and may still do it."""
        breaking = _announcement(lock_file)
        while (other := read_owner(breaking)) is not None:
            if other.token == self._owner.token:
                return False
            if not is_gone(other, self._watched.asked_slurm):
                return True
            breaking = breaking.with_name(f"{breaking.name}.{other.token}")
        return breaking.exists()  # announced this moment, and not written yet

    def replace_journal(self, new: Path) -> None:
        assert self._lock_file is not None, "replace_journal() without the lock"
        with self._only_replacer(self._lock_file) as alone:
            if not alone:
                raise FencedError(f"{self._journal}: the lock of this process is being broken")
            self.confirm()  # from here on nobody else can replace it
            rename_durably(new, self._journal)

    def _replace_journal(self, lock_file: Path) -> bool:
        """Give the journal a new inode, unless it has one already. Only the one breaker of this inode comes here."""
        temporary = self._journal.with_name(f".{self._journal.name}.{secrets.token_hex(8)}")
        with self._journal.open("rb") as old:
            if _beside(self._journal, "lock", os.fstat(old.fileno())) != lock_file:
                return False
            try:
                with temporary.open("wb") as new:
                    shutil.copyfileobj(old, new, 1 << 20)
                    os.fchmod(new.fileno(), os.fstat(old.fileno()).st_mode & 0o777)
                    new.flush()
                    os.fsync(new.fileno())
                rename_durably(temporary, self._journal)
            finally:
                temporary.unlink(missing_ok=True)
        return True

    def confirm(self) -> None:
        assert self._lock_file is not None, "confirm() without the lock"
        # In this order: whoever announces itself after the first look copies what has been written before it.
        replaced = self._is_being_replaced(self._lock_file)
        named, owner = status_of(self._journal), read_owner(self._lock_file)
        mine = owner is not None and owner.token == self._owner.token
        if replaced or named is None or inode(named) != inode(os.fstat(self.descriptor)) or not mine:
            raise FencedError(f"{self._journal}: this process stalled, and its lock was taken from it")

    def release(self) -> None:
        """Free the lock. What belongs to a successor by now is left alone."""
        if not self._held or self._lock_file is None:
            raise RuntimeError(f"the lock of {self._journal} is not held by this process")
        self._held = False
        os.close(self.descriptor)
        self.descriptor = -1
        owner = read_owner(self._lock_file)
        if owner is not None and owner.token == self._owner.token:
            self._lock_file.unlink(missing_ok=True)

    def close(self) -> None:
        if self._held:
            self.release()
        self._start_afresh()

    def after_fork(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self._start_afresh()


class _Watched:
    """The lock that a waiter sees, and since when it has been the same one."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.owner: LockOwner | None = None
        self.since = time.monotonic()
        self.asked_slurm: dict[str, tuple[float, bool]] = {}

    def look(self, path: Path) -> None:
        owner = read_owner(path)
        if path != self.path or owner != self.owner:
            self.path, self.owner, self.since = path, owner, time.monotonic()


def _beside(journal: Path, kind: str, status: os.stat_result) -> Path:
    return journal.with_name(f"{journal.stem}.{kind}.{status.st_ino}")


def _announcement(lock_file: Path) -> Path:
    return lock_file.with_name(lock_file.name.replace(".lock.", ".break."))


def create_owned(path: Path, owner: LockOwner) -> bool:
    """Create a file with an owner in it, from the first moment on; False if it exists.

    A hard link is exclusive on every version of NFS, and its count tells the outcome even if the answer got lost.
    """
    temporary = path.with_name(f".{path.name}.{owner.token}")
    try:
        temporary.write_bytes(owner.encode())
        os.link(temporary, path)
    except FileExistsError:
        return temporary.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _create_and_write(path, owner)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _create_and_write(path: Path, owner: LockOwner) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o664)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(owner.encode())
    except OSError:
        path.unlink()
        raise
    return True


def is_visible(owner: LockOwner) -> bool:
    """Whether this process can tell by itself if the owner is still there."""
    return owner.host == socket.gethostname() and owner.namespace == process_namespace()


def has_ended_here(owner: LockOwner) -> bool:
    """Whether an owner on this machine has certainly ended. False also means: not known."""
    return is_visible(owner) and (owner.boot != boot_id() or process_start(owner.pid) != owner.start)


def is_gone(owner: LockOwner, asked_slurm: dict[str, tuple[float, bool]]) -> bool:
    """Whether an owner has certainly ended. False also means: not known."""
    if is_visible(owner) or owner.job is None:
        return has_ended_here(owner)
    when, gone = asked_slurm.get(owner.job, (-_ASK_SLURM_EVERY_S, False))
    if not gone and time.monotonic() - when > _ASK_SLURM_EVERY_S:
        gone = slurm_says_over(owner.job)
        asked_slurm[owner.job] = (time.monotonic(), gone)
    return gone


def slurm_says_over(job: str) -> bool:
    """Whether Slurm knows the job and knows that it has ended. Any doubt (no answer, an error) is no."""
    try:
        answer = subprocess.run(
            ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    states = set(answer.stdout.split())
    going_on = {"RUNNING", "PENDING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT"}
    return answer.returncode == 0 and bool(states) and not states & going_on
