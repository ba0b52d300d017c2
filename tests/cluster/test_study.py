"""A whole study over four nodes, proved from what the nodes, Slurm and the journal recorded by themselves."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hpcjobs.paths import StudyPaths
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import Cluster

NODES, GPUS_IN_DPX, TRIALS = 4, 16, 48

# every trial holds until all workers have begun: otherwise the first ones would do all the work
OBJECTIVE = f"""\
import os
import time


def train(params, context):
    names = [f"{{name}}={{value}}" for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")]
    (context.folder / "devices").write_text(f"{{' '.join(names)}} {{context.device}}")
    logs = context.folder.parents[1] / "logs"
    for _ in range(2000):
        if len(list(logs.glob("*/worker_*.log"))) == {NODES * GPUS_IN_DPX}:
            return params["x"]
        time.sleep(0.5)
    raise TimeoutError("not all workers have begun")
"""


@dataclass(frozen=True)
class Run:
    """A study that has ended: its folder, its array job and the records of accounting."""

    cluster: Cluster
    paths: StudyPaths
    records: list[dict[str, str]]

    @property
    def elements(self) -> dict[str, str]:
        """The job id of each array element, as prologs see it, and its node."""
        return {r["JobIDRaw"]: r["NodeList"] for r in self.records if "." not in r["JobID"]}


@pytest.fixture(scope="module")
def run(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    session_cluster.reset()
    folder = tmp_path_factory.mktemp("study")
    search = folder / "search.yaml"
    (folder / "holding.py").write_text(OBJECTIVE)
    search.write_text("objective: holding:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n")
    options = ["--nodes", str(NODES), "--mode", "dpx", "--trials", str(TRIALS), "--epochs", "1", "--wait"]
    out = session_cluster.run(
        sys.executable, "-m", "hpcjobs.submit", "--study", str(search), "--cluster", "emulated",
        "--folder", str(folder / "study"), *options, cwd=folder, timeout_s=1200,
    ).stdout  # fmt: skip
    job = re.findall(r"submitted 4 nodes as job (\d+)", out)[0]
    assert session_cluster.wait_for_job(job) == ["COMPLETED"] * NODES
    wait_until(lambda: all(session_cluster.state_of(node) == "idle" for node in session_cluster.nodes), "the epilogs")
    return Run(
        session_cluster,
        StudyPaths(folder / "study"),
        session_cluster.sacct(job, "JobID", "JobIDRaw", "State", "NodeList"),
    )


def test_each_prolog_set_the_mode_and_each_epilog_restored_spx(run: Run) -> None:
    assert sorted(run.elements.values()) == run.cluster.nodes
    for job, node in run.elements.items():
        gpus = run.cluster.gpus(node)
        switches = [(call.gpu, call.asked) for call in gpus.log() if call.job == job and call.answer == 0]
        assert switches == [(gpu, mode) for mode in ("DPX", "SPX") for gpu in range(8)]
        assert gpus.modes() == {"SPX"}
        log = [line for line in run.cluster.at.mode_log.read_text().splitlines() if f" {node} job {job} " in line]
        assert [re.sub(r".* (prolog|epilog): INFO (mode \w+) .*", r"\1 \2", line) for line in log] == [
            "prolog mode dpx", "epilog mode spx",
        ]  # fmt: skip


def test_each_worker_had_one_device_of_its_own(run: Run) -> None:
    devices = defaultdict(list)
    for path in run.paths.logs.glob("*/worker_*.log"):
        devices[path.parent.name] += re.findall(r"worker \d+ of \S+, process \d+, device (.+)", path.read_text())
    assert len(devices) == NODES
    assert all(sorted(found) == sorted(f"GPU {i}" for i in range(GPUS_IN_DPX)) for found in devices.values())


def test_each_trial_saw_exactly_one_device(run: Run) -> None:
    seen = [(run.paths.trial(number) / "devices").read_text() for number in range(TRIALS)]
    assert all(re.fullmatch(r"ROCR_VISIBLE_DEVICES=(\d|1[0-5]) cuda:0", text) for text in seen)


def test_exactly_the_budget_completed_and_stock_optuna_reads_it(run: Run) -> None:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(run.paths.journal)))
    (summary,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=summary.study_name, storage=storage).trials
    assert Counter(trial.state for trial in trials) == {TrialState.COMPLETE: TRIALS}
    assert [trial.number for trial in trials] == list(range(TRIALS))


def test_accounting_shows_one_step_per_logical_gpu_and_none_that_failed(run: Run) -> None:
    steps = [r for r in run.records if re.search(r"\.\d+$", r["JobID"])]
    assert Counter(r["NodeList"] for r in steps) == dict.fromkeys(run.cluster.nodes, GPUS_IN_DPX)
    assert {r["State"] for r in run.records} == {"COMPLETED"}
