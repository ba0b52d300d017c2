"""Nodes that are lost, come back or stand still, and a person who changes her mind. All else is in the chaos run."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcjobs.failures import FailureClass
from hpcjobs.heartbeat import read_nodes
from tests.cluster.chaos import faults
from tests.cluster.chaos.checker import check
from tests.cluster.chaos.ledger import RUNNING, WAITING
from tests.cluster.chaos.processes import Injected
from tests.cluster.chaos.world import World, go_on_with
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import Cluster


@pytest.fixture
def begin(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Starts a study of light trials on two nodes; all its claims are checked after the test."""
    worlds = []

    def start(trials: int, **settings: float) -> World:
        chosen = {"nodes": 2, "workers": 2, "timeout_min": 30, **settings}
        world = World(cluster, tmp_path / str(len(worlds)), random.Random(0), **chosen)  # type: ignore[arg-type]
        worlds.append(world)
        world.begin(trials, "kernel")
        return world

    yield start
    for world in worlds:
        world.end()


def begun(world: World) -> None:
    wait_until(lambda: sum(bool(trial.reports) for trial in world.ledger.trials) >= 2, "the first reports")


def finish(world: World) -> None:
    """Let the study run to its end and check all that a study promises."""
    wait_until(lambda: not world.ledger.left, "the study to end", 400)
    fixed = {"base": 0.1, "step_s": world.step_s}
    verdict = check(world.paths.journal, world.diary, budget=world.budget, fixed=fixed, epochs=world.epochs)
    assert verdict.holds, verdict.wrong


def stopped_trials(world: World, pids: list[int]) -> list[int]:
    """Numbers of the running trials whose owners are these processes. They stand still, so nobody else ends them."""
    return [trial.number for trial in world.ledger.left if trial.state == RUNNING and trial.owner["pid"] in pids]


def test_trials_of_a_node_that_is_cut_off_go_on_elsewhere_and_its_return_does_no_harm(
    begin: Callable[..., World],
) -> None:
    """Slurm calls it down and starts its job elsewhere. Then its processes wake up and believe that they own trials."""
    world = begin(8, step_s=0.6)
    begun(world)
    cut_off: Injected | None = None
    owned: list[int] = []
    while not owned:  # a node whose workers are all between two trials just then is let go again
        if cut_off is not None and cut_off.undo is not None:
            cut_off.undo()
        cut_off = faults.cut_off_node(world)
        owned = stopped_trials(world, cut_off.victims) if cut_off is not None else []
    begin_s = time.monotonic()

    def recovered() -> bool:
        return all(world.ledger.successors(number) for number in owned)

    wait_until(recovered, "the recovery of all trials")
    print(f"recovered after {time.monotonic() - begin_s:.0f} s")
    time.sleep(10)  # long enough for the job to run on another node
    assert cut_off is not None and cut_off.undo is not None
    cut_off.undo()
    finish(world)
    failures = [world.ledger.trials[number].failure or {} for number in owned]
    assert {failure.get("class") for failure in failures} == {FailureClass.NODE.value}


def test_a_node_that_only_stands_still_keeps_its_trials(begin: Callable[..., World]) -> None:
    """Its heartbeat is old, but Slurm says that the job runs: a live trial is never taken away."""
    world = begin(6, step_s=0.6)
    begun(world)
    stopped: list[int] = []
    owned: list[int] = []
    try:
        while not owned:  # workers that are all between two trials just then go on again
            for pid in stopped:
                go_on_with(pid)
            agent = world.agents()[0]
            workers = [worker.pid for where, worker in world.live_workers() if where.node == agent.node]
            stopped = world.stand_still([*workers, agent.pid])
            owned = stopped_trials(world, stopped)
        time.sleep(32)  # longer than a heartbeat may be old
        assert stopped_trials(world, stopped) == owned
    finally:
        for pid in stopped:
            go_on_with(pid)
    finish(world)
    assert not [trial for trial in world.ledger.trials if trial.history]


def test_a_cancelled_study_hands_back_and_goes_on_when_it_is_resumed(begin: Callable[..., World]) -> None:
    world = begin(4, step_s=1.2)  # one trial per worker, which lasts longer than the command takes to start
    begun(world)
    done = world.cluster.run(sys.executable, "-m", "hpcjobs.cancel", str(world.paths.folder))
    assert "to go on: python -m hpcjobs.submit --resume" in done.stdout
    wait_until(lambda: {trial.state for trial in world.ledger.left} == {WAITING}, "all trials to be handed back")
    assert any(trial.reports for trial in world.ledger.left), "trials keep their reports"
    world.submit("--resume", str(world.paths.folder), "--nodes", "2")
    finish(world)


def test_a_job_whose_steps_were_told_to_stop_is_queued_again_and_goes_on(begin: Callable[..., World]) -> None:
    """As before a time limit: Slurm tells the steps alone, and each of them takes its own time."""
    world = begin(2, nodes=1, step_s=0.6)
    begun(world)
    (agent,) = world.agents()
    world.cluster.run("scancel", "--signal=USR2", agent.element.partition("_")[0])
    wait_until(lambda: any(report.run == 1 for report in read_nodes(world.paths)), "the element to run again")
    finish(world)
    assert not [trial for trial in world.ledger.trials if trial.history], "they were handed back in order"
