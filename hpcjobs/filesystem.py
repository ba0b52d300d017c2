"""What a study's filesystem really does: locks, links, renames, appends, and what a sync costs.

Two sources that must agree: what the mount says (``/proc/self/mountinfo``) and what happens when it is tried. A lock
that only this node sees (Lustre's ``localflock``) works when tried here, so the mount's word counts against it; only a
try from a second node settles it (``hpcjobs.doctor`` in a job of two nodes).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

LockKind = Literal["kernel", "soft"]

_NODE_LOCAL = {"ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "ext3", "ext2", "f2fs", "ramfs"}
_KERNEL_LOCKS_EVERYWHERE = {"nfs4", "gpfs", "ceph", "beegfs", "cifs", "smb3", "ocfs2", "gfs2"}


@dataclass(frozen=True)
class Mount:
    """The filesystem of a path, as the kernel names it."""

    type: str
    options: tuple[str, ...]
    point: str


@dataclass(frozen=True)
class Probe:
    """What was found by trying. Booleans say whether it works between two processes of this node."""

    folder: str
    filesystem: str
    options: tuple[str, ...]
    flock: bool
    fcntl: bool
    hard_links: bool
    exclusive_create: bool
    rename_over_open_file: bool
    append: bool
    sync_ms: float
    metadata_ms: float
    free_gb: float
    lock: LockKind
    reason: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def mount_of(folder: Path) -> Mount:
    """The mount that holds ``folder``: the last one whose mount point is nearest above it."""
    path = str(folder.resolve())
    found = Mount("unknown", (), "/")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found.point):
            options = set(fields[5].split(",")) | set(tail[2].split(","))
            found = Mount(tail[0], tuple(sorted(options)), point)
    return found


def choose_lock(mount: Mount, flock_works: bool) -> tuple[LockKind, str]:
    """Which lock a study on this mount takes, and why."""
    if not flock_works:
        return "soft", "flock does not work here"
    if mount.type == "lustre":
        if "flock" in mount.options:
            return "kernel", "Lustre is mounted with flock"
        return "soft", "Lustre is mounted without flock: its locks are not seen by other nodes"
    if mount.type.startswith("nfs"):
        if {"nolock", "local_lock=all", "local_lock=flock"} & set(mount.options):
            return "soft", "NFS is mounted with locks that only this node sees"
        return "kernel", "NFS turns flock into a lock of the server"
    if is_node_local(mount):
        return "kernel", f"{mount.type} is a filesystem of this node alone: do other nodes see this folder?"
    if mount.type in _KERNEL_LOCKS_EVERYWHERE:
        return "kernel", f"{mount.type} has kernel locks between nodes"
    return "soft", f"nothing is known of locks between nodes on {mount.type}"


def is_node_local(mount: Mount) -> bool:
    """Whether filesystems of this type are those of one node. Others may still reach it by a way that no mount tells:
    they share the machine, or it is exported to them."""
    return mount.type in _NODE_LOCAL


def shares_unsynced_writes(mount: Mount) -> bool:
    """Whether another node sees what was written here before it is synced. NFS clients keep it to themselves."""
    return mount.type in _NODE_LOCAL | {"lustre", "gpfs"}


def lock_kind(journal: Path) -> LockKind:
    """The kind of lock of a study, decided once: all processes must use the same. Kept in ``journal.locking``."""
    record = journal.with_suffix(".locking")
    end = time.monotonic() + 5
    while True:
        try:
            kind = json.loads(record.read_text())["lock"]
            if kind not in ("kernel", "soft"):
                raise ValueError(f"{record}: lock is {kind!r}, allowed are kernel and soft")
            return kind  # type: ignore[no-any-return]
        except FileNotFoundError:
            if not os.access(journal.parent, os.W_OK):
                return "kernel"  # one who may only read never takes it
            kind, reason = choose_lock(mount_of(journal.parent), _between_processes(journal.parent, _try_flock))
            decide_lock(journal, kind, reason)
        except json.JSONDecodeError:  # another process is just writing it
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def decide_lock(journal: Path, kind: LockKind, reason: str) -> None:
    """Record the kind of lock, unless it is recorded already: the first one counts."""
    text = json.dumps({"lock": kind, "reason": reason, "filesystem": mount_of(journal.parent).type}) + "\n"
    try:
        descriptor = os.open(journal.with_suffix(".locking"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def probe(folder: Path) -> Probe:
    """Try everything in a temporary folder inside ``folder``, which must be writable."""
    mount = mount_of(folder)
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=folder) as name:
        scratch = Path(name)
        flock_works = _between_processes(scratch, _try_flock)
        kind, reason = choose_lock(mount, flock_works)
        space = os.statvfs(scratch)
        return Probe(
            folder=str(folder),
            filesystem=mount.type,
            options=mount.options,
            flock=flock_works,
            fcntl=_between_processes(scratch, _try_fcntl),
            hard_links=_works(lambda: _link(scratch)),
            exclusive_create=_works(lambda: _create_exclusively(scratch)),
            rename_over_open_file=_works(lambda: _rename_over(scratch)),
            append=_appends_do_not_mix(scratch),
            sync_ms=_median_ms(lambda: _sync(scratch)),
            metadata_ms=_median_ms(lambda: os.stat(scratch)),  # noqa: PTH116
            free_gb=space.f_bavail * space.f_frsize / 1e9,
            lock=kind,
            reason=reason,
        )


def _try_flock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _try_fcntl(descriptor: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _between_processes(folder: Path, lock: Callable[[int], None]) -> bool:
    """Whether a lock can be had, and keeps a second process out while it is held."""
    descriptor, name = tempfile.mkstemp(prefix=".lock-", dir=folder)
    try:
        lock(descriptor)
        kind = "fcntl" if lock is _try_fcntl else "flock"
        return _is_held([sys.executable, "-c", _OTHER_PROCESS, name, kind])
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
        return False
    finally:
        os.close(descriptor)
        os.unlink(name)  # noqa: PTH108


# Run with -c, so that it starts without importing this package.
_OTHER_PROCESS = """
import fcntl, sys
lock = fcntl.lockf if sys.argv[2] == "fcntl" else fcntl.flock
with open(sys.argv[1], "r+") as file:
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except OSError:
        print("held")
"""


def _is_held(other: list[str]) -> bool:
    """Whether another process, started by this command, finds the lock held."""
    told = subprocess.run(other, check=False, timeout=120, stdout=subprocess.PIPE, text=True)
    if told.returncode or told.stdout.strip() not in ("held", "free"):
        raise OSError(f"{other} ended with exit code {told.returncode} and said {told.stdout!r}")
    return told.stdout.strip() == "held"


def held_on_another_node(path: Path, node: str) -> bool:
    """Whether a ``flock`` of this process on ``path`` is seen on another node of this job (through ``srun``)."""
    try:
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            python = [sys.executable, "-c", _OTHER_PROCESS, str(path.absolute()), "flock"]
            return _is_held(["srun", "--overlap", "-N1", "-n1", "-w", node, *python])
    finally:
        path.unlink()


def _works(action: Callable[[], bool]) -> bool:
    try:
        return action()
    except OSError:
        return False


def _link(folder: Path) -> bool:
    source = folder / "source"
    source.touch()
    os.link(source, folder / "link")
    return source.stat().st_nlink == 2


def _create_exclusively(folder: Path) -> bool:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(os.open(folder / "exclusive", flags))
    try:
        os.close(os.open(folder / "exclusive", flags))
    except FileExistsError:
        return True
    return False


def _rename_over(folder: Path) -> bool:
    """A reader keeps the file that it has open when another takes its name."""
    old, new = folder / "old", folder / "new"
    old.write_text("old")
    new.write_text("new")
    with old.open() as reader:
        new.replace(old)
        return reader.read() == "old" and old.read_text() == "new"


def _appends_do_not_mix(folder: Path) -> bool:
    """Two processes that append with O_APPEND: every line must be whole, and none be written over another."""
    path, lines = folder / "append", 200
    writer = f"""
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range({lines}):
    os.write(file, sys.argv[2].encode() * 300 + b"\\n")
"""
    writers = [subprocess.Popen([sys.executable, "-c", writer, str(path), letter]) for letter in "ab"]
    if any(process.wait(timeout=60) for process in writers):
        return False
    found = path.read_bytes().split(b"\n")[:-1]
    return sorted(found) == [b"a" * 300] * lines + [b"b" * 300] * lines


def _sync(folder: Path) -> None:
    descriptor = os.open(folder / "sync", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, b"x" * 200)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _median_ms(action: Callable[[], object], repeats: int = 11) -> float:
    import statistics  # not for workers, which import this module too

    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - before))
    return statistics.median(times)
