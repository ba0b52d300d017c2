"""What an objective can rely on in its context."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from hpcjobs.budget import TrialTaken, claim, hand_back
from hpcjobs.context import HandBack, TrialContext
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.owners import Owner
from hpcjobs.recovery import recover
from hpcjobs.study import open_study
from hpcjobs.trial_files import append_to_curves, read_curves


class StoppedClock:
    """The worker's part, set by hand."""

    def __init__(self) -> None:
        self.stopped = False
        self.left: float | None = None
        self.seen: list[tuple[int, float]] = []

    def stop_ordered(self) -> bool:
        return self.stopped

    def seconds_left(self) -> float | None:
        return self.left

    def progress(self, epoch: int, value: float, figures: dict[str, float], epoch_s: float) -> None:
        self.seen.append((epoch, value))


def claimed(study: Any, token: str = "mine", clock: StoppedClock | None = None) -> TrialContext:
    trial_id = claim(study, Owner.of_this_process(element="e", agent="a", worker=0, token=token))
    trial = optuna.Trial(study.optuna_study(), trial_id)
    folder = study.paths.trial(trial.number)
    folder.mkdir(parents=True, exist_ok=True)
    return TrialContext(
        trial=trial, token=token, folder=folder, curves=study.paths.worker_curves("e", 0), data=None, epochs=5,
        device="cpu", clock=clock or StoppedClock(),
    )  # fmt: skip


def test_reports_reach_the_journal_the_curve_and_the_worker(studies: Any) -> None:
    study, clock = studies.create("quadratic"), StoppedClock()
    context = claimed(study, clock=clock)
    context.report(1, 0.5, map50=0.6)
    context.report(2, 0.7, map50=0.8)
    assert study.trials()[0].intermediate_values == {1: 0.5, 2: 0.7}
    assert read_curves(study) == [
        {"trial": 0, "step": 1, "value": 0.5, "map50": 0.6},
        {"trial": 0, "step": 2, "value": 0.7, "map50": 0.8},
    ]
    assert clock.seen == [(1, 0.5), (2, 0.7)]
    assert context.figures == {"map50": 0.8}


def test_reports_hold_what_json_can_hold(studies: Any) -> None:
    study = studies.create("quadratic")
    context = claimed(study)
    context.report(np.int64(1), np.float32(0.5), loss=float("nan"), speed=np.float64(2.0))
    with pytest.raises(TypeError):
        context.report(1.5, 0.5)  # type: ignore[arg-type]
    assert read_curves(study) == [{"trial": 0, "step": 1, "value": 0.5, "speed": 2.0}]
    assert context.figures == {"speed": 2.0}


@pytest.mark.parametrize(
    ("epoch", "figures", "found"), [(-1, {}, "found epoch -1"), (1, {"\udc80": 3.0}, r"found a figure named '\udc80'")]
)
def test_a_report_that_is_refused_leaves_nothing(epoch: int, figures: Any, found: str, studies: Any) -> None:
    study = studies.create("quadratic")
    context = claimed(study)
    with pytest.raises(ValueError, match=re.escape(found)):
        context.report(epoch, 0.5, **figures)
    assert (read_curves(study), context.figures, study.trials()[0].intermediate_values) == ([], {}, {})
    context.report(epoch=1, value=0.5, loss=0.1)
    assert read_curves(study) == [{"trial": 0, "step": 1, "value": 0.5, "loss": 0.1}]


def test_how_an_objective_lets_numpy_and_python_raise_is_not_how_pruners_work(
    studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = claimed(studies.create("quadratic", pruner={"name": "threshold", "options": {"upper": 1.0}}))

    def carelessly(trial: optuna.Trial) -> bool:
        warnings.warn("a small thing", stacklevel=1)
        return bool(np.float64(0.0) / np.float64(0.0) > 1)

    monkeypatch.setattr(optuna.Trial, "should_prune", carelessly)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        context.report(1, 0.5)
        with pytest.raises(FloatingPointError):
            np.float64(0.0) / np.float64(0.0)
        with pytest.raises(UserWarning, match="its own"):
            warnings.warn("its own", stacklevel=1)


def curve(study: Any) -> list[tuple[int, int, float]]:
    return [(row["trial"], row["step"], row["value"]) for row in read_curves(study)]


def test_the_curve_has_each_step_once_also_if_the_run_before_died_while_it_wrote(studies: Any) -> None:
    study = studies.create("quadratic")
    file = study.paths.worker_curves("e", 0)
    file.parent.mkdir()
    rows = [{"trial": 0, "step": 1, "value": 0.5}, {"trial": 0, "step": 2, "value": 0.7}]
    file.write_text("".join(f"\n{json.dumps(row)}" for row in rows)[:-4])
    context = claimed(study)
    for step, value in ((1, 0.5), (2, 0.75), (3, 1.0)):
        context.report(step, value)
    assert curve(study) == [(0, 1, 0.5), (0, 2, 0.75), (0, 3, 1.0)]


def test_the_curve_of_a_trial_that_a_damaged_journal_has_lost_is_left_out(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    claimed(study).report(1, 0.5)
    append_to_curves(study.paths.worker_curves("e", 0), 1, 1, 0.6, {})
    assert curve(study) == [(0, 1, 0.5)]


@pytest.mark.parametrize(
    "line", ["5", "null", "[]", "{}", '{"trial": 0, "step": 1}', '{"trial": -1, "step": 1, "value": 0.1}']
    + [f'{{"trial": {trial}, "step": {step}, "value": {value}}}' for trial, step, value in
       (("null", 1, 0.1), ('"0"', 1, 0.1), (0, "null", 0.1), (0, 1, '"0.1"'), (0.0, 1, 0.1))],
)  # fmt: skip
def test_a_line_that_is_no_report_is_left_out_of_the_curve(line: str, studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    claimed(study).report(1, 0.5)
    with study.paths.worker_curves("e", 0).open("a") as file:
        file.write(f"\n{line}")
    assert curve(study) == [(0, 1, 0.5)]


def test_the_curve_of_a_recovered_trial_is_one_with_that_of_its_successor(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    claimed(study).report(1, 0.5)
    append_to_curves(study.paths.worker_curves("e", 0), 0, 2, 0.6, {})  # and died before the report
    recover(study, 0, "mine", Failure(FailureClass.WORKER, "killed"))
    context = claimed(study, "next")
    for step, value in ((2, 0.7), (3, 0.8)):
        context.report(step, value)
    assert curve(study) == [(1, 1, 0.5), (1, 2, 0.7), (1, 3, 0.8)]


def test_a_step_reported_by_an_earlier_run_is_not_written_again(studies: Any) -> None:
    study = studies.create("quadratic")
    claimed(study).report(1, 0.5)
    hand_back(study, 0, "mine")
    context = claimed(study, "next")
    context.report(1, 0.9)
    context.report(2, 0.7)
    assert study.trials()[0].intermediate_values == {1: 0.5, 2: 0.7}
    assert curve(study) == [(0, 1, 0.5), (0, 2, 0.7)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_means_diverged(value: float, studies: Any) -> None:
    study = studies.create("quadratic")
    with pytest.raises(ArithmeticError):
        claimed(study).report(1, value)
    assert study.trials()[0].intermediate_values == {}


def test_a_report_of_a_trial_that_was_recovered_says_so(studies: Any) -> None:
    study = studies.create("quadratic")
    context = claimed(study)
    recover(study, 0, "mine", Failure(FailureClass.WORKER, "killed"))
    with pytest.raises(TrialTaken):
        context.report(1, 0.5)
    assert study.trials()[0].state == TrialState.FAIL


def test_quick_reports_too_see_that_the_trial_was_recovered(studies: Any) -> None:
    """Taken by another process, a moment after the last look at the journal."""
    study = studies.create("quadratic")
    context = claimed(study)
    context.report(1, 0.5)
    recover(open_study(study.paths), 0, "mine", Failure(FailureClass.NODE, "requeued"))
    with pytest.raises(TrialTaken):
        context.report(2, 0.6)


def test_a_report_of_a_trial_that_runs_elsewhere_says_so(studies: Any) -> None:
    study = studies.create("quadratic")
    context = claimed(study)
    hand_back(study, 0, "mine")
    claimed(study, "next")
    with pytest.raises(TrialTaken):
        context.report(1, 0.5)


def test_neither_hand_back_nor_taken_is_caught_by_except_exception() -> None:
    assert not issubclass(HandBack, Exception)
    assert not issubclass(TrialTaken, Exception)


def test_a_report_hands_back_when_the_worker_must_stop(studies: Any) -> None:
    study, clock = studies.create("quadratic"), StoppedClock()
    context = claimed(study, clock=clock)
    assert not context.stop_requested
    clock.stopped = True
    assert context.stop_requested
    with pytest.raises(HandBack):
        context.report(1, 0.5)
    assert study.trials()[0].intermediate_values == {1: 0.5}


def test_an_objective_that_does_not_poll_stops_where_another_epoch_does_not_fit(studies: Any) -> None:
    clock = StoppedClock()
    context = claimed(studies.create("quadratic"), clock=clock)
    context.timing.epoch_s = 10.0
    clock.left = 100.0
    context.report(1, 0.5)
    clock.left = 11.0
    with pytest.raises(HandBack):
        context.report(2, 0.5)


def test_an_objective_that_polls_goes_on_to_the_last_step(studies: Any) -> None:
    clock = StoppedClock()
    context = claimed(studies.create("quadratic"), clock=clock)
    context.timing.epoch_s = 10.0
    clock.left = 1.0
    assert not context.stop_requested
    context.report(1, 0.5)
    assert clock.seen == [(1, 0.5)]


def test_the_last_epoch_is_never_handed_back_for_want_of_time(studies: Any) -> None:
    clock = StoppedClock()
    context = claimed(studies.create("quadratic"), clock=clock)
    context.timing.epoch_s = 10.0
    clock.left = 1.0
    context.report(5, 0.5)
    assert clock.seen == [(5, 0.5)]


def test_the_pruner_of_the_study_file_ends_a_trial(studies: Any) -> None:
    study = studies.create("quadratic", pruner={"name": "threshold", "options": {"upper": 1.0}})
    context = claimed(study)
    context.report(1, 0.5)
    with pytest.raises(optuna.TrialPruned):
        context.report(2, 5.0)


def test_the_first_trial_with_given_parameters_is_never_pruned_nor_are_those_that_go_on_from_it(studies: Any) -> None:
    never = {"name": "threshold", "options": {"upper": 0.0}}
    study = studies.create("quadratic", pruner=never, trials=2, starts=[{"x": 0.0}, {"x": 1.0}])
    claimed(study).report(1, 0.5)
    second = claimed(study, token="another")
    with pytest.raises(optuna.TrialPruned):
        second.report(1, 0.5)
    recover(study, 0, "mine", Failure(FailureClass.WORKER, "killed"))
    successor = claimed(study, token="a third")
    assert successor.number == 2
    successor.report(2, 0.5)
