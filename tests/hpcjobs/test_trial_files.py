"""What trials leave in the folder: little, but never less than somebody still needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from hpcjobs.budget import claim, finish
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.owners import Owner
from hpcjobs.recovery import recover
from hpcjobs.study import OpenStudy
from hpcjobs.trial_files import tidy_up_after

DEATH = Failure(FailureClass.WORKER, "killed")


def begin(study: OpenStudy) -> int:
    """Claim the next trial and save a checkpoint, one write of which was cut short; returns its number."""
    trial_id = claim(study, Owner.of_this_process(element="e", agent="a", worker=0, token="mine"))
    assert trial_id is not None
    folder = study.paths.trial(study.trial(trial_id).number)
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").write_text("state")
    (folder / ".checkpoint.pt.x7f3").write_text("sta")
    return study.trial(trial_id).number


def end(study: OpenStudy, number: int, state: TrialState = TrialState.COMPLETE, value: float | None = None) -> None:
    trial_id = study.trials()[number]._trial_id
    tidy_up_after(study, finish(study, trial_id, "mine", state, value=value))


def folders(study: OpenStudy) -> list[int]:
    return sorted(int(path.name) for path in study.paths.trials.iterdir())


def test_of_trials_that_ended_the_best_keeps_its_checkpoint(studies: Any) -> None:
    study = studies.create("quadratic", trials=6, direction="minimize")
    numbers = [begin(study) for _ in range(5)]
    end(study, 0, value=3.0)
    assert folders(study) == numbers
    end(study, 1, value=5.0)
    assert folders(study) == [0, 2, 3, 4]
    end(study, 2, value=1.0)
    end(study, 3, TrialState.PRUNED)
    assert folders(study) == [2, 4]
    end(study, 4, TrialState.FAIL)
    assert folders(study) == [2]


def test_a_checkpoint_can_be_a_folder_or_a_link(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    for number in (begin(study), begin(study)):
        folder = study.paths.trial(number)
        (folder / "checkpoint.pt").unlink()
    first, second = study.paths.trial(0), study.paths.trial(1)
    for name in ("checkpoint.pt", ".checkpoint.pt.new"):
        (first / name / "shard").mkdir(parents=True)
        (first / name / "shard" / ".metadata").write_text("state")
    kept = second / "epoch 3"
    kept.mkdir()
    (kept / "state").write_text("state")
    (second / "checkpoint.pt").symlink_to("epoch 3")
    end(study, 0, TrialState.PRUNED)
    end(study, 1, TrialState.PRUNED)
    assert folders(study) == [1]
    assert [path.name for path in second.iterdir()] == ["epoch 3"]
    assert (kept / "state").exists()


def test_what_the_objective_keeps_for_itself_stays(studies: Any) -> None:
    study = studies.create("quadratic")
    begin(study)
    (study.paths.trial(0) / "weights.pt").write_text("mine")
    end(study, 0, TrialState.PRUNED)
    assert [path.name for path in study.paths.trial(0).iterdir()] == ["weights.pt"]


def test_what_a_recovered_trial_left_stays_until_the_last_of_its_successors_has_ended(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    first, other = begin(study), begin(study)
    recover(study, study.trials()[first]._trial_id, "mine", DEATH)
    second = begin(study)
    recover(study, study.trials()[second]._trial_id, "mine", DEATH)
    end(study, other, value=0.0)  # the best: everything that is over goes
    assert folders(study) == [first, other, second]
    third = begin(study)
    end(study, third, TrialState.PRUNED)
    assert folders(study) == [other]


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_worker(
    studies: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    study = studies.create("quadratic", trials=2)
    begin(study)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", refuse)
    end(study, 0, TrialState.PRUNED)
    assert "Stale file handle" in caplog.text
    assert study.trials()[0].state == TrialState.PRUNED


def test_a_study_has_as_many_files_after_many_trials_as_after_few(studies: Any) -> None:
    def left_by(trials: int) -> set[str]:
        study = studies.create("epochs", trials=trials, epochs=1, fixed={"epoch_s": 0.0}, direction="maximize")
        assert studies.worker(study).wait(120) == 0
        return {str(path.relative_to(study.paths.folder)) for path in study.paths.folder.rglob("*")}

    assert left_by(40) == left_by(2)
