"""The faults: each is done for real to a running study, and tells whom it hit and by what it is known to have happened.

A fault returns None where it is not possible now (no such process, the disk is full); another one is then drawn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.chaos.world import World, go_on_with, kill, parent, process_state, stop


@dataclass
class Injected:
    """``victims``: processes that it killed or stopped. ``undo``, due after ``undo_after_s``, returns evidence."""

    evidence: str
    victims: list[int] = field(default_factory=list)
    undo: Callable[[], str] | None = None
    undo_after_s: float = 0.0
    damage: int = 0  # bytes put into the journal that are no record


Fault = Callable[[World], Injected | None]


# ---- processes ----


def kill_worker(world: World) -> Injected | None:
    workers = [worker for _, worker in world.live_workers() if worker.trial is not None]
    if not workers:
        return None
    worker = world.rng.choice(workers)
    return Injected(f"process {worker.pid} is gone", [worker.pid]) if kill(worker.pid) else None


def kill_lock_holder(world: World) -> Injected | None:
    """Stopped first, so that it surely holds the lock when it dies."""
    pid = world.holder()
    if pid is None:
        return None
    kill(pid)
    return Injected(f"process {pid} held the lock and is gone", [pid])


def kill_agent(world: World) -> Injected | None:
    """Its workers hand their trials back; the user adds a node in its place."""
    agents = [agent for agent in world.agents() if agent.state == "running"]
    if len(agents) < world.nodes:
        return None
    agent = world.rng.choice(agents)
    return Injected(f"process {agent.pid} is gone", [agent.pid]) if kill(agent.pid) else None


def kill_srun(world: World) -> Injected | None:
    """The client of a step dies alone; the agent must not leave its worker running."""
    agents = {agent.pid for agent in world.agents() if agent.state == "running"}
    clients = [pid for pid in _pids() if parent(pid) in agents and _name(pid) == "srun"]
    if not clients:
        return None
    pid = world.rng.choice(clients)
    return Injected(f"srun {pid} is gone", [pid]) if kill(pid) else None


def kill_step_daemon(world: World) -> Injected | None:
    """slurmstepd of one step dies: its srun hangs, its worker lives on or is ended."""
    daemons = {parent(worker.pid) for _, worker in world.live_workers()}
    daemons = {pid for pid in daemons if _name(pid).startswith("slurmstepd")}
    if not daemons:
        return None
    pid = world.rng.choice(sorted(daemons))
    return Injected(f"slurmstepd {pid} is gone", [pid]) if kill(pid) else None


def stop_worker(world: World) -> Injected | None:
    workers = [worker for _, worker in world.live_workers() if worker.trial is not None]
    return _stop(world.rng.choice(workers).pid, world.rng.uniform(1, 30)) if workers else None


def stop_agent(world: World) -> Injected | None:
    """Longer than a heartbeat may be old, and than the guardian's lease."""
    agents = [agent for agent in world.agents() if agent.state == "running"]
    return _stop(world.rng.choice(agents).pid, world.rng.uniform(22, 32)) if agents else None


def stop_lock_holder(world: World) -> Injected | None:
    """Everybody waits: a kernel lock is not broken, a soft one only after its lease of a minute."""
    pid = world.holder()
    return _stop(pid, world.rng.uniform(2, 6)) if pid else None


def stop_lock_holder_beyond_lease(world: World) -> Injected | None:
    """Only where the lock is a file: it is broken meanwhile, and the former holder must find itself fenced."""
    if "soft" not in world.paths.journal.with_suffix(".locking").read_text():
        return None
    pid = world.holder()
    return _stop(pid, 66.0) if pid else None


def _stop(pid: int, seconds: float) -> Injected | None:
    if not stop(pid):
        return None

    def go_on() -> str:
        state = process_state(pid)
        go_on_with(pid)
        return f"went on after {seconds:.0f} s" if state == "T" else "was ended meanwhile"

    return Injected(f"process {pid} was stopped", [pid], go_on, seconds)


# ---- the journal and its disk ----

_WRITER = """\
import os, signal, sys
from pathlib import Path
from hpcjobs.journal_file import lock_for
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


# ---- Slurm ----


def kill_slurmd(world: World) -> Injected | None:
    node = _quiet_node(world)
    if node is None:
        return None
    world.cluster.kill_slurmd(node)
    world.busy_nodes.add(node)

    def start() -> str:
        world.cluster.start_slurmd(node)
        world.busy_nodes.discard(node)
        return f"slurmd of {node} was started again"

    return Injected(f"slurmd of {node} is gone", undo=start, undo_after_s=world.rng.uniform(0, 6))


def kill_slurmctld(world: World) -> Injected | None:
    """What it had not saved is lost: jobs of the last seconds, and it learns anew what runs on the nodes."""
    world.cluster.kill_slurmctld()
    world.cluster.start_slurmctld()
    return Injected("slurmctld was killed and answers again")


def restart_slurmctld(world: World) -> Injected | None:
    world.cluster.restart_slurmctld()
    return Injected("slurmctld was ended and answers again")


def requeue_element(world: World) -> Injected | None:
    element = _running_element(world)
    if element is None:
        return None
    pids = [agent.pid for agent in world.agents() if agent.element == element]
    done = world.cluster.run("scontrol", "requeue", element, check=False)
    return Injected(f"{element} was queued again", pids) if done.returncode == 0 else None


def cancel_element(world: World) -> Injected | None:
    element = _running_element(world)
    if element is None:
        return None
    pids = [agent.pid for agent in world.agents() if agent.element == element]
    world.cluster.run("scancel", element)
    return Injected(f"{element} was cancelled", pids)


def node_down(world: World) -> Injected | None:
    node = _quiet_node(world)
    if node is None:
        return None
    world.cluster.down(node)
    state = world.cluster.state_of(node)
    world.busy_nodes.add(node)

    def back() -> str:
        world.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        world.busy_nodes.discard(node)
        return f"{node} was resumed"

    return Injected(f"{node} is {state}", undo=back, undo_after_s=world.rng.uniform(3, 10))


def cut_off_node(world: World) -> Injected | None:
    """A node is taken for lost and its job runs elsewhere; then it is back, with all its processes where they were."""
    node = _quiet_node(world)
    if node is None:
        return None
    pids = [worker.pid for agent, worker in world.live_workers() if agent.node == node]
    pids += [agent.pid for agent in world.agents() if agent.node == node]
    if not pids:
        return None
    world.busy_nodes.add(node)
    world.cluster.kill_slurmd(node)  # first, so that nobody there is told to end anything
    stopped = [pid for pid in pids if stop(pid)]
    while (
        holder := world.lock_holder()
    ) is not None and holder in stopped:  # a filesystem takes locks from a node that it does not hear
        go_on_with(holder)
        time.sleep(0.01)
        stop(holder)
    world.cluster.down(node)

    def back() -> str:
        for pid in stopped:
            go_on_with(pid)
        world.cluster.start_slurmd(node)
        world.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        world.busy_nodes.discard(node)
        return f"{node} is back with {len(stopped)} processes"

    return Injected(f"{node} was cut off", stopped, back, world.rng.uniform(15, 40))


def steps_cannot_start(world: World) -> Injected | None:
    """srun fails on a node for a while, and a worker there has to be started again."""
    workers = [(node, worker) for node, worker in world.live_workers() if worker.trial is not None]
    if not workers:
        return None
    node, worker = world.rng.choice(workers)
    flag = world.folder / f"no-steps-{node.node}"
    refused = world.folder / "refused-steps"
    flag.touch()
    before = len(refused.read_text().splitlines()) if refused.exists() else 0
    if not kill(worker.pid):
        flag.unlink()
        return None

    def allow() -> str:
        flag.unlink(missing_ok=True)
        after = len(refused.read_text().splitlines()) if refused.exists() else 0
        return f"{after - before} steps were refused"

    return Injected(f"worker {worker.pid} is gone", [worker.pid], allow, world.rng.uniform(2, 5))


# ---- clocks and people ----


def skew_clock(world: World) -> Injected | None:
    """The next agent on a node, with all its workers, has a wrong clock. munge refuses messages of five minutes."""
    element = _running_element(world)
    if element is None:
        return None
    node = world.queue()[element][1]
    offset = world.rng.choice([-1, 1]) * world.rng.randrange(20, 150)
    (world.folder / f"skew-{node}").write_text(f"export LD_PRELOAD={world.clock} SKEW_S={offset}\n")
    world.cluster.run("scontrol", "requeue", element, check=False)
    return Injected(f"clock of {node} is wrong by {offset} s from its next job on")


def two_submissions_at_once(world: World) -> Injected | None:
    if world.disk_full:
        return None
    more = [world.rng.randrange(1, 6) for _ in range(2)]
    submissions = [
        world.submit_in_background("--resume", str(world.paths.folder), "--nodes", "1", "--trials", f"+{n}")
        for n in more
    ]
    codes = [submission.wait(timeout=120) for submission in submissions]
    assert codes == [0, 0], f"resuming twice at once ended with {codes}; see {world.folder / 'submit.log'}"
    world.budget += sum(more)
    return Injected(f"{more[0]} and {more[1]} trials were added at once")


def _running_element(world: World) -> str | None:
    running = {agent.element for agent in world.agents() if agent.state == "running"}
    elements = [e for e, (state, node, _) in world.queue().items() if state == "RUNNING" and e in running]
    return world.rng.choice(elements) if elements else None


def _quiet_node(world: World) -> str | None:
    """A node whose slurmd may be interrupted now."""
    nodes = [node for node in world.cluster.nodes if node not in world.busy_nodes]
    node = world.rng.choice(nodes) if nodes else None
    if node is None or world.is_prolog_running(node):
        return None
    return node


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


#: Every fault with how often it is drawn, as a weight.
FAULTS: dict[Fault, int] = {
    kill_worker: 30,
    kill_lock_holder: 12,
    kill_srun: 5,
    kill_step_daemon: 4,
    kill_agent: 3,
    stop_worker: 7,
    stop_agent: 3,
    stop_lock_holder: 4,
    stop_lock_holder_beyond_lease: 1,
    torn_append: 9,
    nul_append: 6,
    nul_append_with_newline: 3,
    torn_append_without_lock: 5,
    garbage_line: 3,
    full_disk: 3,
    kill_slurmd: 3,
    restart_slurmctld: 1,
    kill_slurmctld: 1,
    requeue_element: 3,
    cancel_element: 2,
    node_down: 2,
    cut_off_node: 2,
    steps_cannot_start: 4,
    skew_clock: 1,
    two_submissions_at_once: 1,
}
