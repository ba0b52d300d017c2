"""What running trials tell the sampler: as much as they have reported."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState, create_trial

from hpcjobs.config import StudyConfig
from hpcjobs.sampling import make_sampler, suggest
from hpcjobs.tpe import ReportsTPESampler

SPACE = {"x": {"type": "uniform", "min": 0.0, "max": 1.0}}


def study_with_good_ones_running(reports: bool) -> optuna.Study:
    """30 trials were pruned after one epoch, the better the nearer to 0.3; 8 near 0.8 run, and are better yet."""
    study = optuna.create_study(direction="maximize")
    space = {"x": FloatDistribution(0.0, 1.0)}
    for number in range(30):
        x = number / 29
        value = 0.5 - abs(x - 0.3)
        study.add_trial(
            create_trial(
                state=TrialState.PRUNED, value=value, params={"x": x}, distributions=space,
                intermediate_values={1: value},
            )
        )  # fmt: skip
    for number in range(8):
        values = {1: 0.9, 2: 0.95} if reports else {}
        x = 0.77 + 0.01 * number
        study.add_trial(
            create_trial(
                state=TrialState.RUNNING, params={"x": x}, distributions=space, intermediate_values=values
            )
        )  # fmt: skip
    return study


def draws(study: optuna.Study, sampler: type[TPESampler], **options: Any) -> list[float]:
    found = []
    for seed in range(20):
        study.sampler = sampler(seed=seed, constant_liar=True, **options)
        trial = study.ask()
        found.append(trial.suggest_float("x", 0.0, 1.0))
        study.tell(trial, state=TrialState.FAIL)
    return found


@pytest.mark.parametrize("multivariate", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_it_looks_where_the_running_trials_are_good(multivariate: bool) -> None:
    study = study_with_good_ones_running(reports=True)
    near = [sum(0.65 < x < 0.95 for x in draws(study, sampler, multivariate=multivariate))
            for sampler in (ReportsTPESampler, TPESampler)]  # fmt: skip
    assert near[0] >= 15
    assert near[1] <= 5


@pytest.mark.filterwarnings("ignore")
def test_where_running_trials_have_not_reported_it_looks_elsewhere() -> None:
    study = study_with_good_ones_running(reports=False)
    assert sum(0.7 < x < 0.9 for x in draws(study, ReportsTPESampler, multivariate=True)) <= 3


@pytest.mark.filterwarnings("ignore")
def test_the_random_start_is_over_when_ten_trials_have_reported() -> None:
    study = optuna.create_study(direction="maximize")
    trials = [study.ask({"x": FloatDistribution(0.0, 1.0)}) for _ in range(12)]
    random = draws(study, ReportsTPESampler)
    for trial in trials[:9]:
        trial.report(1.0, 1)
    assert draws(study, ReportsTPESampler) == random
    trials[9].report(1.0, 1)
    assert draws(study, ReportsTPESampler) != random


def test_a_study_draws_so_and_its_journal_keeps_the_trials_as_they_are(studies: Any) -> None:
    study = studies.create("quadratic", trials=3, direction="maximize", seed=1)
    for trial_id in (trial._trial_id for trial in study.trials()):
        study.storage.set_trial_state_values(trial_id, TrialState.RUNNING)
    ids = [trial._trial_id for trial in study.trials()]
    for trial_id in ids:
        trial = optuna.Trial(study.optuna_study(study.trial(trial_id).number), trial_id)
        assert isinstance(trial.study.sampler, ReportsTPESampler)
        suggest(trial, study.file.study)
        trial.report(0.5, 1)
    assert [trial.state for trial in study.trials()] == [TrialState.RUNNING] * 3


def test_its_options_are_those_of_tpe() -> None:
    sampler = {"name": "tpe", "options": {"n_startup_trials": 3, "multivariate": False}}
    made = make_sampler(StudyConfig.model_validate({"parameters": SPACE, "sampler": sampler}))
    assert isinstance(made, ReportsTPESampler)
    assert made._n_startup_trials == 3
