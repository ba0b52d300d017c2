"""Jobs shorter than their trials: studies go on over requeues and preemptions, every schedule unbroken.

Slurm counts time limits in minutes. A limit of one minute, of which the last fifteen seconds are for handing back,
leaves trials at most forty-five seconds of each job, and few where all starts slowly. Both studies run side by side,
since most of the time is waiting.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.chaos.checker import Verdict, check, read_diary
from tests.cluster.chaos.world import World
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import Cluster


@pytest.fixture(scope="module")
def studies(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, World]]:
    """One study with jobs of a minute, and one with jobs of eight minutes, whose node is then taken from it."""
    session_cluster.reset()
    folder: Path = tmp_path_factory.mktemp("requeue")
    short = World(session_cluster, folder / "short", random.Random(0), 2, 2, epochs=36, step_s=0.3, timeout_min=1)
    preempted = World(session_cluster, folder / "long", random.Random(0), 1, 2, epochs=12, step_s=0.6, timeout_min=8)
    for world, trials in ((short, 4), (preempted, 4)):
        world.begin(trials, "kernel")
    wait_until(lambda: any(trial.reports for trial in preempted.ledger.trials), "the first report")
    (agent,) = preempted.agents()
    options = ["--partition=urgent", "--exclusive", f"--nodelist={agent.node}", "--wrap", "sleep 1"]
    job = session_cluster.run("sbatch", "--parsable", *options).stdout.strip()
    assert session_cluster.wait_for_job(job) == ["COMPLETED"]
    yield short, preempted
    for world in (short, preempted):
        world.end()


def finished(world: World, timeout_s: float) -> Verdict:
    """Wait until the study has ended; what the checker says of it."""
    wait_until(lambda: not world.ledger.left, "the study to end", timeout_s)
    fixed = {"base": 0.1, "step_s": world.step_s}
    return check(world.paths.journal, world.diary, budget=world.budget, fixed=fixed, epochs=world.epochs)


def steps_begun_at(world: World) -> dict[int, list[int]]:
    """By the trial's number, the step at which each of its runs began."""
    runs: dict[int, list[int]] = defaultdict(list)
    for line in read_diary(world.diary):
        if line["what"] == "begin":
            runs[line["number"]].append(line["step"])
    return runs


def states(world: World) -> list[str]:
    (element,) = {path.stem for path in world.paths.nodes.glob("*.json")}
    return [record["State"] for record in world.cluster.sacct(element.partition("_")[0], "JobID", "State")]


def test_a_job_of_eight_minutes_is_preempted_and_goes_on(studies: tuple[World, World]) -> None:
    """submitit takes every job of up to ten minutes for timed out when it is told to stop, and would end it."""
    world = studies[1]
    verdict = finished(world, 400)
    assert verdict.holds, verdict.wrong
    assert verdict.figures["recovered"] == 0, "handed back in order, nothing had to be recovered"
    assert any(state in ("PREEMPTED", "REQUEUED") for state in states(world))
    assert any(len(steps) > 1 for steps in steps_begun_at(world).values()), "no trial was interrupted"


def test_trials_longer_than_a_job_complete_over_several_requeues(studies: tuple[World, World]) -> None:
    world = studies[0]
    verdict = finished(world, 800)
    assert verdict.holds, verdict.wrong
    assert verdict.figures["recovered"] == 0, "each trial kept its number, and no step was done twice"
    runs: dict[int, Any] = {
        number: steps for number, steps in steps_begun_at(world).items() if world.ledger.trials[number].state == 1
    }
    assert runs, "no trial completed"
    for steps in runs.values():
        assert len(set(steps)) >= 2, "a trial of 54 s does not fit into what trials get of a minute"
        assert steps[0] == 0
        # a run that was told to stop as soon as it had begun has done no step
        assert all(earlier <= later for earlier, later in itertools.pairwise(steps))
