"""Studies that grow while they run: more nodes, more trials, two people at once, arrays longer than the site allows."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcjobs.launch import recorded
from tests.cluster.chaos.checker import check
from tests.cluster.chaos.world import World
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import Cluster


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> Iterator[World]:
    world = World(cluster, tmp_path / "growing", random.Random(0), nodes=1, workers=2, step_s=0.2, timeout_min=30)
    world.begin(6, "kernel")
    yield world
    world.end()


def finish(world: World) -> None:
    wait_until(lambda: not world.ledger.left, "the study to end", 400)
    fixed = {"base": 0.1, "step_s": world.step_s}
    verdict = check(world.paths.journal, world.diary, budget=world.budget, fixed=fixed, epochs=world.epochs)
    assert verdict.holds, verdict.wrong


def test_two_people_add_nodes_and_trials_to_a_running_study(world: World, cluster: Cluster) -> None:
    wait_until(lambda: any(trial.reports for trial in world.ledger.trials), "the first report")
    folder = str(world.paths.folder)
    # a site whose arrays may have two elements at most: three nodes are two arrays
    large = world.submit_in_background("--resume", folder, "--nodes=3", "--trials=+7", "--set", "max_array_size=2")
    small = world.submit_in_background("--resume", folder, "--nodes=1", "--trials=+5")
    assert [large.wait(400), small.wait(400)] == [0, 0]
    world.budget += 12
    finish(world)
    arrays = sorted(launched.elements for launched in recorded(world.paths))
    assert arrays == [1, 1, 1, 2], "one array at first, then two for three nodes and one more, each with its record"
    # where all else on this machine is busy the first node may be done before the others are up
    wait_until(lambda: len(list(world.paths.nodes.glob("*.json"))) == 5, "the added nodes to take part")


def test_cancel_finds_the_job_of_a_submission_that_was_killed_right_after_it(world: World, cluster: Cluster) -> None:
    """It has left no record of its job, which waits in the queue and would need a node for nothing."""
    sbatch = world.folder / "bin" / "sbatch"
    sbatch.write_text('#!/bin/sh\n/usr/bin/sbatch --hold "$@"\nkill -9 $PPID\n')
    sbatch.chmod(0o755)
    before = len(recorded(world.paths))
    environment = {"PATH": f"{sbatch.parent}:{cluster.env['PATH']}"}
    command = [sys.executable, "-m", "hpcjobs.submit", "--resume", str(world.paths.folder), "--nodes=2"]
    killed = cluster.run(*command, cwd=world.folder, check=False, **environment)
    assert killed.returncode == -signal.SIGKILL
    assert len(recorded(world.paths)) == before
    waiting = {element for element, (_, _, reason) in world.queue().items() if "Held" in reason}
    assert len(waiting) == 2
    cluster.run("sbatch", "--hold", "--partition=gpu", "--wrap=true")  # of another study
    cluster.run(sys.executable, "-m", "hpcjobs.cancel", str(world.paths.folder), cwd=world.folder)
    wait_until(lambda: waiting.isdisjoint(world.queue()), "the held job to leave the queue")
    assert [reason for _, _, reason in world.queue().values() if "Held" in reason] == ["JobHeldUser"]


def test_cancel_of_a_copied_study_leaves_the_originals_job_alone(world: World, cluster: Cluster) -> None:
    wait_until(lambda: any(trial.reports for trial in world.ledger.trials), "the first report")
    (job,) = (job for launched in recorded(world.paths) for job in launched.job_ids)
    copy = shutil.copytree(world.paths.folder, world.folder / "copy")
    told = cluster.run(sys.executable, "-m", "hpcjobs.cancel", str(copy), cwd=world.folder).stdout
    assert f"left alone: job {job}, which a record in this folder names" in told
    assert cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout.strip() == "RUNNING"
    finish(world)


def test_an_element_that_slurm_queues_again_is_shown_only_in_the_queue(world: World, cluster: Cluster) -> None:
    def told() -> tuple[list[str], dict[str, int]]:
        command = [sys.executable, "-m", "hpcjobs.status", str(world.paths.folder), "--json"]
        found = json.loads(cluster.run(*command, cwd=world.folder).stdout)
        return [line["report"]["element"] for line in found["nodes"]], found["queue"]

    wait_until(lambda: any(trial.reports for trial in world.ledger.trials), "the first report")
    (element,), queue = told()
    assert queue == {}
    # one node is a job without an array, and shown by what scontrol takes
    cluster.run("scontrol", "requeuehold", element)
    wait_until(lambda: told() == ([], {"job requeued in held state": 1}), "the element to wait in the queue")
    cluster.run("scontrol", "release", element)
    finish(world)
    assert told() == ([element], {})
