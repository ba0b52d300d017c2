"""From launch to the end of a study on this machine, resuming and cancelling."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from hpcjobs.budget import claim, count, finish
from hpcjobs.heartbeat import NodeReport, read_nodes
from hpcjobs.launch import Launched, _held, _record, cancel_requested, recorded, request_cancel
from hpcjobs.owners import Owner, process_gone
from hpcjobs.paths import StudyPaths
from hpcjobs.study import extend, open_study
from hpcjobs.submit import follow
from tests.hpcjobs.conftest import wait_for


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"hpcjobs.{module}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_launched_study_runs_to_its_end_and_leaves_a_record(studies: Any) -> None:
    study = studies.create("epochs", trials=5)
    studies.launch(study)
    assert studies.finish(study).completed == 5
    (job,) = recorded(study.paths)
    (report,) = read_nodes(study.paths)
    assert not job.slurm
    assert report.element == f"{job.host}_{job.job_ids[0]}"
    assert [path.name for path in study.paths.trials.iterdir()] == ["00000"]  # the best: all are equal
    assert study.paths.worker_log(report.element, 1).exists()


def test_a_damaged_record_of_a_submission_is_told(studies: Any) -> None:
    study = studies.create("quadratic")
    (study.paths.folder / "jobs").mkdir()
    (study.paths.folder / "jobs" / "17.json").write_text("{")
    done = run("cancel", study.paths.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "17.json: found no record of a submission; allowed: what submit wrote there" in done.stderr


def test_more_trials_for_a_finished_study_run_after_launching_again(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    studies.launch(study)
    studies.finish(study)
    extend(study, 3)
    studies.launch(study)
    assert studies.finish(study).completed == 5
    assert len(recorded(study.paths)) == 2


def test_more_trials_for_a_running_study_are_taken_up_by_its_workers(studies: Any) -> None:
    study = studies.create("held_epochs", trials=2, epochs=20)
    studies.launch(study)
    studies.wait_for(lambda: count(study).running == 2)
    extend(study, 2)
    studies.let_go(study)
    assert studies.finish(study).completed == 4
    assert len(read_nodes(study.paths)) == 1


def test_launching_again_ends_a_cancellation(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    request_cancel(study.paths)
    studies.launch(study)
    assert not cancel_requested(study.paths)
    assert studies.finish(study).completed == 2


def test_a_study_whose_objective_is_broken_stops_and_goes_on_with_what_is_left_of_its_budget(studies: Any) -> None:
    study = studies.create("broken", trials=20)
    studies.launch(study)
    studies.wait_for(lambda: [report.state for report in read_nodes(study.paths)] == ["ended"])
    counts = count(study)
    assert 8 <= counts.failed <= 9  # the other worker was in the midst of a trial
    assert counts.budget == 20
    (report,) = read_nodes(study.paths)
    assert "none has ended well; the last: ImportError: no module named missing" in report.message
    (study.paths.folder / "mended").touch()
    studies.launch(study)
    after = studies.finish(study)
    assert (after.completed, after.failed) == (20 - counts.failed, counts.failed)


def test_cancel_ends_the_node_and_the_study_can_go_on(studies: Any) -> None:
    study = studies.create("held_epochs", trials=2)
    studies.launch(study)
    studies.wait_for(lambda: count(study).running == 2)
    done = run("cancel", study.paths.folder)
    assert done.returncode == 0, done.stderr
    assert "0 of 2 trials have ended, 2 are left" in done.stdout
    assert count(study).waiting == 2
    studies.let_go(study)
    studies.launch(study)
    assert studies.finish(study).completed == 2


def test_cancel_of_a_copy_leaves_the_original_alone_and_says_so(studies: Any, tmp_path: Path) -> None:
    study = studies.create("held_epochs", trials=2)
    studies.launch(study)
    studies.wait_for(lambda: count(study).running == 2)
    copy = shutil.copytree(study.paths.folder, tmp_path / "copy")
    (node,) = read_nodes(study.paths)
    done = run("cancel", copy)
    assert done.returncode == 0, done.stderr
    assert f"left alone: process {node.pid}" in done.stdout
    assert not cancel_requested(study.paths)
    studies.let_go(study)
    assert studies.finish(study).completed == 2


SQUEUE = """#!/bin/sh
case "$*" in
  *--me*) printf '40|%s/submission_file_1.sh\\n36|/of/others/submitit/submission_file_2.sh\\n' '{submitit}' ;;
  *--jobs=36*) echo '36|RUNNING|1:00|None' ;;
  *--jobs=37*) echo '37|COMPLETED|0:00|None' ;;
  *) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;
esac
"""


def test_on_slurm_only_jobs_whose_script_is_in_the_folder_are_cancelled(
    studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records may name jobs of others: in a copied folder, or where Slurm has given the number again."""
    study = studies.create("quadratic", trials=1)
    for job in ("36", "37", "38", "40"):
        _record(study.paths, Launched((job,), 1, slurm=True, host="login"))
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "squeue").write_text(SQUEUE.format(submitit=str(study.paths.submitit).replace("'", "'\\''")))
    (commands / "scancel").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/cancelled\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    NodeReport("36_0", "a", "elsewhere", "n1", 1, "x", state="running").write(study.paths)
    done = run("cancel", study.paths.folder, "--wait", "300")  # for a node of its own, which this one is not
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "left alone" in line] == [
        f"left alone: job 36, which a record in this folder names: its batch script is not in {study.paths.submitit}, "
        "or it is another user's. If it is of this study: scancel 36"
    ]
    assert (tmp_path / "cancelled").read_text() == "--state=PENDING 40\n40\n"


def test_who_waits_for_a_study_learns_by_the_exit_code_whether_trials_are_left(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    owner = Owner.of_this_process(element="e", agent="a", worker=0, token="t")
    for left in (1, 0):
        trial_id = claim(study, owner)
        assert trial_id is not None
        finish(study, trial_id, "t", TrialState.COMPLETE, value=1.0)
        assert follow(study.paths) == left


def test_ctrl_c_ends_a_study_on_this_machine_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "objective: tests.hpcjobs.objectives:held_epochs\nparameters: {x: {type: int, min: 1, max: 9}}\n"
    )
    folder = tmp_path / "it's a study"
    command = [sys.executable, "-m", "hpcjobs.submit", "--study", str(tmp_path / "s.yaml"), "--folder", str(folder)]
    more = ["--trials", "2", "--workers", "2", "--epochs", "5"]
    # what a script starts in its background ignores SIGINT: these tests too, and all that they start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    paths = StudyPaths(folder)
    wait_for(lambda: paths.journal.exists() and read_nodes(paths) and count(open_study(paths)).running == 2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "0 of 2 trials have ended, 2 are left" in said
    assert f"--resume {shlex.quote(str(folder))}" in said
    (node,) = read_nodes(paths)
    wait_for(lambda: process_gone(node.pid, node.start))  # it has said that it ends, and cleans up
    assert count(open_study(paths)).waiting == 2


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT interrupts this process, also where the tests run in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_the_node_starts_is_not_lost_and_spares_the_node() -> None:
    program = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1); print('lives')"
    with pytest.raises(KeyboardInterrupt), _held(signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), signal.SIGINT)
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.stdout == "lives\n"
    with pytest.raises(KeyboardInterrupt):  # and all is as before
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_reaches_a_node_that_has_started(studies: Any) -> None:
    study = studies.create("held_epochs", trials=2)
    studies.launch(study)
    studies.wait_for(lambda: count(study).running == 2)
    (node,) = read_nodes(study.paths)
    os.kill(node.pid, signal.SIGINT)
    studies.wait_for(lambda: [report.state for report in read_nodes(study.paths)] == ["ended"])
    assert count(study).waiting == 2


def test_who_reads_the_output_of_a_detached_submission_need_not_wait_for_the_study(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "objective: tests.hpcjobs.objectives:deaf\nparameters: {x: {type: int, min: 1, max: 9}}\n"
    )
    done = run("submit", "--study", tmp_path / "s.yaml", "--folder", tmp_path / "study", "--trials", "1", "--detach")
    assert done.returncode == 0, done.stderr
    assert "started on this machine" in done.stdout
    cancelled = run("cancel", tmp_path / "study", "--wait", "1")
    assert "0 of 1 trials have ended" in cancelled.stdout


def test_cancel_of_what_is_no_study_is_refused(tmp_path: Any) -> None:
    done = run("cancel", tmp_path)
    assert done.returncode == 2
    assert "study.yaml" in done.stderr
