import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from autospeed_model import checkpoint
from autospeed_model.errors import DivergedError, UserError
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.objective import train_trial
from autospeed_model.schedule import LinearSchedule

PARAMS = {"batch_size": 4, "warmup_epochs": 1}


class HandedBack(BaseException):
    pass


class Pruned(BaseException):
    pass


@dataclass
class Context:
    """What a worker gives to a trial; asks it to stop at the poll numbered ``stop_at``."""

    folder: Path
    data: Path | None
    epochs: int = 2
    device: str = "cpu"
    stop_at: int | None = None
    prune_at: int | None = None
    polls: int = 0
    reports: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def stop_requested(self) -> bool:
        self.polls += 1
        return self.polls == self.stop_at

    def hand_back(self) -> None:
        raise HandedBack

    def report(self, epoch: int, value: float, **figures: float) -> None:
        assert self.checkpoint.exists()
        self.reports.append((epoch, value, figures))
        if epoch == self.prune_at:
            raise Pruned


def weights(context: Context) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.load(context.checkpoint, checkpoint.TRAINING)["weights"]
    return found


def test_a_trial_reports_every_epoch_and_returns_the_last_map(squares_folder: Path, tmp_path: Path) -> None:
    context = Context(tmp_path, squares_folder)
    value = train_trial(PARAMS, context)
    assert [step for step, _, _ in context.reports] == [1, 2]
    assert value == context.reports[-1][1]
    assert set(context.reports[0][2]) == {"precision", "recall", "map50", "images_per_s"}


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_a_trial_handed_back_goes_on_from_where_it_was(squares_folder: Path, tmp_path: Path, stop_at: int) -> None:
    whole = Context(tmp_path / "whole", squares_folder)
    train_trial(PARAMS, whole)
    first = Context(tmp_path / "parts", squares_folder, stop_at=stop_at)
    with pytest.raises(HandedBack):
        train_trial(PARAMS, first)
    second = Context(tmp_path / "parts", squares_folder)
    train_trial(PARAMS, second)
    found = weights(second)
    assert all(torch.equal(value, found[name]) for name, value in weights(whole).items())
    assert {step for step, _, _ in first.reports + second.reports} == {1, 2}


def test_a_report_that_was_lost_after_the_checkpoint_is_made_up_for(squares_folder: Path, tmp_path: Path) -> None:
    first = Context(tmp_path, squares_folder, prune_at=2)
    with pytest.raises(Pruned):
        train_trial(PARAMS, first)
    second = Context(tmp_path, squares_folder)
    assert train_trial(PARAMS, second) == first.reports[-1][1]
    assert second.reports == first.reports[-1:]


@pytest.mark.parametrize("damage", ["cut", "other trial"])
def test_a_trial_begins_anew_where_its_checkpoint_is_of_no_use(
    squares_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    context = Context(tmp_path, squares_folder, epochs=1)
    value = train_trial(PARAMS, context)
    assert "begins anew" not in caplog.text
    first, saved = weights(context), checkpoint.load(context.checkpoint, checkpoint.TRAINING)
    if damage == "cut":
        context.checkpoint.write_bytes(context.checkpoint.read_bytes()[:-1000])
    else:
        saved["hyperparameters"]["momentum"] = 0.5
        checkpoint.save(context.checkpoint, checkpoint.TRAINING, saved)
    assert train_trial(PARAMS, context) == value
    assert f"the training begins anew: {context.checkpoint}: " in caplog.text
    second = weights(context)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_trial_whose_weights_diverge_says_so(
    squares_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whether a large finite rate diverges in a few steps depends on the processor's rounding
    monkeypatch.setattr(LinearSchedule, "at", lambda schedule, step: math.inf)
    with pytest.raises(DivergedError, match="not finite"):
        train_trial(PARAMS, Context(tmp_path, squares_folder))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_lrr": 1}, "did you mean 'max_lr'"),
        ({"momentum": 3}, "momentum is 3"),
        ({"epochs": 3, "size": "q"}, "size is"),
    ],
)
def test_a_parameter_that_is_wrong_is_told(
    squares_folder: Path, tmp_path: Path, params: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train_trial(params, Context(tmp_path, squares_folder))


def test_without_a_dataset_there_is_nothing_to_train(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a dataset"):
        train_trial({}, Context(tmp_path, None))


def test_what_a_study_is_checked_against_names_every_hyper_parameter() -> None:
    assert set(Hyperparameters().to_mapping()) < set(train_trial.parameters)  # type: ignore[attr-defined]
    assert train_trial.needs_data  # type: ignore[attr-defined]
