"""The faults: each is done for real to a running study, and tells whom it hit and by what it is known to have happened.

A fault returns None where it is not possible now (no such process, the disk is full); another one is then drawn.
"""

from __future__ import annotations

import time

from tests.cluster.chaos import processes, storage
from tests.cluster.chaos.processes import Fault, Injected
from tests.cluster.chaos.world import World, go_on_with, kill


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
    stopped = world.stand_still(pids)
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
    codes = [submission.wait(timeout=400) for submission in submissions]
    assert codes == [0, 0], f"resuming twice at once ended with {codes}; see {world.folder / 'submit.log'}"
    world.budget += sum(more)
    return Injected(f"{more[0]} and {more[1]} trials were added at once")


def kill_submission(world: World) -> Injected | None:
    """Trials are added all or not at all, whenever the command is killed."""
    if world.disk_full:
        return None
    more, before = world.rng.randrange(2, 9), world.ledger.asked
    submission = world.submit_in_background("--resume", str(world.paths.folder), "--nodes=1", "--trials", f"+{more}")
    time.sleep(world.rng.uniform(0.5, 3.0))
    submission.kill()
    submission.wait()
    added = world.ledger.asked - before
    assert added in (0, more), f"a killed submission of {more} trials added {added}"
    world.budget += added
    return Injected(f"submit was killed; {added} of {more} trials were added")


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


#: Every fault with how often it is drawn, as a weight.
FAULTS: dict[Fault, int] = {
    processes.kill_worker: 30,
    processes.kill_lock_holder: 12,
    processes.kill_srun: 5,
    processes.kill_step_daemon: 4,
    processes.kill_agent: 3,
    processes.stop_worker: 7,
    processes.stop_agent: 3,
    processes.stop_lock_holder: 4,
    processes.stop_lock_holder_beyond_lease: 1,
    storage.torn_append: 9,
    storage.nul_append: 6,
    storage.nul_append_with_newline: 3,
    storage.torn_append_without_lock: 5,
    storage.garbage_line: 3,
    storage.full_disk: 3,
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
    kill_submission: 1,
}
