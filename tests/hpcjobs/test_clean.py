"""What clean takes away and what it must leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcjobs.progress import best_trial


def clean(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcjobs.clean", str(folder), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_tells_and_touches_nothing_then_checkpoints_go_and_results_stay(studies: Any) -> None:
    study = studies.create("epochs", trials=3, direction="maximize")
    studies.worker(study).wait(30)
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
    assert before - files(study.paths.folder) == gone
    assert "nothing to remove" in clean(study.paths.folder, "--remove").stdout


def test_logs_stay_as_long_as_a_trial_failed(studies: Any) -> None:
    study = studies.create("out_of_gpu_memory", trials=2)
    studies.worker(study).wait(30)
    study.paths.logs.mkdir(exist_ok=True)
    (study.paths.logs / "worker.log").write_text("why")
    clean(study.paths.folder, "--remove")
    assert (study.paths.logs / "worker.log").exists()


def test_a_link_goes_and_what_it_points_to_stays(studies: Any, tmp_path: Path) -> None:
    study = studies.create("quadratic", trials=1)
    studies.worker(study).wait(30)
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
