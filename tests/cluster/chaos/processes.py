"""Faults of processes: killed, or stopped and going on."""

from __future__ import annotations

import contextlib
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
    """Everybody waits: a kernel lock is not broken, a soft one after its lease of 5 s."""
    pid = world.holder()
    return _stop(pid, world.rng.uniform(2, 6)) if pid else None


def stop_lock_holder_beyond_lease(world: World) -> Injected | None:
    """Only where the lock is a file: it is broken meanwhile, and the former holder must find itself fenced."""
    if "soft" not in world.paths.journal.with_suffix(".locking").read_text():
        return None
    pid = world.holder()
    return _stop(pid, 16.0) if pid else None


def _stop(pid: int, seconds: float) -> Injected | None:
    if not stop(pid):
        return None

    def go_on() -> str:
        state = process_state(pid)
        go_on_with(pid)
        return f"went on after {seconds:.0f} s" if state == "T" else "was ended meanwhile"

    return Injected(f"process {pid} was stopped", [pid], go_on, seconds)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
