"""The exact budget, hand back and recovery, on real journals and with real processes at once."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpcjobs.budget import (
    HISTORY,
    TrialTaken,
    claim,
    count,
    finish,
    go_on,
    hand_back,
    predecessor,
    trials_left,
    why_stopped,
)
from hpcjobs.config import NamedWithOptions
from hpcjobs.errors import UserError
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.guardian import recover_lost
from hpcjobs.journal_lock import FencedError
from hpcjobs.load import read_study_file, write_study_file
from hpcjobs.owners import OWNER, Owner
from hpcjobs.paths import StudyPaths
from hpcjobs.recovery import MOST_DEATHS_WITHOUT_PROGRESS, inherit_files, recover
from hpcjobs.sampling import make_pruner, make_sampler, suggest
from hpcjobs.study import OpenStudy, best_starts, create_study, default_starts, extend, open_study

CASES = Path(__file__).parent / "cases"
DEATH = Failure(FailureClass.WORKER, "killed")
FORK = multiprocessing.get_context("fork")


def owner(token: str = "mine") -> Owner:
    return Owner.of_this_process(element="here_1", agent="test", worker=0, token=token)


def all_at_once(function: Any, arguments: list[Any]) -> list[Any]:
    """Call ``function`` in as many processes as there are arguments."""
    with FORK.Pool(len(arguments)) as pool:
        return pool.map(function, arguments, chunksize=1)


def test_a_new_study_has_all_its_trials_waiting(studies: Any) -> None:
    study = studies.create("quadratic", trials=7)
    assert count(study).waiting == count(study).budget == 7
    stock = optuna.load_study(study_name=None, storage=study.storage)
    assert [trial.state for trial in stock.trials] == [TrialState.WAITING] * 7


def test_a_second_study_in_one_folder_is_refused(studies: Any) -> None:
    study = studies.create("quadratic")
    with pytest.raises(UserError, match="already holds a study"):
        create_study(study.paths, study.file)
    assert count(study).budget == 6


def _create(arguments: tuple[StudyPaths, Any]) -> bool:
    try:
        create_study(*arguments)
    except UserError:
        return False
    return True


def test_two_submissions_at_once_make_one_study(studies: Any, tmp_path: Path) -> None:
    files = [studies.create("quadratic", trials=trials).file for trials in (3, 4, 5, 6)]
    paths = StudyPaths(tmp_path / "other")
    made = all_at_once(_create, [(paths, file) for file in files])
    assert sorted(made) == [False, False, False, True]
    first = files[made.index(True)]
    assert read_study_file(paths) == first, "the settings are those of who made the trials"
    assert count(open_study(paths)).budget == first.study.trials


def test_a_second_study_in_a_journal_whose_settings_are_missing_writes_none(studies: Any) -> None:
    study = studies.create("quadratic")
    study.paths.config.unlink()  # as if its maker were about to write them
    with pytest.raises(UserError, match="already holds a study"):
        create_study(study.paths, study.file)
    assert not study.paths.config.exists()


def test_extending_adds_waiting_trials_and_refuses_none(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    extend(study, 3)
    assert count(study).waiting == 5
    with pytest.raises(UserError, match="at least one"):
        extend(study, 0)


@pytest.mark.parametrize("change", [{"epochs": 9}, {"fixed": {"y": 1.0}}, {"objective": "objectives:epochs"}])
def test_a_study_whose_settings_were_changed_is_refused(change: dict[str, Any], studies: Any) -> None:
    study = studies.create("quadratic")
    changed = study.file.model_copy(update={"study": study.file.study.model_copy(update=change)})
    study.paths.config.unlink()
    write_study_file(study.paths, changed)
    with pytest.raises(UserError, match=rf"study.{next(iter(change))} is .*--warm-start"):
        open_study(study.paths)


@pytest.mark.parametrize("records", [1, 2])
def test_a_journal_that_was_cut_before_its_first_trial_is_refused(records: int, studies: Any) -> None:
    paths = studies.create("quadratic").paths
    lines = paths.journal.read_bytes().splitlines(keepends=True)
    paths.journal.write_bytes(b"".join(lines[:records]))
    with pytest.raises(UserError, match="holds a study without trials: it was cut"):
        open_study(paths)


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"study\.yaml"):
        open_study(StudyPaths(tmp_path))


def _claim_all(folder: Path) -> list[int]:
    study = open_study(StudyPaths(folder))
    mine = owner(f"process {os.getpid()}")
    claimed = []
    while (trial_id := claim(study, mine)) is not None:
        claimed.append(study.trial(trial_id).number)
        finish(study, trial_id, mine.token, TrialState.COMPLETE, value=1.0)
    return claimed


def test_every_trial_is_claimed_once_however_many_want_it(studies: Any) -> None:
    study = studies.create("quadratic", trials=60)
    claimed = all_at_once(_claim_all, [study.paths.folder] * 8)
    assert sorted(number for numbers in claimed for number in numbers) == list(range(60))
    assert count(study).completed == 60


@pytest.mark.parametrize(("written", "claimed"), [(1, None), (2, 0)])
def test_a_claim_whose_lock_was_broken_counts_if_it_was_written(
    written: int, claimed: int | None, studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the trial would run for an owner that does not know of it. A claim is two records."""
    study = studies.create("quadratic", trials=2)
    confirmed = iter(range(9))

    def confirm() -> None:
        if next(confirmed) + 1 == written:
            raise FencedError("taken")

    monkeypatch.setattr(study.storage._file._lock, "confirm", confirm)
    if claimed is None:
        with pytest.raises(FencedError):
            claim(study, owner())
        assert count(study).waiting == 2
        assert claim(study, owner()) == 0
    else:
        assert claim(study, owner()) == claimed
    assert count(study).running == 1


def test_a_handed_back_trial_keeps_parameters_and_reports_and_is_taken_first(studies: Any) -> None:
    study = studies.create("quadratic")
    trial_id = claim(study, owner())
    trial = optuna.Trial(study.optuna_study(), trial_id)
    params = suggest(trial, study.file.study)
    trial.report(0.25, 1)
    assert not hand_back(study, trial_id, "somebody else")
    assert hand_back(study, trial_id, "mine")
    assert claim(study, owner("next")) == trial_id
    again = optuna.Trial(study.optuna_study(), trial_id)
    assert suggest(again, study.file.study) == params
    assert study.trial(trial_id).intermediate_values == {1: 0.25}


def test_only_its_owner_can_finish_a_trial_and_only_once(studies: Any) -> None:
    study = studies.create("quadratic")
    trial_id = claim(study, owner())
    with pytest.raises(TrialTaken):
        finish(study, trial_id, "somebody else", TrialState.COMPLETE, value=1.0)
    finish(study, trial_id, "mine", TrialState.COMPLETE, value=1.0)
    with pytest.raises(TrialTaken):
        finish(study, trial_id, "mine", TrialState.COMPLETE, value=2.0)
    assert study.trial(trial_id).value == 1.0


def test_a_pruned_trial_keeps_its_last_report_as_value(studies: Any) -> None:
    study = studies.create("quadratic")
    trial_id = claim(study, owner())
    study.storage.set_trial_intermediate_value(trial_id, 1, 0.5)
    study.storage.set_trial_intermediate_value(trial_id, 2, 0.75)
    assert finish(study, trial_id, "mine", TrialState.PRUNED).value == 0.75


def _recover(arguments: tuple[Path, int]) -> int | None:
    folder, trial_id = arguments
    return recover(open_study(StudyPaths(folder)), trial_id, "mine", DEATH)


def end_one(study: OpenStudy, failure: Failure | None) -> None:
    trial_id = claim(study, owner())
    assert trial_id is not None
    if failure is None:
        finish(study, trial_id, "mine", TrialState.COMPLETE, value=1.0)
    else:
        finish(study, trial_id, "mine", TrialState.FAIL, failure=failure)


ERROR = Failure(FailureClass.OBJECTIVE, "ImportError: no module")


def test_a_study_whose_objective_only_raises_errors_stops_until_somebody_lets_it_go_on(studies: Any) -> None:
    study = studies.create("quadratic", trials=20, stop_after_errors=3)
    for _ in range(3):
        assert why_stopped(study) is None
        end_one(study, ERROR)
    assert "3 trials failed" in (why_stopped(study) or "")
    assert "ImportError: no module" in (why_stopped(study) or "")
    assert claim(study, owner()) is None
    assert claim(open_study(study.paths), owner()) is None
    go_on(study)
    for _ in range(3):  # errors from before count no more
        assert why_stopped(study) is None
        end_one(study, ERROR)
    assert claim(study, owner()) is None
    assert (count(study).failed, count(study).waiting) == (6, 14)


@pytest.mark.parametrize(
    ("settings", "endings"),
    [
        ({"stop_after_errors": 3}, [None, ERROR, ERROR, ERROR, ERROR]),
        ({"stop_after_errors": 3}, [Failure(FailureClass.DIVERGED, "nan")] * 5),
        ({"stop_after_errors": 0}, [ERROR] * 19),
        ({}, [ERROR] * 7),
    ],
)
def test_errors_of_some_trials_stop_no_study(settings: dict[str, int], endings: list[Any], studies: Any) -> None:
    study = studies.create("quadratic", trials=20, **settings)
    for failure in endings:
        end_one(study, failure)
    assert why_stopped(study) is None
    assert claim(study, owner()) is not None


def test_a_trial_is_recovered_once_however_many_notice(studies: Any) -> None:
    study = studies.create("quadratic", trials=3)
    trial_id = claim(study, owner())
    params = suggest(optuna.Trial(study.optuna_study(), trial_id), study.file.study)
    study.storage.set_trial_intermediate_value(trial_id, 1, 0.5)
    successors = all_at_once(_recover, [(study.paths.folder, trial_id)] * 8)
    assert sorted(successors, key=str) == [3] + [None] * 7
    successor = study.trials()[3]
    assert successor.state == TrialState.WAITING
    assert successor.params == params
    assert successor.intermediate_values == {1: 0.5}
    assert successor.system_attrs == {"failed_trial": 0, "retry_history": [0]}
    counts = count(study)
    assert (counts.budget, counts.recovered, counts.failures) == (3, 1, {"worker died": 1})


def test_a_zombie_can_not_finish_what_was_recovered(studies: Any) -> None:
    study = studies.create("quadratic")
    trial_id = claim(study, owner())
    recover(study, trial_id, "mine", DEATH)
    with pytest.raises(TrialTaken):
        finish(study, trial_id, "mine", TrialState.COMPLETE, value=1.0)
    assert not hand_back(study, trial_id, "mine")
    assert count(study).budget == 6


def test_what_is_left_of_the_budget_is_known_without_a_look_at_ended_trials(
    studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studies.create("quadratic", trials=5)
    for state in (TrialState.COMPLETE, TrialState.FAIL):
        finish(study, claim(study, owner()), "mine", state, value=1.0 if state == TrialState.COMPLETE else None)
    recover(study, claim(study, owner()), "mine", DEATH)
    successor = claim(study, owner())
    assert successor is not None
    # a recovery that died half-way: two trials are one of the budget
    history = {HISTORY: [study.trial(successor).number]}
    study.storage.create_new_trial(
        study.study_id, optuna.trial.create_trial(state=TrialState.WAITING, system_attrs=history)
    )
    assert count(study).left == 3
    anew = open_study(study.paths)
    asked: list[Any] = []
    real = OpenStudy.trials
    monkeypatch.setattr(OpenStudy, "trials", lambda study, states=None: asked.append(states) or real(study, states))
    assert trials_left(study) == 3
    assert trials_left(anew) == 3
    assert set(asked) == {(TrialState.RUNNING, TrialState.WAITING)}


def test_a_recovery_that_died_half_way_is_completed_without_a_second_successor(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    trial_id = claim(study, owner())
    history = {"failed_trial": 0, HISTORY: [0]}
    waiting = optuna.trial.create_trial(state=TrialState.WAITING, system_attrs=history)
    study.storage.create_new_trial(study.study_id, waiting)
    with pytest.raises(TrialTaken):
        finish(study, trial_id, "mine", TrialState.COMPLETE, value=1.0)
    recover(study, trial_id, "mine", DEATH)
    assert [predecessor(trial) for trial in study.trials()].count(0) == 1
    assert count(study).budget == 2


def test_a_trial_that_kills_every_worker_ends_as_failed(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    for _ in range(MOST_DEATHS_WITHOUT_PROGRESS + 1):
        trial_id = claim(study, owner())
        assert trial_id is not None
        recover(study, trial_id, "mine", DEATH)
    counts = count(study)
    assert (counts.left, counts.failed, counts.budget) == (0, 1, 1)


def test_deaths_with_progress_in_between_are_forgiven(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    for step in range(2 * MOST_DEATHS_WITHOUT_PROGRESS):
        trial_id = claim(study, owner())
        study.storage.set_trial_intermediate_value(trial_id, step, 0.1)
        recover(study, trial_id, "mine", DEATH)
    assert count(study).waiting == 1


def test_lost_nodes_are_never_held_against_a_trial(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    for _ in range(2 * MOST_DEATHS_WITHOUT_PROGRESS):
        recover(study, claim(study, owner()), "mine", Failure(FailureClass.NODE, "the node went down"))
    assert count(study).waiting == 1


def test_a_successor_inherits_the_newest_checkpoint(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    for content in ("first", None):
        trial_id = claim(study, owner())
        if content:
            folder = study.paths.trial(study.trial(trial_id).number)
            folder.mkdir(parents=True)
            (folder / "checkpoint.pt").write_text(content)
            (folder / ".checkpoint.pt.x7f3").write_text("not finished")
        recover(study, trial_id, "mine", DEATH)
    inherit_files(study.paths, study.trials()[2])
    assert {path.name: path.read_text() for path in study.paths.trial(2).iterdir()} == {"checkpoint.pt": "first"}
    (study.paths.trial(2) / "checkpoint.pt").write_text("its own")
    inherit_files(study.paths, study.trials()[2])
    assert (study.paths.trial(2) / "checkpoint.pt").read_text() == "its own"


def test_a_successor_inherits_whole_trees(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    trial_id = claim(study, owner())
    old, new = study.paths.trial(0), study.paths.trial(1)
    for name in ("checkpoint.pt/.metadata", "checkpoint.pt/__0_0.distcp", "logs/run 1/events", ".notes", "notes"):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text(name)
    (old / "empty").mkdir()
    (old / ".notes.x7f3").write_text("of a write that was cut short")
    outside = study.paths.folder / "data"
    outside.mkdir()
    (outside / "large").write_text("")
    (old / "data").symlink_to(outside)
    (old / "latest").symlink_to("logs/run 1")
    (old / "newest").symlink_to(old / "logs" / "run 1")
    (old / "dangling").symlink_to("nowhere")
    recover(study, trial_id, "mine", DEATH)
    inherit_files(study.paths, study.trials()[1])
    files = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file() and not path.is_symlink()}
    assert files == {"checkpoint.pt/.metadata", "checkpoint.pt/__0_0.distcp", "logs/run 1/events", ".notes", "notes"}
    assert (new / "checkpoint.pt" / ".metadata").read_text() == "checkpoint.pt/.metadata"
    assert (new / "empty").is_dir()
    links = {path.name: path.readlink() for path in new.iterdir() if path.is_symlink()}
    inside = {"latest": Path("logs/run 1"), "newest": new / "logs" / "run 1"}
    assert links == {"data": outside, "dangling": Path("nowhere"), **inside}


def test_a_former_owner_that_still_writes_does_not_disturb_its_successor(
    studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renames its temporary file while the successor copies."""
    study = studies.create("quadratic", trials=1)
    trial_id = claim(study, owner())
    old = study.paths.trial(0)
    old.mkdir(parents=True)
    (old / "checkpoint.pt").write_text("of epoch 1")
    (old / "checkpoint.partial").write_text("of epoch 2")
    recover(study, trial_id, "mine", DEATH)
    copy = shutil.copyfile

    def rename_and_copy(source: Path, target: Path) -> None:
        if source.name == "checkpoint.partial":
            source.replace(old / "checkpoint.pt")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", rename_and_copy)
    inherit_files(study.paths, study.trials()[1])
    assert [path.name for path in study.paths.trial(1).iterdir()] == ["checkpoint.pt"]


def test_a_copy_of_a_checkpoint_that_was_cut_short_is_made_anew(studies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = studies.create("quadratic", trials=1)
    trial_id = claim(study, owner())
    for name in ("checkpoint.pt", "curve.csv"):
        study.paths.trial(0).mkdir(parents=True, exist_ok=True)
        (study.paths.trial(0) / name).write_text(f"the {name}")
    recover(study, trial_id, "mine", DEATH)
    copies = []

    def fails_at_the_second(source: Path, target: Path) -> None:
        copies.append(target)
        if len(copies) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(shutil, "copyfile", fails_at_the_second)
    with pytest.raises(OSError, match="No space left"):
        inherit_files(study.paths, study.trials()[1])
    assert not list(study.paths.trial(1).iterdir())
    inherit_files(study.paths, study.trials()[1])
    assert {path.name for path in study.paths.trial(1).iterdir()} == {"checkpoint.pt", "curve.csv"}


def test_a_live_owner_keeps_its_trial_and_a_dead_one_loses_it(studies: Any) -> None:
    study = studies.create("quadratic")
    alive = claim(study, owner("alive"))
    claim(study, dataclasses.replace(owner("dead"), start="long ago"))
    assert recover_lost(study, with_slurm=False) == [(1, 6)]
    assert study.trial(alive).state == TrialState.RUNNING


def test_a_silent_host_keeps_its_trial_as_long_as_there_is_doubt(studies: Any) -> None:
    study = studies.create("quadratic")
    elsewhere = dataclasses.replace(owner("far"), host="another", job="17", element="17_0")
    trial_id = claim(study, elsewhere)
    report = {"element": "17_0", "agent": "test", "host": "another", "node": "n1", "pid": 1, "start": "x"}
    study.paths.nodes.mkdir()
    study.paths.node_file("17_0").write_text(json.dumps(report))
    assert recover_lost(study, with_slurm=False) == []
    study.paths.node_file("17_0").write_text(json.dumps({**report, "agent": "a later run", "run": 1}))
    assert recover_lost(study, with_slurm=False) == [(0, 6)]
    assert study.trial(trial_id).state == TrialState.FAIL


@pytest.mark.parametrize("name", [path.name for path in sorted((CASES / "journal").glob("*.log"))])
def test_an_older_journal_is_taken_over(name: str, studies: Any, tmp_path: Path) -> None:
    file = studies.create("quadratic").file
    paths = StudyPaths(tmp_path / "old")
    paths.folder.mkdir()
    shutil.copyfile(CASES / "journal" / name, paths.journal)
    shutil.copyfile(studies.create("quadratic").paths.config, paths.config)
    study = open_study(paths)
    running = [trial.number for trial in study.trials((TrialState.RUNNING,))]
    assert all(OWNER not in trial.user_attrs for trial in study.trials())
    assert [number for number, _ in recover_lost(study, with_slurm=False)] == running
    counts = count(open_study(paths))
    assert counts.completed == 4
    assert (counts.running, counts.waiting, counts.recovered) == (0, len(running), len(running))
    assert file.study.objective == study.file.study.objective


def test_what_a_trial_draws_depends_on_its_number_not_on_the_worker(studies: Any) -> None:
    def draw(study: OpenStudy) -> list[float]:
        drawn = []
        while (trial_id := claim(study, owner())) is not None:
            trial = optuna.Trial(study.optuna_study(study.trial(trial_id).number), trial_id)
            drawn.append(suggest(trial, study.file.study)["x"])
        return drawn

    random = NamedWithOptions(name="random")
    first = draw(studies.create("quadratic", seed=3, sampler=random))
    assert first == draw(studies.create("quadratic", seed=3, sampler=random))
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(("declared", "starts"), [({"x": 1.5, "y": 3}, [{"x": 1.5}]), ({"x": 99.0}, []), ({}, [])])
def test_the_first_trial_takes_the_defaults_where_they_lie_in_the_search_space(
    declared: dict[str, Any], starts: list[dict[str, Any]], studies: Any
) -> None:
    file = studies.create("quadratic").file.model_copy(update={"defaults": declared})
    assert default_starts(file) == starts


def test_a_warm_start_tries_the_best_of_an_older_study_first(studies: Any) -> None:
    old = studies.create("quadratic", trials=4)
    for value in (3.0, 1.0, 2.0, 0.0):
        trial_id = claim(old, owner())
        x = 100.0 if value == 0.0 else value  # the best lies outside the new search space
        old.storage.set_trial_param(trial_id, "x", x, optuna.distributions.FloatDistribution(0.0, 200.0))
        old.storage.set_trial_param(trial_id, "gone", 1.0, optuna.distributions.FloatDistribution(0.0, 1.0))
        finish(old, trial_id, "mine", TrialState.COMPLETE, value=value)
    file = studies.create("quadratic", trials=10).file
    starts = best_starts(file, old)
    assert starts == [{"x": 1.0}, {"x": 2.0}]
    new = create_study(StudyPaths(old.paths.folder.parent / "new"), file, starts)
    drawn = []
    for _ in range(3):
        trial_id = claim(new, owner())
        trial = optuna.Trial(new.optuna_study(), trial_id)
        drawn.append(suggest(trial, new.file.study)["x"])
    assert drawn[:2] == [1.0, 2.0]
    assert drawn[2] not in (1.0, 2.0)
    assert count(new).budget == 10


def test_a_warm_start_from_a_study_that_has_nothing_to_give_is_refused(studies: Any) -> None:
    with pytest.raises(UserError, match="no completed trial"):
        best_starts(studies.create("quadratic").file, studies.create("quadratic"))


def test_an_unknown_sampler_or_option_is_the_users_mistake(studies: Any) -> None:
    study = studies.create("quadratic").file.study
    with pytest.raises(UserError, match="did you mean 'tpe'"):
        make_sampler(study.model_copy(update={"sampler": NamedWithOptions(name="tpee")}))
    with pytest.raises(UserError, match="n_startup"):
        make_sampler(study.model_copy(update={"sampler": NamedWithOptions(name="tpe", options={"n_startup": 1})}))
    with pytest.raises(UserError, match="allowed are asha"):
        make_pruner(study.model_copy(update={"pruner": NamedWithOptions(name="everything")}))


@pytest.mark.parametrize("name", ["none", "median", "percentile", "asha", "hyperband", "threshold", "patient"])
def test_every_named_pruner_can_be_made(name: str, studies: Any) -> None:
    options = {"percentile": {"percentile": 25.0}, "threshold": {"lower": 0.0}}.get(name, {})
    config = studies.create("quadratic").file.study
    pruner = NamedWithOptions(name=name, options=options)
    assert isinstance(make_pruner(config.model_copy(update={"pruner": pruner})), optuna.pruners.BasePruner)
