"""What clean takes away and what it must leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from hpcjobs.clean import size_text, stretches
from hpcjobs.heartbeat import NodeReport
from hpcjobs.progress import best_trial


def clean(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcjobs.clean", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_tells_and_touches_nothing_then_checkpoints_go_and_results_stay(studies: Any) -> None:
    study = studies.create("epochs", trials=3, direction="maximize")
    studies.worker(study).wait(120)
    for number in range(3):  # as a node leaves them that dies before it tidies up
        study.paths.trial(number).mkdir(exist_ok=True)
        (study.paths.trial(number) / "checkpoint.pt").write_text("state")
    (study.paths.trial(2) / "notes.txt").write_text("the objective's own")
    study.paths.logs.mkdir(exist_ok=True)
    (study.paths.logs / "worker.log").write_text("long")
    before = files(study.paths.folder)
    told = clean(study.paths.folder)
    assert told.returncode == 0, told.stderr
    assert "a dry run" in told.stdout
    assert files(study.paths.folder) == before
    best = best_trial(study)
    assert best is not None
    gone = {f"trials/{n:05d}/checkpoint.pt" for n in range(3) if n != best.number} | {"logs/worker.log"}
    clean(study.paths.folder, "--remove")
    assert {path.name for path in study.paths.trials.iterdir()} == {f"{best.number:05d}", "00002"}
    assert before - files(study.paths.folder) == gone
    assert "nothing to remove" in clean(study.paths.folder, "--remove").stdout


def test_of_workers_logs_only_what_failed_trials_wrote_stays(studies: Any) -> None:
    study = studies.create("out_of_gpu_memory", trials=4, workers=1)
    studies.launch(study)
    studies.finish(study)
    (log,) = study.paths.logs.glob("*/worker_000.log")
    whole = log.read_text()
    done = clean(study.paths.folder, "--remove")
    assert done.returncode == 0, done.stderr
    assert not log.exists()
    assert (log.parent / "node.log").exists()
    kept = {path.name: path.read_text() for path in study.paths.failed_logs.iterdir()}
    assert sorted(kept) == ["trial_00000.log", "trial_00002.log"]
    for number in (0, 2):
        text = kept[f"trial_{number:05d}.log"]
        assert text in whole
        assert f"trial {number} begins" in text and "Tried to allocate 99 GiB" in text
        assert f"trial {number + 1} begins" not in text


def test_a_log_in_which_a_failed_trial_is_not_found_stays_whole_and_is_told(studies: Any) -> None:
    """As an objective leaves it that makes its process log in another form, or not at all."""
    study = studies.create("out_of_gpu_memory", trials=4, workers=1)
    studies.launch(study)
    studies.finish(study)
    (log,) = study.paths.logs.glob("*/worker_000.log")
    before, begins, after = log.read_text().partition(" INFO hpcjobs.worker: trial 2 begins\n")
    assert begins, "the third of four trials, of which it and the first fail"
    log.write_text(f"{before}\ntrial 2 begins\n{after}")
    other = log.parent / "worker_001.log"  # of a worker that ran no failed trial
    other.write_text("another log\n")
    whole = log.read_text()
    told = [clean(study.paths.folder, *more).stdout for more in ([], ["--remove"], ["--remove"])]
    assert log.read_text() == whole
    kept = f"kept whole: {log.relative_to(study.paths.folder)}, in which no beginning was found of 1 failed trial"
    assert [kept in text for text in told] == [True, True, True]
    assert not any(f"{log.name}  (" in text for text in told), "nothing says that it would go"
    assert not other.exists()
    (first,) = study.paths.failed_logs.iterdir()
    assert first.name == "trial_00000.log"


def test_of_a_failed_trial_whose_worker_is_not_known_all_logs_stay_that_may_have_it(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    (trial,) = study.trials()
    study.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    logs = [study.paths.worker_log("1_0", worker) for worker in range(2)]
    logs[0].parent.mkdir(parents=True)
    for log in logs:
        log.write_text("something\n")
    done = clean(study.paths.folder, "--remove")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kept whole") == 2
    assert all(log.exists() for log in logs)


def test_the_log_of_a_trial_that_ran_in_several_processes_has_all_its_parts() -> None:
    log = b"""\
t INFO hpcjobs.worker: worker 0 of 7_0, process 12, device cpu
t INFO hpcjobs.worker: trial 3 begins
3 prints: trial 4 begins
t INFO hpcjobs.worker: worker 0 of 7_0, process 13, device cpu
of no trial
t INFO hpcjobs.worker: trial 4 begins
t INFO hpcjobs.worker: trial 3 begins
3 again
"""
    begins = b"t INFO hpcjobs.worker: trial %d begins\n"
    assert list(stretches(log)) == [
        (3, begins % 3 + b"3 prints: trial 4 begins\n"),
        (4, begins % 4),
        (3, begins % 3 + b"3 again\n"),
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (2_500_000, "2.5 MB"),
     (3_200_000_000, "3.2 GB"), (1_500_000_000_000_000, "1500.0 TB")],
)  # fmt: skip
def test_sizes_have_the_unit_in_which_they_read_well(size: int, text: str) -> None:
    assert size_text(size) == text


def test_small_files_are_told_with_their_size_and_so_is_the_sum(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    studies.worker(study).wait(120)
    study.paths.submitit.mkdir()
    (study.paths.submitit / "1_0_log.out").write_bytes(b"x" * 1500)
    making = study.paths.folder / ".final.0a1b2c3d"  # as hpcjobs.final leaves it that is killed
    making.mkdir()
    (making / "study.yaml").write_bytes(b"x" * 20)
    lines = [line.split("  (")[0].split() for line in clean(study.paths.folder, "--remove").stdout.splitlines()]
    assert lines == [
        ["20", "B", making.name], ["1.5", "kB", "submitit"], ["1.5", "kB", "in", "all", "removed"],
    ]  # fmt: skip
    assert not making.exists()


def test_a_link_goes_and_what_it_points_to_stays(studies: Any, tmp_path: Path) -> None:
    study = studies.create("quadratic", trials=1)
    studies.worker(study).wait(120)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    study.paths.submitit.symlink_to(elsewhere)
    clean(study.paths.folder, "--remove")
    assert not study.paths.submitit.exists()
    assert (elsewhere / "kept").exists()


def test_a_study_that_has_not_ended_is_refused(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    done = clean(study.paths.folder, "--remove")
    assert done.returncode == 2
    assert "the study has not ended" in done.stderr


@pytest.mark.parametrize(("age_s", "code"), [(0.0, 2), (3600.0, 0)])
def test_a_node_that_has_not_ended_is_waited_for_unless_it_is_silent(age_s: float, code: int, studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    studies.worker(study).wait(120)
    NodeReport("17_0", "a", "elsewhere", "nid001", 1, "x", state="running").write(study.paths)
    then = time.time() - age_s
    os.utime(study.paths.node_file("17_0"), (then, then))
    done = clean(study.paths.folder)
    assert done.returncode == code
    assert ("all trials have ended, but 1 node not yet (nid001)" in done.stderr) == (code == 2)
