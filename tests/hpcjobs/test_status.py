"""What status shows, live, once, as JSON, and for what is no study."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState, create_trial
from rich.console import Console
from rich.screen import Screen

from hpcjobs import slurm_control, status_look
from hpcjobs.budget import claim, count, finish, hand_back
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.heartbeat import HeartbeatWatch, NodeReport, WorkerStatus, read_node, read_nodes
from hpcjobs.owners import Owner
from hpcjobs.paths import StudyPaths
from hpcjobs.progress import Snapshot, StudyWatch
from hpcjobs.recovery import recover
from hpcjobs.slurm_control import JobState
from hpcjobs.status import ASK_SLURM_S, Jobs, main, watch
from hpcjobs.status_look import LOOK_AGAIN_S
from hpcjobs.status_view import one_line, render
from hpcjobs.study import OpenStudy
from hpcjobs.text import duration


def status(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcjobs.status", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_running_study_is_shown_with_its_node_and_speed(studies: Any) -> None:
    study = studies.create("epochs", trials=4, epochs=6000)  # it runs for as long as the test looks
    studies.launch(study)
    watch = StudyWatch(study)
    now = studies.wait_for(lambda: (s := watch.look()).images_per_s == 200.0 and s)
    assert (now.counts.running, now.live_nodes, now.epochs_total) == (2, 1, 24000)
    assert [worker.state for worker in now.nodes[0].report.workers] == ["running", "running"]
    text = status(study.paths.folder, "--once").stdout
    assert "200 images/s" in text
    assert "##" in text


def test_the_live_view_without_a_terminal_ends_with_the_study(studies: Any) -> None:
    study = studies.create("epochs", trials=2)
    studies.launch(study)
    done = status(study.paths.folder)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 ended: 2 completed" in done.stdout
    assert "\x1b" not in done.stdout
    assert re.search(r"^\S+ +\S+ +ended", done.stdout, re.MULTILINE), done.stdout


def test_json_tells_the_same(studies: Any) -> None:
    study = studies.create("out_of_gpu_memory", trials=3)
    studies.launch(study)
    studies.finish(study)
    told = json.loads(status(study.paths.folder, "--json").stdout)
    assert told["finished"] is True
    assert told["budget"] == 3
    assert told["counts"]["failures"] == {"out of GPU memory": 2}
    assert told["best"]["number"] == 1


def test_time_left_is_estimated_from_finished_trials(studies: Any) -> None:
    study = studies.create("epochs", trials=40, epochs=10)
    begun = time.monotonic()
    studies.launch(study)
    studies.wait_for(lambda: count(study).completed >= 2)
    now = StudyWatch(study).look()
    assert now.time_left_s is not None
    # two workers have 38 trials before them at most, of which none takes longer than the whole test did
    assert 0.0 < now.time_left_s < 38 / 2 * (time.monotonic() - begun)
    assert "left: " in one_line(now)


def test_a_watch_that_looks_again_counts_as_one_that_looks_once(studies: Any) -> None:
    """Also trials that go on under a new number, and one whose successor another program made after its end."""
    study = studies.create("epochs", trials=6, epochs=4)
    watched = StudyWatch(study)
    owner = Owner.of_this_process(element="e", agent="a", worker=0, token="t")

    def look() -> Snapshot:
        now = watched.look()
        assert (now, now.counts) == (StudyWatch(study).look(), count(study))
        return now

    def begin(epochs: int) -> int:
        trial_id = claim(study, owner)
        assert trial_id is not None
        for epoch in range(1, epochs + 1):
            study.storage.set_trial_intermediate_value(trial_id, epoch, float(epoch))
        return trial_id

    first, second, third, fourth = (begin(epochs) for epochs in (4, 2, 1, 3))
    assert (look().epochs_done, look().share) == (10, 10 / 24)
    finish(study, first, "t", TrialState.COMPLETE, value=4.0)
    finish(study, second, "t", TrialState.PRUNED)
    assert look().share == (4 + 4 + 1 + 3) / 24
    recover(study, third, "t", Failure(FailureClass.WORKER, "killed"))
    hand_back(study, fourth, "t")
    assert (look().counts.recovered, look().epochs_done) == (1, 10)
    failed = begin(0)
    finish(study, failed, "t", TrialState.FAIL, failure=Failure(FailureClass.OBJECTIVE, "wrong"))
    assert look().counts.failed == 1
    history = {"retry_history": [study.trial(failed).number]}
    study.storage.create_new_trial(study.study_id, create_trial(state=TrialState.WAITING, system_attrs=history))
    assert (look().counts.failed, look().counts.recovered) == (0, 2)
    assert look().best is not None


def test_the_time_left_is_told_before_a_trial_has_ended(studies: Any) -> None:
    study = studies.create("epochs", trials=4, epochs=5)
    workers = [WorkerStatus(n, "t", 1, "x", state="running", epoch_s=seconds) for n, seconds in enumerate((8.0, 12.0))]
    NodeReport("17_0", "a", "elsewhere", "n1", 1, "x", state="running", workers=workers).write(study.paths)
    assert StudyWatch(study).look().time_left_s == 4 * 5 * 10.0 / 2


def test_a_study_that_nobody_runs_does_not_keep_status_waiting(studies: Any) -> None:
    study = studies.create("quadratic")
    done = status(study.paths.folder)
    assert done.returncode == 0
    assert "no node has started yet" in done.stdout


class Slurm:
    """Stands for squeue: its answer, and how often it was asked."""

    def __init__(self, paths: StudyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: dict[str, JobState] | None = None
        self.asked = 0
        paths.folder.joinpath("jobs").mkdir()
        record = {"job_ids": ["17"], "elements": 3, "slurm": True, "host": "login"}
        (paths.folder / "jobs" / "17.json").write_text(json.dumps(record))
        monkeypatch.setattr(slurm_control, "job_states", self._job_states)

    def _job_states(self, job_ids: list[str], timeout_s: float) -> dict[str, JobState]:
        if not job_ids:
            return {}
        assert job_ids == ["17"]
        self.asked += 1
        if self.answer is None:
            raise slurm_control.SlurmUnavailableError("squeue: no answer")
        return self.answer


HELD = {
    "17_0": JobState("PENDING", 60.0, "JobHeldUser"),
    "17_1": JobState("PENDING", 60.0, "JobHeldUser"),
    "17_2": JobState("COMPLETED", 60.0, "None"),
}


def test_status_says_why_a_study_waits_for_nodes(
    studies: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic")
    slurm = Slurm(study.paths, monkeypatch)
    slurm.answer = HELD
    assert main([str(study.paths.folder), "--once"]) == 0
    assert "no node has started yet\n2 nodes in Slurm's queue: JobHeldUser" in capsys.readouterr().out
    assert main([str(study.paths.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["queue"] == {"JobHeldUser": 2}
    assert one_line(StudyWatch(study).look(), {"JobHeldUser": 2}).endswith("; 2 nodes in Slurm's queue: JobHeldUser")
    slurm.answer = None
    assert main([str(study.paths.folder), "--once"]) == 0
    assert "queue" not in capsys.readouterr().out


def test_status_says_why_other_nodes_wait_while_some_work(
    studies: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic")
    slurm = Slurm(study.paths, monkeypatch)
    slurm.answer = {
        "17_0": JobState("RUNNING", 60.0, "None"),
        "17_1": JobState("PENDING", 60.0, "Resources"),
        "17_2": JobState("PENDING", 60.0, "Priority"),
    }
    NodeReport("17_0", "a", "elsewhere", "n1", 1, "x", state="running").write(study.paths)
    assert main([str(study.paths.folder), "--once"]) == 0
    assert "\n2 nodes in Slurm's queue: 1 Resources, 1 Priority" in capsys.readouterr().out
    slurm.answer = None
    assert main([str(study.paths.folder), "--once"]) == 0
    assert "queue" not in capsys.readouterr().out


def test_an_element_that_was_queued_again_is_one_that_waits_and_no_line(
    studies: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic")
    slurm = Slurm(study.paths, monkeypatch)
    slurm.answer = {f"17_{number}": JobState("PENDING", 60.0, "BeginTime") for number in range(3)}
    told = {"17_0": "running", "17_1": "ended"}
    for element, state in told.items():
        report = NodeReport(element, "a", "elsewhere", f"n{element}", 1, "x", state=state, message=f"word of {element}")
        report.write(study.paths)
    assert main([str(study.paths.folder), "--once"]) == 0
    out = capsys.readouterr().out
    # 17_0 runs: what Slurm said is older than its file
    assert "n17_0" in out and "17_1" not in out
    assert "3 nodes in Slurm's queue: BeginTime" in out
    slurm.answer = {element: JobState("RUNNING", 60.0) for element in told}
    assert main([str(study.paths.folder), "--json"]) == 0
    assert [line["report"]["element"] for line in json.loads(capsys.readouterr().out)["nodes"]] == ["17_0", "17_1"]


def replace_pauses(monkeypatch: pytest.MonkeyPatch, do: Callable[[float], None]) -> None:
    """Between the two looks of status something else is done than wait."""
    monkeypatch.setattr(status_look, "time", SimpleNamespace(time=time.time, sleep=do))


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that status made, which take no time."""
    pauses: list[float] = []
    replace_pauses(monkeypatch, pauses.append)
    return pauses


def working_node(study: OpenStudy, element: str, age_s: float) -> NodeReport:
    workers = [WorkerStatus(0, "t", 1, "x", state="running", images_per_s=100.0, epoch_s=1.0)]
    report = NodeReport(element, "a", "elsewhere", f"n{element}", 1, "x", state="running", beat=7, workers=workers)
    report.write(study.paths)
    then = time.time() - age_s
    os.utime(study.paths.node_file(element), (then, then))
    return report


def test_one_look_calls_a_node_silent_whose_file_stays_as_it_is(
    studies: Any, paused: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a node leaves it that cannot write any more: its disk is full, or it has lost its power."""
    study = studies.create("quadratic")
    working_node(study, "17_0", age_s=3600.0)
    working_node(study, "17_1", age_s=1.0)
    assert main([str(study.paths.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["state"] for line in found["nodes"]] == ["silent", "running"]
    assert found["nodes"][0]["silent_s"] >= 3600.0
    assert found["images_per_s"] == 100.0
    assert main([str(study.paths.folder), "--once"]) == 0
    assert "silent 1 h 00 min" in capsys.readouterr().out
    assert paused == [LOOK_AGAIN_S] * 2
    study.paths.node_file("17_1").unlink()
    assert main([str(study.paths.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images_per_s"], found["time_left_s"]) == (None, None)


@pytest.mark.parametrize("age_s", [3600.0, -3600.0])
def test_a_node_that_beats_is_not_silent_whatever_the_clocks_say(
    age_s: float, studies: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic")
    report = working_node(study, "17_0", age_s)
    replace_pauses(monkeypatch, lambda seconds: replace(report, beat=8).write(study.paths))
    assert main([str(study.paths.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(line["state"], line["report"]["beat"]) for line in found["nodes"]] == [("running", 8)]


def test_files_that_are_new_are_looked_at_once(
    studies: Any, paused: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic")
    working_node(study, "17_0", age_s=1.0)
    NodeReport("16_0", "a", "elsewhere", "n0", 1, "x", state="ended").write(study.paths)
    os.utime(study.paths.node_file("16_0"), (0, 0))
    assert main([str(study.paths.folder), "--once"]) == 0
    assert "running" in capsys.readouterr().out and paused == []


def test_slurm_is_asked_rarely_and_only_while_nodes_are_to_come(studies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = studies.create("quadratic")
    slurm = Slurm(study.paths, monkeypatch)
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    jobs, now = Jobs(study.paths), StudyWatch(study).look()

    def look() -> tuple[bool, dict[str, int], int]:
        return jobs.any_left(now), jobs.waiting(now), slurm.asked

    assert look() == (True, {}, 1), "Slurm does not answer: the job may be there"
    slurm.answer = HELD
    clock += ASK_SLURM_S
    assert look() == (True, {}, 1)
    clock += 1.0
    assert look() == (True, {"JobHeldUser": 2}, 2)
    slurm.answer = {"17_0": JobState("PENDING", 60.0, "None")}
    clock += ASK_SLURM_S + 1.0
    assert look() == (True, {"PENDING": 1}, 3)
    # some work
    NodeReport("17_0", "a", "elsewhere", "n1", 1, "x", state="running").write(study.paths)
    now = StudyWatch(study).look()
    slurm.answer = {"17_0": JobState("RUNNING", 60.0, "None"), "17_1": JobState("PENDING", 60.0, "Priority")}
    assert look() == (True, {}, 3), "its agent has begun since Slurm was asked"
    clock += ASK_SLURM_S + 1.0
    assert look() == (True, {"Priority": 1}, 4)
    assert look() == (True, {"Priority": 1}, 4)
    # all work
    for number in (1, 2):
        NodeReport(f"17_{number}", "a", "elsewhere", f"n{number}", 1, "x", state="running").write(study.paths)
    now = StudyWatch(study).look()
    clock += ASK_SLURM_S + 1.0
    assert look() == (True, {}, 4)
    # none works any more: asked at once, since those who watch wait for the end; of a job that is over never again
    for number in range(3):
        NodeReport(f"17_{number}", "a", "elsewhere", f"n{number}", 1, "x", state="ended").write(study.paths)
    now = StudyWatch(study).look()
    slurm.answer = {"17_0": JobState("CANCELLED", 60.0, "None")}
    assert look() == (False, {}, 5)
    clock += ASK_SLURM_S + 1.0
    assert look() == (False, {}, 5)


def test_who_waited_in_vain_is_told_of_files_that_exist_and_the_last_line_of_a_job_without_a_node(
    studies: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic")
    Slurm(study.paths, monkeypatch).answer = {}
    assert watch(study.paths)
    assert "6 trials left. No job has written anything" in capsys.readouterr().out
    study.paths.submitit.mkdir()
    output = study.paths.submitit / "17_0_0_log.out"
    output.write_text("modules\nhpcjobs: [b] setup failed\n\n")
    (study.paths.submitit / "17_0_0_log.err").touch()
    assert watch(study.paths)
    said = capsys.readouterr().out
    assert f"its output, {output}, ends with: hpcjobs: [b] setup failed" in said
    assert "Logs:" not in said
    NodeReport("17_0", "a", "elsewhere", "n1", 1, "x", state="ended").write(study.paths)
    study.paths.logs.mkdir()
    assert watch(study.paths)
    said = capsys.readouterr().out
    assert f"6 trials left. Logs: {study.paths.logs}\n" in said
    assert "before its node began" not in said


def test_an_element_that_began_since_slurm_was_asked_waits_no_more_though_it_has_ended(
    studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studies.create("quadratic")
    Slurm(study.paths, monkeypatch).answer = {f"17_{number}": JobState("PENDING", 60.0) for number in range(3)}
    report = NodeReport("17_0", "a", "elsewhere", "n1", 1, "x", state="ended")
    report.write(study.paths)
    jobs, watched = Jobs(study.paths), StudyWatch(study)
    assert jobs.picture(before := watched.look()) == (replace(before, nodes=[]), {"PENDING": 3})
    replace(report, agent="another").write(study.paths)
    now, queue = jobs.picture(watched.look())
    assert ([line.report.agent for line in now.nodes], queue) == (["another"], {"PENDING": 2})


@pytest.mark.parametrize(("slurm", "said"), [(True, "; the jobs go on, to end them: {cancel}\n"), (False, "\n")])
def test_who_stops_watching_is_told_that_jobs_go_on(
    slurm: bool, said: str, studies: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    study = studies.create("quadratic")
    if slurm:
        Slurm(study.paths, monkeypatch)
    monkeypatch.setattr("hpcjobs.status._follow", interrupted)
    assert not watch(study.paths)
    cancel = f"python -m hpcjobs.cancel {shlex.quote(str(study.paths.folder))}"
    assert capsys.readouterr().out == "no longer watching" + said.format(cancel=cancel)


@pytest.mark.parametrize(("state", "host"), [("ended", "elsewhere"), ("running", socket.gethostname())])
def test_workers_of_a_node_that_has_ended_are_shown_as_ended(
    state: str, host: str, studies: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic")
    workers = [WorkerStatus(n, "t", 1, "x", state=was) for n, was in enumerate(("starting", "left out"))]
    NodeReport("17_0", "a", host, "n1", 1, "before the flood", state=state, workers=workers).write(study.paths)
    assert main([str(study.paths.folder), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["nodes"]
    assert [worker["state"] for worker in line["report"]["workers"]] == ["ended", "left out"]
    assert main([str(study.paths.folder), "--placement"]) == 0
    assert "x left out  - ended" in capsys.readouterr().out


def test_a_node_of_this_host_whose_process_has_ended_is_gone(studies: Any) -> None:
    study = studies.create("quadratic")
    NodeReport("17_0", "token", socket.gethostname(), "n1", 1, "before the flood", state="running").write(study.paths)
    now = StudyWatch(study).look()
    assert (now.nodes[0].state, now.live_nodes) == ("gone", 0)


def test_silence_is_measured_by_changes_not_by_clocks(studies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = studies.create("quadratic")
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    report = NodeReport("17_0", "token", "another host", "n1", 1, "x", state="running")
    watch = HeartbeatWatch(study.paths)
    report.write(study.paths)
    watch.look()
    clock[0] += 30.0
    watch.look()
    assert watch.silent_s("17_0") == 30.0
    report.beat += 1
    report.write(study.paths)
    watch.look()
    assert watch.silent_s("17_0") == 0.0
    assert watch.silent_s("17_1") is None


def test_a_nodes_file_of_another_version_or_half_a_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "17_0.json"
    worker = {"worker": 0, "token": "t", "pid": 1, "start": "x", "from_the_future": True}
    report = {"element": "17_0", "agent": "a", "host": "h", "node": "n", "pid": 1, "start": "x", "workers": [worker]}
    path.write_text(json.dumps({**report, "new": 1}))
    found = read_node(path)
    assert found is not None
    assert found.workers == [WorkerStatus(0, "t", 1, "x")]
    path.write_text(json.dumps(report)[:50])
    assert read_node(path) is None


@pytest.mark.parametrize("arguments", [(), ("--once",), ("--json",)])
def test_what_is_no_study_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        done = status(folder, *arguments)
        assert done.returncode == 2
        assert str(folder) in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "unknown"), (42.4, "42 s"), (75, "1 min 15 s"), (7260, "2 h 01 min")]
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_files_of_nodes_are_replaced_whole(studies: Any) -> None:
    study = studies.create("epochs", trials=2, epochs=30)
    studies.launch(study)
    looks = 0
    while count(study).left or not looks:
        for path in study.paths.nodes.glob("[!.]*"):
            assert path.suffix == ".json"
            assert json.loads(path.read_bytes())["element"] == path.stem, "half a file, or an empty one"
            looks += 1


def test_the_map_of_a_node_shows_its_workers(studies: Any, capsys: pytest.CaptureFixture[str]) -> None:
    study = studies.create("quadratic", trials=2)
    assert main([str(study.paths.folder), "--placement"]) == 0
    assert "no node has started yet" in capsys.readouterr().out
    studies.launch(study)
    studies.finish(study)
    assert main([str(study.paths.folder), "--placement"]) == 0
    out = capsys.readouterr().out
    assert "2 workers" in out and "CPUs (one letter per worker" in out


def test_the_map_leaves_out_what_has_ended_as_long_as_a_node_runs(
    studies: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    study = studies.create("quadratic", trials=2)
    studies.launch(study)
    studies.finish(study)
    (ended,) = read_nodes(study.paths)
    live = NodeReport("18_0", "token", "another host", "n2", 1, "x", state="running")
    live.write(study.paths)
    map_of = study.paths.placement_file("18_0")
    map_of.parent.mkdir()
    map_of.write_text(study.paths.placement_file(ended.element).read_text().replace(ended.node, "n2"))
    assert main([str(study.paths.folder), "--placement"]) == 0
    out = capsys.readouterr().out
    assert "n2: " in out and f"{ended.node}: " not in out


def test_what_many_nodes_say_is_one_line(studies: Any) -> None:
    study = studies.create("quadratic")
    for number in range(7):
        said = "the job's time limit is near" if number < 6 else "another mode"
        NodeReport(f"17_{number}", "t", "host", f"n{number}", 1, "x", state="ended", message=said).write(study.paths)
    shown = io.StringIO()
    Console(file=shown, width=100).print(render(StudyWatch(study).look()))
    assert "n0, n1, n2, n3 and 2 more: the job's time limit is near\nn6: another mode" in re.sub(
        r" +\n", "\n", shown.getvalue()
    )


def on_a_screen(study: OpenStudy, width: int, height: int, queue: dict[str, int] | None = None) -> list[str]:
    """The lines that a full screen of this size shows of a study."""
    console = Console(width=width, height=height, file=io.StringIO(), highlight=False)
    console.print(Screen(render(StudyWatch(study).look(), queue, full_screen=True)), end="")
    return [line.rstrip() for line in console.file.getvalue().split("\n")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize(("nodes", "height"), [(1, 24), (4, 30), (8, 30), (40, 30), (60, 50)])
def test_a_screen_shows_as_many_nodes_as_it_has_room_for_and_all_that_is_below_them(
    nodes: int, height: int, workers: int, studies: Any
) -> None:
    study = studies.create("quadratic")
    for number in range(nodes):
        own = [WorkerStatus(n, "t", 1, "x", state="running", images_per_s=3.0) for n in range(workers)]
        own[-1].state, own[-1].message = "left out", "no answer"
        report = NodeReport(f"17_{number}", "a", "elsewhere", f"nid{number:03d}", 1, "x", state="running", workers=own)
        report.host_limit = f"no memory, {number} GB"
        report.write(study.paths)
    lines = on_a_screen(study, 100, height, {"Priority": 3})
    assert len(lines) == height
    text = "\n".join(lines)
    shown = sorted({int(number) for number in re.findall(r"^nid(\d+)  .*running", text, re.MULTILINE)})
    left_out = re.search(r"^and (\d+) more node", text, re.MULTILINE)
    assert shown == list(range(len(shown)))
    assert len(shown) + (int(left_out[1]) if left_out else 0) == nodes
    assert (left_out is None) == (nodes <= 8)
    assert len(shown) > min(nodes, height) / 2
    assert "# running  x left out" in text and "3 nodes in Slurm's queue: Priority" in lines
    assert text.count("the host is the limit: no memory, 0 GB") == 1
    assert ("#" * (workers - 1) + "x" in text) or f"{workers - 1}# 1x" in text
    assert ("63# 1x" in text) == (workers == 64 and nodes > 8)


def test_words_of_many_nodes_do_not_fill_the_screen(studies: Any) -> None:
    study = studies.create("quadratic")
    for number in range(12):
        report = NodeReport(f"17_{number}", "a", "elsewhere", f"n{number:02d}", 1, "x", state="ended")
        report.message = f"word {number}"
        report.write(study.paths)
    lines = on_a_screen(study, 80, 60)
    assert sum(": word" in line for line in lines) == 8
    assert "and words of 4 more nodes; the logs have them" in lines


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("workers", [4, 64])
def test_no_cell_of_a_node_is_cut_in_a_narrow_terminal(workers: int, width: int, studies: Any) -> None:
    study = studies.create("quadratic")
    for number in range(100, 103):
        states = [WorkerStatus(n, "t", 1, "x", state="running", images_per_s=300.0) for n in range(workers)]
        report = NodeReport(f"12345678_{number}", "a", "elsewhere", f"nid001{number}", 1, "x", state="stopping")
        report.mode, report.workers = "cpx", states
        report.time_left_s, report.pressure = 38000.0, {"cpu_busy": 0.934}
        report.write(study.paths)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(render(StudyWatch(study).look()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for shown in ("nid001102", "stopping", f"{300 * workers:,}", "10 h 33 min", "job ends in"):
        assert shown in text
    assert ("12345678_102" in text) == ("cpx" in text) == (width > 60)
    assert "#" * min(workers, width) in text


def test_what_many_workers_say_is_one_line_and_different_words_do_not_fill_the_screen(studies: Any) -> None:
    study = studies.create("quadratic")
    for node in range(2):
        said = ["no answer"] * 3 + [f"device {n} is taken" for n in range(11)]
        workers = [WorkerStatus(n, "t", 1, "x", state="left out", message=text) for n, text in enumerate(said)]
        report = NodeReport(f"17_{node}", "a", "elsewhere", f"n{node}", 1, "x", state="running", workers=workers)
        report.write(study.paths)
    console = Console(width=200, file=io.StringIO())
    console.print(render(StudyWatch(study).look()))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "17_0 worker 0, 17_0 worker 1, 17_0 worker 2, 17_1 worker 0 and 2 more: no answer" in lines
    assert "17_0 worker 3, 17_1 worker 3: device 0 is taken" in lines
    assert sum("is taken" in line for line in lines) == 7
    assert "and 8 more workers left out; the logs tell why" in lines


def test_an_ordinary_end_needs_no_word(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    studies.launch(study)
    studies.finish(study)
    assert [report.message for report in read_nodes(study.paths)] == [""]


@pytest.mark.parametrize(("width", "own_line"), [(80, True), (140, False)])
def test_64_workers_of_a_node_are_one_unbroken_row_of_cells(width: int, own_line: bool, studies: Any) -> None:
    study = studies.create("quadratic")
    states = ["running"] * 60 + ["idle", "left out", "starting", "stopping"]
    workers = [
        WorkerStatus(n, "t", 1, "x", state=state, message="no answer" if state == "left out" else "", images_per_s=10.0)
        for n, state in enumerate(states)
    ]
    report = NodeReport("17_0", "a", "elsewhere", "nid001234", 1, "x", state="running", mode="cpx", workers=workers)
    report.time_left_s = 5400.0
    report.pressure = {"cpu_busy": 0.934} if own_line else {}
    report.write(study.paths)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(render(StudyWatch(study).look()))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (row,) = [line for line in lines if "#" * 60 + ".x+~" in line]
    assert row.startswith("nid001234") and ("cpx" in row) != own_line
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "1 h 30 min" in text
    assert "600" in text
    assert ("CPU" in text) == own_line
    assert "17_0 worker 61: no answer" in text
    assert "0 of 6 ended: 0 completed, 6 waiting" in text
