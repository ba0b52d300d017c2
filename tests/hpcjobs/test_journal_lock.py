"""Locks of the journal: never two holders, a dead holder blocks nobody, a holder that lost its lock does not write."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.storages.journal import JournalFileBackend

from hpcjobs import journal_soft_lock
from hpcjobs.journal_lock import (
    FencedError,
    JournalLock,
    JournalTimeoutError,
    KernelLock,
    LockOwner,
    owner_file,
    read_owner,
)
from hpcjobs.journal_soft_lock import SoftLock, create_owned

KINDS = [pytest.param(KernelLock, id="kernel"), pytest.param(SoftLock, id="soft")]
MakeLock = Callable[[Path, float], JournalLock]


def fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except Exception:
            sys.excepthook(*sys.exc_info())
            raise
        finally:
            os._exit(1)
    return pid


def wait_for_all(pids: list[int]) -> None:
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.002)


def hold_for_ever(make: MakeLock, journal: Path) -> int:
    """A process that takes the lock and keeps it."""

    def hold() -> None:
        make(journal, 5).acquire()
        (journal.parent / "held").touch()
        signal.pause()

    pid = fork(hold)
    wait_for(journal.parent / "held")
    return pid


def count(make: MakeLock, journal: Path, turns: int) -> None:
    """Add 1 to a number in a file, which goes wrong as soon as two do it at once."""
    lock, number = make(journal, 300), journal.parent / "number"
    for _ in range(turns):
        lock.acquire()
        number.write_text(str(int(number.read_text()) + 1))
        lock.release()


@pytest.mark.parametrize("make", KINDS)
def test_only_one_process_holds_it(make: MakeLock, tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    journal = tmp_path / "journal.log"
    pids = [fork(lambda: count(make, journal, 100)) for _ in range(6)]
    wait_for_all(pids)
    assert (tmp_path / "number").read_text() == "600"


@pytest.mark.parametrize("make", KINDS)
def test_killed_holder_delays_the_next_by_less_than_100_ms(make: MakeLock, tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    pid = hold_for_ever(make, journal)
    lock = make(journal, 60)
    waited: list[float] = []

    def acquire() -> None:
        lock.acquire()
        waited.append(time.monotonic())

    waiter = threading.Thread(target=acquire)
    waiter.start()
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    killed = time.monotonic()
    waiter.join(timeout=120)
    assert waited[0] - killed < 25, "stock Optuna waits 30 s; benchmarks/journal.py measures ours"


@pytest.mark.parametrize("make", KINDS)
def test_waiting_ends_at_the_deadline_and_names_the_holder(make: MakeLock, tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    pid = hold_for_ever(make, journal)
    before = time.monotonic()
    with pytest.raises(JournalTimeoutError, match=f"process {pid} on "):
        make(journal, 0.2).acquire()
    assert time.monotonic() - before < 30
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("make", KINDS)
def test_release_without_the_lock_is_refused(make: MakeLock, tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    pid = hold_for_ever(make, journal)
    with pytest.raises(RuntimeError, match="not held"):
        make(journal, 1).release()
    with pytest.raises(JournalTimeoutError):
        make(journal, 0.1).acquire()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("make", KINDS)
def test_stopped_holder_on_this_machine_is_waited_for(make: MakeLock, tmp_path: Path) -> None:
    """It lives: however long it sleeps, nobody else may write."""
    journal = tmp_path / "journal.log"
    pid = hold_for_ever(make, journal)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(JournalTimeoutError):
        make(journal, 0.5).acquire()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("make", KINDS)
def test_child_of_a_holder_does_not_free_its_lock(make: MakeLock, tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    lock = make(journal, 5)
    lock.acquire()
    os.waitpid(fork(lock.after_fork), 0)
    with pytest.raises(JournalTimeoutError):
        make(journal, 0.1).acquire()
    lock.release()


@pytest.mark.parametrize("make", KINDS)
def test_stock_backend_of_optuna_takes_it(make: MakeLock, tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    backend = JournalFileBackend(str(journal), lock_obj=make(journal, 5))
    backend.append_logs([{"op_code": 0}])
    assert list(backend.read_logs(0)) == [{"op_code": 0}]


def test_kernel_lock_names_its_owner(tmp_path: Path) -> None:
    lock = KernelLock(tmp_path / "journal.log")
    lock.acquire()
    owner = read_owner(owner_file(tmp_path / "journal.log"))
    assert owner is not None
    assert (owner.pid, owner.host) == (os.getpid(), os.uname().nodename)
    assert len(owner.token) == 16


def test_deadline_of_a_waiter_does_not_leave_the_lock_taken(tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    first, second = KernelLock(journal), KernelLock(journal, 0.1)
    first.acquire()
    with pytest.raises(JournalTimeoutError):
        second.acquire()
    first.release()
    assert second.acquire(deadline_s=2)


def elsewhere(lock: SoftLock, **changes: str) -> None:
    """Let a lock's owner come from another machine, of which nothing is known here."""
    lock._owner = dataclasses.replace(lock._owner, host="other-node", **changes)


def test_soft_lock_of_another_node_is_broken_after_its_lease_and_its_owner_fenced(tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    journal.write_text("before\n")
    stalled = SoftLock(journal, 5)
    elsewhere(stalled)
    stalled.acquire()
    next_owner = SoftLock(journal, 60, lease_s=0.3)
    before = time.monotonic()
    next_owner.acquire()
    assert time.monotonic() - before >= 0.3
    os.write(next_owner.descriptor, b"of the new owner\n")
    os.write(stalled.descriptor, b"of the stalled owner\n")
    assert journal.read_text() == "before\nof the new owner\n"
    with pytest.raises(FencedError):
        stalled.confirm()
    next_owner.confirm()
    stalled.release()
    next_owner.confirm()
    next_owner.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.log"]


def test_soft_lock_that_changes_hands_is_not_taken_for_a_stalled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 0.1)  # a look later for each question: no pause of this process counts
    monkeypatch.setattr(journal_soft_lock, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    journal = tmp_path / "journal.log"
    busy, waiter = SoftLock(journal, 5), SoftLock(journal, 5, lease_s=0.3)
    elsewhere(busy)
    inode = journal.stat().st_ino if journal.exists() else None
    for _ in range(50):
        busy.acquire()
        inode = inode or journal.stat().st_ino
        assert not waiter._try()
        waiter._break_if_abandoned()
        busy.release()
    assert journal.stat().st_ino == inode


def test_slurm_is_asked_about_a_breaker_and_not_about_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 waiters would ask it about one owner, whose lease ends soon; a breaker has none."""
    asked = []
    monkeypatch.setattr(journal_soft_lock, "slurm_says_over", lambda job: asked.append(job) or True)
    journal = tmp_path / "journal.log"
    dead, breaker = SoftLock(journal, 5), SoftLock(journal, 5)
    elsewhere(dead, job="42")
    elsewhere(breaker, job="43")
    dead.acquire()
    (lock_file,) = tmp_path.glob("journal.lock.*")
    assert create_owned(tmp_path / lock_file.name.replace("lock", "break"), breaker._owner)
    SoftLock(journal, 60, lease_s=0.3).acquire()
    assert asked == ["43"]


def test_whoever_breaks_a_lock_lets_those_go_first_who_have_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another submission sees at once that the one before it has died, and would always be the quickest."""
    pauses = []
    monkeypatch.setattr(journal_soft_lock.time, "sleep", pauses.append)
    monkeypatch.setattr(journal_soft_lock.random, "uniform", lambda low, high: high)
    journal = tmp_path / "journal.log"
    dead = SoftLock(journal, 5)
    dead._owner = dataclasses.replace(dead._owner, start=1)  # an earlier process of the same number
    dead.acquire()
    SoftLock(journal, 5).acquire()
    assert pauses == [journal_soft_lock._PAUSE_AFTER_BREAKING_S]


@pytest.mark.parametrize(
    ("squeue", "over"),
    [
        ("echo COMPLETED", True),
        ("echo NODE_FAIL", True),
        ("echo RUNNING", False),
        ("printf 'COMPLETED\\nRUNNING\\n'", False),
        ("true", False),
        ("exit 1", False),
    ],
)
def test_slurm_must_be_certain_that_a_job_is_over(
    squeue: str, over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\n{squeue}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert journal_soft_lock.slurm_says_over("42") is over


def test_breaker_that_died_is_replaced_by_exactly_one(tmp_path: Path) -> None:
    """It had announced itself and was killed before it renamed anything."""
    journal = tmp_path / "journal.log"
    pid = hold_for_ever(SoftLock, journal)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (lock_file,) = tmp_path.glob("journal.lock.*")
    dead = read_owner(lock_file)
    assert dead is not None
    assert create_owned(tmp_path / lock_file.name.replace("lock", "break"), dead)
    (tmp_path / "number").write_text("0")
    pids = [fork(lambda: count(SoftLock, journal, 20)) for _ in range(5)]
    wait_for_all(pids)
    assert (tmp_path / "number").read_text() == "100"
    assert not list(tmp_path.glob("journal.break.*"))


def test_breaker_that_lives_is_left_its_place(tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    pid = hold_for_ever(SoftLock, journal)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (lock_file,) = tmp_path.glob("journal.lock.*")
    slow = LockOwner(host="other-node")
    assert create_owned(tmp_path / lock_file.name.replace("lock", "break"), slow)
    inode = journal.stat().st_ino
    with pytest.raises(JournalTimeoutError):
        SoftLock(journal, 0.3, lease_s=0.05).acquire()
    assert journal.stat().st_ino == inode


def test_lock_that_was_freed_and_taken_again_is_not_broken_for_its_former_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter saw the former owner, which freed the lock and died before the waiter looked for its process."""
    journal = tmp_path / "journal.log"
    former, owner, waiter = SoftLock(journal, 5), SoftLock(journal, 5), SoftLock(journal, 5)
    former.acquire()
    assert not waiter._try()
    token = former._owner.token
    monkeypatch.setattr(journal_soft_lock, "has_ended_here", lambda other: other.token == token)
    former.release()
    owner.acquire()
    inode = journal.stat().st_ino
    waiter._break_if_abandoned()
    assert journal.stat().st_ino == inode
    owner.confirm()
    assert not list(tmp_path.glob("journal.break.*"))


def test_nobody_confirms_or_takes_a_lock_while_the_journal_is_being_copied(tmp_path: Path) -> None:
    """What is written after the copy would be lost, although its owner still finds the journal in its place."""
    journal = tmp_path / "journal.log"
    owner = SoftLock(journal, 5)
    owner.acquire()
    (lock_file,) = tmp_path.glob("journal.lock.*")
    announcement = tmp_path / lock_file.name.replace("lock", "break")
    assert create_owned(announcement, LockOwner(host="other-node"))
    with pytest.raises(FencedError):
        owner.confirm()
    owner.release()
    with pytest.raises(JournalTimeoutError):
        SoftLock(journal, 0.2).acquire()
    assert not lock_file.exists()
    announcement.unlink()
    owner.acquire()
    owner.confirm()


def test_breaker_that_died_stops_no_owner(tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    owner = SoftLock(journal, 5)
    owner.acquire()
    (lock_file,) = tmp_path.glob("journal.lock.*")
    dead = dataclasses.replace(LockOwner(), start=1)  # an earlier process of the same number
    assert create_owned(tmp_path / lock_file.name.replace("lock", "break"), dead)
    owner.confirm()
    owner.release()
    owner.acquire()


def test_owner_from_a_later_process_of_the_same_number_is_gone() -> None:
    me = LockOwner()
    assert not journal_soft_lock.is_gone(me, {})
    assert journal_soft_lock.is_gone(dataclasses.replace(me, start=1), {})
    assert journal_soft_lock.is_gone(dataclasses.replace(me, boot="before the reboot"), {})
    assert not journal_soft_lock.is_gone(dataclasses.replace(me, start=1, namespace="of a container"), {})
