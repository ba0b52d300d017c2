"""Studies on the emulated cluster that are cut short, killed and preempted: nothing is lost and nothing doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState

from hpcjobs.budget import count
from hpcjobs.heartbeat import NodeReport, read_nodes
from hpcjobs.paths import StudyPaths
from hpcjobs.study import OpenStudy, open_study
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import Cluster

OBJECTIVES = Path(__file__).parents[1] / "hpcjobs"


class Runs:
    """A study of objectives.py that was submitted to the cluster."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str, epoch_s: float, epochs: int) -> None:
        search = folder / "search.yaml"
        search.write_text(
            "objective: objectives:epochs\ndirection: minimize\n"
            f"parameters: {{x: {{type: uniform, min: 0, max: 1}}}}\nfixed: {{epoch_s: {epoch_s}}}\n"
        )
        self.paths = StudyPaths(folder / "study")
        command = [sys.executable, "-m", "hpcjobs.submit", "--study", str(search), "--cluster", "emulated"]
        where = ["--folder", str(self.paths.folder), "--epochs", str(epochs), "--workers", "2"]
        cluster.run(*command, *where, *options, cwd=OBJECTIVES)
        self.study: OpenStudy = open_study(self.paths)
        self.epochs = epochs

    @property
    def nodes(self) -> list[NodeReport]:
        return read_nodes(self.paths)

    def all_busy(self, nodes: int) -> bool:
        busy = [worker for node in self.nodes for worker in node.workers if worker.state == "running" and worker.epoch]
        return len(busy) == 2 * nodes

    def wait(self, timeout_s: float) -> None:
        wait_until(lambda: count(self.study).left == 0, f"the end of the study in {self.paths.folder}", timeout_s)

    def lineage(self, trial: FrozenTrial) -> list[int]:
        return [*trial.system_attrs.get("retry_history", []), trial.number]

    def check(self, budget: int) -> None:
        """The budget is exact and every learning curve is whole: each epoch once, in order, also over recoveries."""
        counts = count(self.study)
        assert (counts.completed, counts.failed, counts.budget) == (budget, 0, budget)
        completed = self.study.trials((TrialState.COMPLETE,))
        assert len({self.lineage(trial)[0] for trial in completed}) == budget
        for trial in completed:
            lines = (self.paths.trial(trial.number) / "curve.csv").read_text().splitlines()[1:]
            assert [int(line.split(",")[0]) for line in lines] == list(range(1, self.epochs + 1))
            assert sorted(trial.intermediate_values) == list(range(1, self.epochs + 1))


@pytest.mark.slow
def test_trials_longer_than_a_job_complete_over_several_requeues(cluster: Cluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, "--timeout-min", "1", "--trials", "2", epoch_s=0.5, epochs=120)
    runs.wait(240)
    runs.check(2)
    assert count(runs.study).recovered == 0  # all was handed back in order, nothing had to be recovered
    (log,) = runs.paths.logs.glob("*/node.log")
    assert log.read_text().count("queued again") >= 1


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def srun_of(job: str, step: int) -> int:
    found = subprocess.run(["pgrep", "-f", f"srun .*{job}.*--worker {step}"], capture_output=True, text=True)
    return int(found.stdout.split()[0])


@pytest.mark.slow
def test_killed_workers_agents_and_sruns_and_lost_nodes_cost_nothing(cluster: Cluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, "--nodes", "4", "--trials", "12", epoch_s=0.3, epochs=50)
    wait_until(lambda: runs.all_busy(4), "eight busy workers", 60)
    nodes: dict[str, Any] = {node.element: node for node in runs.nodes}
    elements = sorted(nodes)
    kill(nodes[elements[0]].pid)
    kill(nodes[elements[1]].workers[0].pid)
    kill(srun_of(elements[2], 1))
    cluster.down(nodes[elements[3]].node)
    begin = time.monotonic()
    wait_until(lambda: any("retry_history" in t.system_attrs for t in runs.study.trials()), "a recovery", 60)
    assert time.monotonic() - begin < 60
    cluster.resume(nodes[elements[3]].node)
    runs.wait(180)
    runs.check(12)


@pytest.mark.slow
def test_a_preempted_study_goes_on_and_a_cancelled_one_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    runs = Runs(cluster, tmp_path, "--trials", "3", epoch_s=0.3, epochs=60)
    wait_until(lambda: runs.all_busy(1), "two busy workers", 60)
    (node,) = runs.nodes
    cluster.run("srun", "-p", "urgent", "-w", node.node, "--exclusive", "true", timeout_s=60)
    wait_until(lambda: runs.all_busy(1) and runs.nodes[0].agent != node.agent, "the study to go on", 90)
    assert all(trial.intermediate_values for trial in runs.study.trials()[:2])
    cluster.run(sys.executable, "-m", "hpcjobs.cancel", str(runs.paths.folder))
    wait_until(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), "the job to end", 60)
    counts = count(runs.study)
    assert (counts.waiting, counts.running, counts.recovered) == (3, 0, 0)
    cluster.run(sys.executable, "-m", "hpcjobs.submit", "--resume", str(runs.paths.folder), cwd=OBJECTIVES)
    runs.wait(120)
    runs.check(3)
