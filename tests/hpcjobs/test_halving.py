"""Asynchronous halving: who goes on at a rung, also after trials were handed back or recovered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from hpcjobs.budget import claim, hand_back
from hpcjobs.config import NamedWithOptions, StudyConfig
from hpcjobs.errors import UserError
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.halving import HalvingPruner, rungs_of
from hpcjobs.load import load_study
from hpcjobs.owners import Owner
from hpcjobs.recovery import recover
from hpcjobs.sampling import check_sampling, make_pruner, make_sampler, suggest

ASHA = NamedWithOptions(name="asha")


def study_with(curves: list[list[float]], direction: str = "maximize") -> optuna.Study:
    """A study whose trials reported these values from epoch 1 on, each at its own later state."""
    study = optuna.create_study(direction=direction)
    for number, curve in enumerate(curves):
        state = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING][number % 3]
        value = curve[-1] if state != TrialState.RUNNING else None
        study.add_trial(create_trial(state=state, value=value, intermediate_values=dict(enumerate(curve, start=1))))
    return study


def goes_on(study: optuna.Study, values: list[float], epochs: int = 9, **options: int) -> bool:
    """Whether a trial goes on that has reported these values from epoch 1 on."""
    trial = study.ask()
    for epoch, value in enumerate(values, start=1):
        trial.report(value, epoch)
    return not HalvingPruner(epochs, **options).prune(study, study.trials[trial.number])


@pytest.mark.parametrize(
    ("epochs", "first", "factor", "rungs"),
    [(5, 1, 3, (1, 3)), (15, 1, 3, (1, 3, 9)), (27, 1, 3, (1, 3, 9)), (16, 2, 2, (2, 4, 8)), (1, 1, 3, ())],
)  # fmt: skip
def test_rungs_are_epochs_before_the_last_one(epochs: int, first: int, factor: int, rungs: tuple[int, ...]) -> None:
    assert rungs_of(epochs, first, factor) == rungs


def test_the_best_third_goes_on_whatever_the_others_do_now() -> None:
    values = [[0.1], [0.2], [0.3], [0.4], [0.5], [0.6], [0.7], [0.8]]
    assert [goes_on(study_with(values), [value]) for value in (0.55, 0.65, 0.75, 0.9)] == [False, True, True, True]
    assert [goes_on(study_with(values, "minimize"), [value]) for value in (0.05, 0.15, 0.25, 0.45)] == [
        True, True, True, False,
    ]  # fmt: skip


def test_a_later_rung_keeps_a_share_of_all_that_started() -> None:
    """17 and the trial itself started, 8 of them came to epoch 3, which a ninth of 18 may leave: two."""
    curves = [[0.5]] * 9 + [[0.5, 0.5, value] for value in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)]
    assert [goes_on(study_with(curves), [0.5, 0.5, value]) for value in (0.65, 0.75)] == [False, True]
    assert not goes_on(study_with(curves[1:]), [0.5, 0.5, 0.75])  # of 17 one


def test_the_first_rung_can_be_stricter_than_the_others() -> None:
    curves = [[0.01 * number] * 2 for number in range(31)]
    options = {"reduction_factor": 2, "first_reduction_factor": 8}
    assert [goes_on(study_with(curves), [value], **options) for value in (0.265, 0.275)] == [False, True]  # 4 of 32
    assert [goes_on(study_with(curves), [0.5, value], **options) for value in (0.285, 0.295)] == [False, True]  # 2


def test_between_rungs_nobody_is_stopped_and_the_best_so_far_never() -> None:
    assert goes_on(study_with([[0.5, 0.5]] * 9), [0.5, 0.1])
    assert goes_on(study_with([]), [0.1])
    assert goes_on(study_with([[0.1]]), [0.2])
    assert not goes_on(study_with([[0.5]]), [0.1])


def test_an_objective_that_reports_only_later_epochs_is_halved_too() -> None:
    study = optuna.create_study(direction="maximize")
    for value in range(17):
        study.add_trial(create_trial(state=TrialState.PRUNED, value=value, intermediate_values={3: float(value)}))
    trials = [study.ask() for _ in range(2)]
    for trial, value in zip(trials, (14.5, 15.5), strict=True):
        trial.report(value, 3)
    pruner = HalvingPruner(9)
    assert [pruner.prune(study, study.trials[trial.number]) for trial in trials] == [True, False]


def test_a_recovered_trial_counts_once_and_not_against_its_successor(studies: Any) -> None:
    study = studies.create("quadratic", trials=3, direction="maximize", epochs=15, pruner=ASHA)
    owner = Owner.of_this_process(element="e", agent="a", worker=0, token="t")
    first = claim(study, owner)
    assert first is not None
    begun = optuna.Trial(study.optuna_study(), first)
    suggest(begun, study.file.study)
    begun.report(0.9, 3)
    recover(study, first, "t", Failure(FailureClass.WORKER, "died"))
    successor = claim(study, owner)
    assert successor is not None
    again = optuna.Trial(study.optuna_study(), successor)
    assert not again.should_prune()
    others = []
    for value in (0.1, 0.2):
        trial_id = claim(study, owner)
        assert trial_id is not None
        others.append(optuna.Trial(study.optuna_study(), trial_id))
        others[-1].report(value, 3)
    # of three lines of work one goes on; the lost trial and its successor are one of them
    pruner = HalvingPruner(15)
    seen = [pruner._reports_of_others(study.trials(), study.trial(trial._trial_id)) for trial in (again, others[0])]
    assert seen == [[{3: 0.1}, {3: 0.2}], [{3: 0.2}, {3: 0.9}]]
    assert not again.should_prune()
    assert [trial.should_prune() for trial in others] == [True, True]


def test_a_trial_that_was_handed_back_is_judged_as_before(studies: Any) -> None:
    study = studies.create("quadratic", trials=3, direction="maximize", epochs=15, pruner=ASHA)
    owner = Owner.of_this_process(element="e", agent="a", worker=0, token="t")
    ids = [claim(study, owner) for _ in range(3)]
    trials = [optuna.Trial(study.optuna_study(), number) for number in ids if number is not None]
    for trial, value in zip(trials, (0.5, 0.3, 0.4), strict=True):
        trial.report(value, 3)
    before = [trial.should_prune() for trial in trials]
    hand_back(study, trials[0]._trial_id, "t")
    claim(study, owner)
    assert [trial.should_prune() for trial in trials] == before == [False, True, True]


@pytest.mark.parametrize(
    "options",
    [
        {"min_resource": 0},
        {"reduction_factor": 1},
        {"first_reduction_factor": 1},
        {"min_resource": "auto"},
        {"eta": 3},
    ],
)
def test_wrong_options_are_the_users_mistake(options: dict[str, Any]) -> None:
    space = {"x": {"type": "uniform", "min": 0.0, "max": 1.0}}
    pruner = {"name": "asha", "options": options}
    with pytest.raises(UserError, match="asha"):
        make_pruner(StudyConfig.model_validate({"parameters": space, "pruner": pruner}))


@pytest.mark.parametrize(
    ("text", "expected", "without_file"),
    [
        (
            "pruner: {name: asha, options: {reduction_facto: 2}}",
            "pruner.options.reduction_facto: found unknown option 'reduction_facto' of pruner 'asha'; allowed: "
            "first_reduction_factor, min_resource, reduction_factor; did you mean 'reduction_factor'?",
            "study: unknown option 'reduction_facto' of pruner 'asha'; allowed are first_reduction_factor, ",
        ),
        (
            "pruner: {name: asha, options: {epochs: 2}}",
            "unknown option 'epochs' of pruner 'asha'; allowed: first_reduction_factor, min_resource, reduction_factor",
            "unknown option 'epochs'",
        ),
        (
            "pruner: {name: none, options: {patience: 2}}",
            "unknown option 'patience' of pruner 'none'; allowed: none",
            "allowed are none",
        ),
        (
            "sampler: {name: random, options: {seed: 2}}",
            "sampler.options.seed: found unknown option 'seed' of sampler 'random'; allowed: none",
            "unknown option 'seed'",
        ),
        (
            "sampler: {name: tpee}",
            "sampler.name: found unknown sampler 'tpee'; allowed: cmaes, gp, qmc, random, tpe; did you mean 'tpe'?",
            "study: unknown sampler 'tpee'; allowed are cmaes, gp, qmc, random, tpe; did you mean 'tpe'?",
        ),
    ],
)
def test_what_is_misspelt_is_told_with_all_that_is_allowed(
    text: str, expected: str, without_file: str, tmp_path: Path
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"parameters:\n  x: {{type: uniform, min: 0, max: 1}}\n{text}\n")
    study, document = load_study(path)
    with pytest.raises(UserError, match=re.escape(f"{path}, line 3, ")) as error:
        check_sampling(study, document)
    assert expected in str(error.value)
    with pytest.raises(UserError, match=re.escape(without_file)):
        check_sampling(study)


def test_no_two_of_64_running_trials_are_alike() -> None:
    """Drawn as workers do it: each trial by a sampler of its own, after some have ended; constant liar is on."""
    space = {
        "min_lr": {"type": "loguniform", "min": 1e-6, "max": 1e-4},
        "box": {"type": "uniform", "min": 5.0, "max": 10.0},
        "warmup_epochs": {"type": "int", "min": 0, "max": 9},
        "batch_size": {"type": "categorical", "values": [8, 16, 32, 64]},
    }
    config = StudyConfig.model_validate({"parameters": space, "seed": 7})
    study = optuna.create_study(direction="maximize")
    for number in range(40):
        study.sampler = make_sampler(config, number)
        trial = study.ask()
        values = suggest(trial, config)
        study.tell(trial, -abs(float(values["box"]) - 8.0))  # type: ignore[arg-type]
    running = []
    for number in range(40, 104):
        study.sampler = make_sampler(config, number)
        running.append(tuple(suggest(study.ask(), config).values()))
    assert len(set(running)) == 64
    boxes = sorted(float(values[1]) for values in running)  # type: ignore[arg-type]
    assert boxes[-1] - boxes[0] > 1.0
