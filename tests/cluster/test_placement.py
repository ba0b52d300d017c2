"""Placement on the emulated cluster: injected misplacements are told before a trial is taken; the map is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from hpcjobs.paths import StudyPaths
from hpcjobs.study import open_study
from tests.cluster.emulator import Cluster

OBJECTIVE = """\
{header}
def train(params, context):
    {first}
    context.report(0, params["x"])
    return params["x"]
train.parameters = {{"x": {{"type": "float"}}}}
"""
# else one quick worker spends the budget before all others have begun
WAIT_UNTIL_SEVEN_ARE_LEFT_OUT = """
    import time
    while sum(file.read_text().count('"left out"') for file in context.folder.parents[1].glob("nodes/*.json")) < 7:
        time.sleep(0.2)
"""


class Project:
    """A folder with an objective, from which studies are submitted to one node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self.study = cluster, folder, folder / "study"

    def submit(self, *more: str, header: str = "", first: str = "", mode: str = "cpx", trials: int = 70) -> list[str]:
        """Run a study to its end; the states of its job's elements. ``first``: what a trial does first."""
        (self.folder / "my_objective.py").write_text(OBJECTIVE.format(header=header, first=first))
        (self.folder / "search.yaml").write_text(
            "objective: my_objective:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n"
        )
        command = [sys.executable, "-m", "hpcjobs.submit", "--study", "search.yaml", "--cluster", "emulated"]
        command += ["--mode", mode, "--epochs", "1", "--trials", str(trials), "--folder", str(self.study), *more]
        out = self.cluster.run(*command, cwd=self.folder).stdout
        job = next(line for line in out.splitlines() if line.startswith("submitted 1 node as job ")).split()[-1]
        return self.cluster.wait_for_job(job, 1200)

    def trials_begun(self) -> int:
        trials = open_study(StudyPaths(self.study)).trials()
        return sum(trial.state != TrialState.WAITING for trial in trials)

    def node(self) -> Any:
        (path,) = (self.study / "nodes").glob("*.json")
        return json.loads(path.read_bytes())

    def messages(self) -> set[str]:
        return {worker["message"] for worker in self.node()["workers"]}


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path) -> Project:
    return Project(cluster, tmp_path)


@pytest.mark.slow
def test_a_cpx_node_with_63_logical_gpus_runs_63_workers_each_on_its_own(project: Project) -> None:
    for node in project.cluster.nodes:
        project.cluster.gpus(node).inject(hide_last=1)
    assert project.submit() == ["COMPLETED"]
    (path,) = (project.study / "logs").glob("*/placement.json")
    placement = json.loads(path.read_bytes())
    assert len(placement["gpus"]) == len(placement["workers"]) == 63
    assert len({worker["device"] for worker in placement["workers"]}) == 63
    identities = {gpu["identity"] for gpu in placement["gpus"].values()}
    assert len(identities) == 63
    assert project.trials_begun() == 70


def test_a_node_that_is_silently_in_spx_takes_no_trial(project: Project) -> None:
    # after the prolog and before the agent: as if somebody had switched the node under the job
    state = f"{project.cluster.at.gpus}/$SLURMD_NODENAME.state"
    states = project.submit("--set", f"setup=[\"sed -i 's/CPX/SPX/' {state}\"]", trials=5)
    assert states == ["FAILED"]
    assert "the GPUs are in mode spx, the study asks for cpx" in project.node()["message"]
    assert project.trials_begun() == 0


def test_workers_whose_profile_sets_a_second_variable_take_no_trial(project: Project) -> None:
    states = project.submit("--set", 'environment={HIP_VISIBLE_DEVICES: "0"}', mode="spx", trials=5)
    assert states == ["FAILED"]
    (message, *_) = project.messages()
    assert "exactly one of ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES must be set" in message
    assert project.trials_begun() == 0


def test_an_objective_that_puts_all_workers_on_one_device_leaves_only_the_rightful_one(project: Project) -> None:
    states = project.submit(
        header="import os; os.environ['ROCR_VISIBLE_DEVICES'] = '0'", first=WAIT_UNTIL_SEVEN_ARE_LEFT_OUT,
        mode="spx", trials=5,
    )  # fmt: skip  # worker 0 is where it should be, and does all the work
    assert states == ["COMPLETED"]
    messages = project.messages()
    expected = (
        "importing the objective changed the visible device from ROCR_VISIBLE_DEVICES=5 to ROCR_VISIBLE_DEVICES=0"
    )
    assert expected in messages
    assert {worker["worker"] for worker in project.node()["workers"] if worker["state"] == "left out"} == set(
        range(1, 8)
    )


def test_workers_that_see_fewer_cpus_than_planned_take_no_trial(project: Project) -> None:
    header = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    states = project.submit("--workers", "1", header=header, mode="spx", trials=3)
    assert states == ["FAILED"]
    assert any("importing the objective changed the CPUs of this process" in message for message in project.messages())
    assert project.trials_begun() == 0
