"""The agent of one node with real workers: deaths, restarts, stops, and what it makes of devices and cores."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from hpcjobs import slurm_control
from hpcjobs.agent import ASK_END_S, NodeAgent, new_report
from hpcjobs.budget import claim, count
from hpcjobs.cores import Cpu
from hpcjobs.devices import places
from hpcjobs.errors import UserError
from hpcjobs.failures import EXIT_HANDED_BACK
from hpcjobs.heartbeat import NodeReport, WorkerStatus, read_nodes
from hpcjobs.job import Job
from hpcjobs.launch import request_cancel
from hpcjobs.load import load_cluster, write_study_file
from hpcjobs.logical_gpu import LogicalGpu
from hpcjobs.node import EXIT_UNFIT, forget_namesake, main, run_node
from hpcjobs.owners import Owner, process_alive
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import Plan, make_plan
from hpcjobs.slurm_control import JobState, SlurmUnavailableError, parse_time_left
from hpcjobs.spec import Control, control_file
from hpcjobs.study import open_study
from hpcjobs.trial_files import read_curves


def node(study: Any) -> NodeReport | None:
    reports = [report for report in read_nodes(study.paths) if report.state != "ended"]
    return reports[0] if reports else None


def busy(study: Any, workers: int = 2) -> NodeReport | None:
    """The node's report once so many workers run a trial that has made progress."""
    report = node(study)
    running = [w for w in report.workers if w.state == "running" and w.epoch] if report else []
    return report if len(running) == workers else None


def test_no_more_trials_run_than_were_asked_for_however_many_workers(studies: Any) -> None:
    study = studies.create("quadratic", trials=3, workers=6)
    studies.launch(study)
    counts = studies.finish(study)
    assert (counts.completed, len(study.trials())) == (3, 3)


def test_a_study_of_pruned_trials_ends(studies: Any) -> None:
    study = studies.create("always_pruned", trials=4)
    studies.launch(study)
    assert studies.finish(study).pruned == 4


def test_the_trial_of_a_killed_worker_goes_on_from_its_checkpoint(studies: Any) -> None:
    study = studies.create("held_epochs", trials=3, epochs=60)
    studies.launch(study)
    report = studies.wait_for(lambda: busy(study))
    os.kill(report.workers[0].pid, signal.SIGKILL)
    studies.let_go(study)
    counts = studies.finish(study)
    assert (counts.completed, counts.budget, counts.recovered) == (3, 3, 1)
    assert counts.failures == {"worker died": 1}
    successor = study.trials()[3]
    assert successor.value == 60.0
    # no epoch was done twice: the learning curve is unbroken
    steps = [row["step"] for row in read_curves(study) if row["trial"] == 3]
    assert steps == list(range(1, 61))
    log = study.paths.node_log(report.element).read_text()
    assert f"trial {successor.system_attrs['failed_trial']} of dead worker 0 goes on as trial 3" in log


@pytest.mark.parametrize("code", [9, EXIT_HANDED_BACK])
def test_an_objective_that_always_kills_its_worker_neither_hangs_nor_ends_the_study(code: int, studies: Any) -> None:
    study = studies.create("first_always_dying", trials=3, workers=1, fixed={"code": code})
    studies.launch(study)
    counts = studies.finish(study)
    assert (counts.budget, counts.failed, counts.completed) == (3, 1, 2)
    failure = study.trials()[0].user_attrs["hpcjobs:failure"]
    assert failure["message"].startswith(f"the worker ended with exit code {code}; its log: ")


def test_a_device_that_fails_twice_is_left_out(studies: Any) -> None:
    study = studies.create("device_fault", trials=1, workers=1)
    studies.launch(study)
    studies.wait_for(lambda: any(report.state == "ended" for report in read_nodes(study.paths)))
    report = read_nodes(study.paths)[0]
    assert report.workers[0].state == "left out"
    assert "failed 2 times" in report.workers[0].message
    assert "1 worker on CPU cores alone" in study.paths.node_log(report.element).read_text()
    assert (count(study).waiting, count(study).recovered) == (1, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_agent_hands_all_trials_back(number: int, studies: Any) -> None:
    study = studies.create("held_epochs", trials=2)
    studies.launch(study)
    report = studies.wait_for(lambda: busy(study))
    os.kill(report.pid, number)
    studies.wait_for(lambda: node(study) is None)
    counts = count(study)
    assert (counts.waiting, counts.running, counts.recovered) == (2, 0, 0)
    assert read_nodes(study.paths)[0].message == f"signal {signal.Signals(number).name}"


def test_cancelling_is_heard_by_the_agent(studies: Any) -> None:
    study = studies.create("held_epochs", trials=2)
    studies.launch(study)
    studies.wait_for(lambda: busy(study))
    request_cancel(study.paths)
    studies.wait_for(lambda: node(study) is None)
    assert count(study).waiting == 2


def test_workers_of_a_killed_agent_hand_back_and_the_study_can_be_resumed(studies: Any) -> None:
    study = studies.create("held_epochs", trials=2, epochs=60)
    studies.launch(study)
    report = studies.wait_for(lambda: busy(study))
    os.kill(report.pid, signal.SIGKILL)
    studies.wait_for(lambda: count(study).waiting == 2)
    done = [max(trial.intermediate_values) for trial in study.trials()]
    studies.let_go(study)
    studies.launch(study)
    studies.wait_for(lambda: count(study).completed == 2)
    assert all(1 <= epoch <= 2 for epoch in done)
    assert all(trial.value == 60.0 for trial in study.trials())


def test_an_agent_whose_element_runs_elsewhere_meanwhile_leaves_and_touches_nothing(studies: Any) -> None:
    study = studies.create("held_epochs", trials=2)
    studies.launch(study)
    mine = studies.wait_for(lambda: busy(study))
    later = dataclasses.replace(mine, agent="a later run", run=mine.run + 1, workers=[])

    def has_left() -> bool:
        later.write(study.paths)  # as the later run does with every beat
        return not process_alive(mine.pid, mine.start)

    studies.wait_for(has_left)
    assert read_nodes(study.paths)[0].agent == "a later run"
    assert not any(process_alive(worker.pid, worker.start) for worker in mine.workers)


@pytest.mark.parametrize(("restarts", "is_namesake"), [(0, True), (3, False), (None, False)])
def test_what_an_older_job_of_the_same_number_left_neither_stops_nor_holds_up_the_study(
    restarts: int | None, is_namesake: bool, studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives numbers anew after its largest one, or with a new state folder."""

    def told(job: str) -> int:
        if restarts is None:
            raise SlurmUnavailableError("no answer")
        return restarts

    monkeypatch.setattr(slurm_control, "restarts", told)
    study = studies.create("quadratic")
    job = Job("17_0", "17_0")
    former = dataclasses.replace(new_report(job, "its agent"), host="another", run=3)
    former.write(study.paths)
    owner = Owner.of_this_process(element="17_0", agent="its agent", worker=0, token="of the dead")
    trial_id = claim(study, dataclasses.replace(owner, host="another", job="17", run=3))
    forget_namesake(study, job)
    assert (read_nodes(study.paths) == []) is is_namesake
    assert (study.trial(trial_id).state == TrialState.FAIL) is is_namesake


def test_a_study_that_is_moved_while_it_runs_ends_leaves_nothing_behind_and_can_go_on(studies: Any) -> None:
    study = studies.create("held_epochs", trials=2)
    studies.launch(study)
    mine = studies.wait_for(lambda: busy(study))
    here, there = study.paths.folder, study.paths.folder.with_name("moved")
    here.rename(there)
    studies.wait_for(lambda: not process_alive(mine.pid, mine.start))
    assert not any(process_alive(worker.pid, worker.start) for worker in mine.workers)
    assert not here.exists()
    moved = open_study(StudyPaths(there))
    assert f"{study.paths.config} is gone: this node ends" in moved.paths.node_log(mine.element).read_text()
    studies.let_go(moved)
    studies.launch(moved)
    studies.wait_for(lambda: count(moved).completed == 2)


def test_a_study_of_this_machine_runs_inside_somebodys_job_as_well(studies: Any) -> None:
    """As in `salloc`: there is a job, but without a profile nothing says how to start steps in it."""
    study = studies.create("epochs", trials=2, epochs=1, workers=1)
    environment = {**os.environ, "SLURM_JOB_ID": "5"}
    command = [sys.executable, "-m", "hpcjobs.node", str(study.paths.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert count(study).completed == 2


def test_two_agents_share_one_study_without_overshooting(studies: Any) -> None:
    study = studies.create("epochs", trials=9, epochs=3)
    studies.launch(study)
    studies.launch(study)
    counts = studies.finish(study)
    assert (counts.completed, len(study.trials()), counts.recovered) == (9, 9, 0)
    assert len(read_nodes(study.paths)) == 2


def test_a_node_that_is_silently_in_another_mode_takes_no_trial(studies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = studies.create("quadratic")
    cluster = load_cluster("mi300x-generic")
    run = study.file.run.model_copy(update={"mode": "cpx"})
    write_study_file(study.paths, study.file.model_copy(update={"cluster": cluster, "run": run}))
    monkeypatch.setattr("hpcjobs.partition.current_mode", lambda: "spx")
    with pytest.raises(SystemExit) as ended:
        run_node(str(study.paths.folder))
    assert ended.value.code == EXIT_UNFIT
    (report,) = read_nodes(study.paths)
    assert "the GPUs are in mode spx, the study asks for cpx. No trial was begun" in report.message
    assert count(study).waiting == 6


def test_nothing_is_left_behind_in_a_place_that_is_no_study(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    for name, found in (("thesis", "no study.yaml"), ("typo", "no such folder")):
        with pytest.raises(UserError, match=rf"{name}: found {found}; allowed: a study folder"):
            main([str(tmp_path / name)])
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["thesis"]


def plan_for(studies: Any, **change: Any) -> Plan:
    return dataclasses.replace(make_plan(studies.create("quadratic").file, local_cores=8), **change)


def gpus(count: int, numa_nodes: Sequence[int] = (0,)) -> list[LogicalGpu]:
    return [
        LogicalGpu(i, i, 0, "", f"GPU-{i}", ("ROCR_VISIBLE_DEVICES", str(i)), numa_nodes[i % len(numa_nodes)])
        for i in range(count)
    ]


def cpus(count: int, numa_nodes: int = 1) -> list[Cpu]:
    return [Cpu(i, (0, i), i * numa_nodes // count) for i in range(count)]


def test_each_worker_gets_one_device_and_its_own_cores(studies: Any) -> None:
    found = places(plan_for(studies, workers_by_devices=True), gpus(63), cpus(128))
    assert [place.environment for place in found] == [{"ROCR_VISIBLE_DEVICES": str(i)} for i in range(63)]
    cores = [core for place in found for core in place.cores]
    assert len(cores) == len(set(cores)) == 126
    assert all(place.threads == 2 for place in found)


def test_cores_beside_the_device_are_preferred(studies: Any) -> None:
    found = places(plan_for(studies, workers_by_devices=True), gpus(2, numa_nodes=(1, 0)), cpus(8, numa_nodes=2))
    assert [place.cores for place in found] == [(4, 5, 6, 7), (0, 1, 2, 3)]


def test_workers_keep_off_the_cpus_that_the_profile_reserves(studies: Any) -> None:
    cluster = load_cluster("lumi")
    assert cluster.reserved_cpus == tuple(range(0, 64, 8))
    plan = plan_for(studies, workers_by_devices=True, cluster=cluster)
    found = places(plan, gpus(8, numa_nodes=(3, 3, 1, 1, 0, 0, 2, 2)), cpus(64, numa_nodes=4))
    assert [len(place.cores) for place in found] == [7] * 8
    assert found[0].cores == tuple(range(49, 56))
    assert not {core for place in found for core in place.cores} & {*cluster.reserved_cpus}


def test_workers_share_devices_only_when_there_are_more_of_them(studies: Any) -> None:
    found = places(plan_for(studies, workers_by_devices=False, workers_per_node=4), gpus(2), cpus(2))
    assert [place.device for place in found] == ["GPU 0", "GPU 1", "GPU 0", "GPU 1"]
    assert all(place.cores == (0, 1) for place in found)
    assert all(place.threads == 1 for place in found)  # two cores for four workers


def test_fewer_workers_than_devices_are_spread_over_all_of_them(studies: Any) -> None:
    found = places(plan_for(studies, workers_by_devices=False, workers_per_node=4), gpus(63), cpus(8))
    assert [place.device for place in found] == ["GPU 0", "GPU 15", "GPU 31", "GPU 47"]


def test_every_device_gets_the_same_number_of_workers(studies: Any) -> None:
    found = places(plan_for(studies, workers_by_devices=True, workers_per_gpu=2), gpus(3), cpus(12))
    assert [place.device for place in found] == ["GPU 0", "GPU 1", "GPU 2"] * 2


def test_a_node_without_devices_runs_the_planned_number_of_workers(studies: Any) -> None:
    found = places(plan_for(studies, workers_by_devices=True, workers_per_node=3), [], cpus(7))
    assert [(place.device, place.cores) for place in found] == [("", (0, 1)), ("", (2, 3)), ("", (4, 5))]


def test_an_array_element_is_known_by_array_and_task() -> None:
    environment = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}
    job = Job.from_environment({**environment, "SLURM_RESTART_COUNT": "3", "SLURM_JOB_END_TIME": "1000"})
    assert job == Job("17_2", "17_2", 3, 1000.0)
    assert Job.from_environment({"SLURM_JOB_ID": "19"}) == Job("19", "19", 0, None)
    assert Job.from_environment({**environment, "SUBMITIT_EXECUTOR": "local"}).slurm_id is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:40", 40.0), ("12:00", 720.0), ("1:00:00", 3600.0), ("2-03:04:05", 183845.0), ("UNLIMITED", None), ("", None)],
)
def test_the_time_left_that_squeue_prints_is_read(text: str, seconds: float | None) -> None:
    assert parse_time_left(text) == seconds


def test_an_end_that_was_moved_counts_on_while_slurm_does_not_answer(
    studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has given the job more time. The end that its environment tells is the old one."""
    study = studies.create("epochs", trials=1)
    begin = time.monotonic()
    job = Job("17_0", "17_0", end=time.time() + 60)
    agent = NodeAgent(study, make_plan(study.file), job, tmp_path, [], "token")

    def end_by(answer: dict[str, JobState] | Exception, at: float) -> float | None:
        def job_states(ids: object) -> dict[str, JobState]:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(slurm_control, "job_states", job_states)
        agent._check_end(at)
        return Control.read(control_file(tmp_path)).end

    silent = SlurmUnavailableError("squeue: no answer")
    planned = end_by(silent, 0.0)
    assert planned is not None and begin < planned < begin + 100, "better than nothing"
    moved = end_by({"17_0": JobState("RUNNING", 3600.0)}, ASK_END_S)
    assert moved is not None and moved >= begin + 3600
    assert end_by(silent, 2 * ASK_END_S) == moved


def test_an_agent_asks_once_more_before_it_stops_workers_for_the_end_of_the_job(
    studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has suspended the job past the end that was known, and the agent runs again."""
    study = studies.create("epochs", trials=1)
    plan = dataclasses.replace(make_plan(study.file), signal_delay_s=8)
    agent = NodeAgent(study, plan, Job("17_0", "17_0"), tmp_path, [], "token")
    left = iter([40.0, 30.0, 0.0])
    monkeypatch.setattr(slurm_control, "job_states", lambda ids: {"17_0": JobState("RUNNING", next(left))})
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def look() -> str | None:
        agent._check_end(now)
        agent._check_stop()
        return Control.read(control_file(tmp_path)).stop

    assert look() is None
    now += 59.0
    assert look() is None, "the end has moved"
    now += 29.0
    assert look() == "time limit"


def test_the_time_in_which_a_job_is_suspended_is_none_of_its_workers_grace(studies: Any, tmp_path: Path) -> None:
    study = studies.create("epochs", trials=1)
    steps: list[Any] = [ToldToStop(10**9)]
    steps[0].kill = lambda: pytest.fail("killed")
    agent = NodeAgent(study, make_plan(study.file), Job("host_1", None), tmp_path, steps, "token")
    agent._stop("cancelled")
    agent._looked -= 3600.0
    assert agent._beat()


class ToldToStop:
    """A worker that Slurm has told to stop. It takes so many rounds of the agent for that."""

    def __init__(self, rounds: int) -> None:
        self.state, self.live, self.starting, self.rounds = "live", True, False, rounds

    def reap(self) -> None:
        self.rounds -= 1
        if self.live and self.rounds < 0:
            self.live, self.state = False, "handed back"

    def look(self) -> None:
        pass

    kill = look

    def due(self) -> bool:
        return False

    def restart(self, after_s: float) -> None:
        raise AssertionError("it would begin again although the job ends")

    def report(self) -> WorkerStatus:
        return WorkerStatus(0, "t", 0, "")


def test_a_node_whose_workers_stop_one_after_the_other_ends(studies: Any, tmp_path: Path) -> None:
    """Slurm has told all of them, and not the agent, so that the job is about to end."""
    study = studies.create("epochs", trials=2)
    steps: list[Any] = [ToldToStop(0), ToldToStop(3)]
    agent = NodeAgent(study, make_plan(study.file), Job("host_1", None), tmp_path, steps, "token")
    assert agent.run() == 0
    assert agent.report.message == "the workers were told to stop"
