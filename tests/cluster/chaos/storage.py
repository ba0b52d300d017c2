"""Faults of the journal and of the disk that it is on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from tests.cluster.chaos.processes import Injected
from tests.cluster.chaos.world import World

_WRITER = """\
import os, signal, sys
from pathlib import Path
from hpcjobs.journal_soft_lock import lock_for
lock = lock_for(Path(sys.argv[1]))
lock.acquire()
os.write(lock.descriptor, bytes.fromhex(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def torn_append(world: World) -> Injected | None:
    """A writer dies with the lock held and half of its record written."""
    return _dying_writer(world, _half_a_record(world))


def nul_append(world: World) -> Injected | None:
    """What some filesystems leave of an append after a crash: its length, without its bytes."""
    return _dying_writer(world, b"\0" * world.rng.randrange(1, 4000))


def nul_append_with_newline(world: World) -> Injected | None:
    return _dying_writer(world, b"\0" * world.rng.randrange(1, 2000) + b"\n")


def _dying_writer(world: World, data: bytes) -> Injected | None:
    if world.disk_full:
        return None
    done = subprocess.run([sys.executable, "-c", _WRITER, str(world.paths.journal), data.hex()], timeout=330)
    assert done.returncode == -signal.SIGKILL, f"the dying writer ended with {done.returncode}"
    return Injected(f"{len(data)} bytes of a dead writer", damage=len(data))


def torn_append_without_lock(world: World) -> Injected | None:
    """Half a record of a program that does not know our lock."""
    return _append(world, _half_a_record(world))


def garbage_line(world: World) -> Injected | None:
    return _append(world, world.rng.choice([b"  \n", b"not a record\n", b"{}\n", b"[1, 2\n", b"\xff\xfe\n"]))


def _append(world: World, data: bytes) -> Injected | None:
    if world.disk_full:
        return None
    file = os.open(world.paths.journal, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, data)
    finally:
        os.close(file)
    return Injected(f"{len(data)} bytes at the end", damage=len(data))


def _half_a_record(world: World) -> bytes:
    whole = b'{"op_code":6,"worker_id":"torn-1","trial_id":0,"state":1,"values":[1.0],"n":1,"crc":"00000000"}'
    return whole[: world.rng.randrange(1, len(whole) - 1)]


def full_disk(world: World) -> Injected | None:
    if world.disk_full:
        return None
    filler = world.disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    world.disk_full = True

    def free() -> str:
        space = os.statvfs(world.disk)
        filler.unlink()
        world.disk_full = False
        return f"{space.f_bavail} blocks were free, now {os.statvfs(world.disk).f_bavail}"

    return Injected("no block is free", undo=free, undo_after_s=world.rng.uniform(2, 8))
