import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autospeed_model.batches import epoch_order
from autospeed_model.errors import DivergedError, UserError
from autospeed_model.hyperparameters import Hyperparameters, TrainingOptions
from autospeed_model.packed import PackedSplit
from autospeed_model.runtime import Runtime
from autospeed_model.trainer import Callback, Record, Trainer

Squares = Callable[..., PackedSplit]
# updates of two steps
SMALL = Hyperparameters(batch_size=4, update_images=8, warmup_epochs=1)


@pytest.fixture
def make(squares: Squares) -> Callable[..., Trainer]:
    """A trainer on 18 small images: 5 steps an epoch, updates after steps 2, 4 and 5."""

    def trainer(
        hyperparameters: Hyperparameters = SMALL, runtime: Runtime | None = None, images: int = 18, **options: Any
    ) -> Trainer:
        given = TrainingOptions(**{"epochs": 2, **options})
        train, validation = squares("train", images), squares("tune_val", 5, seed=1)
        return Trainer(train, validation, hyperparameters, given, runtime or Runtime())

    return trainer


class Interrupt(Callback):
    """Saves at one of the moments when a training may be interrupted, and interrupts it."""

    def __init__(self, path: Path, moment: int) -> None:
        self.path, self.left = path, moment

    def on_update(self, trainer: Trainer) -> None:
        if self.left == 0:
            trainer.save(self.path)
            raise KeyboardInterrupt
        self.left -= 1

    def on_validation_batch(self, trainer: Trainer) -> None:
        self.on_update(trainer)


class Count(Callback):
    def __init__(self) -> None:
        self.updates = self.validation_batches = self.epochs = 0

    def on_update(self, trainer: Trainer) -> None:
        self.updates += 1

    def on_validation_batch(self, trainer: Trainer) -> None:
        self.validation_batches += 1

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        self.epochs += 1


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a training is made of, but for its times."""
    state = {f"weights.{name}": value for name, value in trainer.network.state_dict().items()}
    state |= {f"average.{name}": value for name, value in trainer.average.network.state_dict().items()}
    for index, moments in trainer.optimiser.state_dict()["state"].items():
        state[f"momentum.{index}"] = moments["momentum_buffer"]
    for record in trainer.history:
        figures = [value for name, value in record.items() if name not in ("images_per_s", "train_s")]
        state[f"history.{record['epoch']}"] = torch.tensor(figures, dtype=torch.float64)
    return state


# 3 updates and 2 validation batches an epoch.
@pytest.mark.parametrize("moment", [0, 2, 3, 6, 9])
def test_a_training_interrupted_anywhere_ends_bit_for_bit_like_one_that_was_not(
    make: Callable[..., Trainer], tmp_path: Path, moment: int, uninterrupted: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(KeyboardInterrupt):
        make().fit(Interrupt(path, moment))
    resumed = make()
    resumed.restore(path)
    resumed.fit()
    found = everything(resumed)
    assert found.keys() == uninterrupted.keys()
    assert [name for name, value in found.items() if not torch.equal(value, uninterrupted[name])] == []


@pytest.fixture(scope="module")
def uninterrupted(squares: Squares) -> dict[str, torch.Tensor]:
    train, validation = squares("train", 18), squares("tune_val", 5, seed=1)
    trainer = Trainer(train, validation, SMALL, TrainingOptions(epochs=2), Runtime())
    trainer.fit()
    assert len(trainer.optimiser.state_dict()["state"]) == len(list(trainer.network.parameters()))
    return everything(trainer)


def test_the_seed_decides_everything(make: Callable[..., Trainer], uninterrupted: dict[str, torch.Tensor]) -> None:
    other = make(seed=1)
    other.fit()
    found = everything(other)
    assert not torch.equal(found["weights.backbone.p1.conv.weight"], uninterrupted["weights.backbone.p1.conv.weight"])


def test_callbacks_are_called_at_updates_validation_batches_and_epochs(make: Callable[..., Trainer]) -> None:
    count = Count()
    make().fit(count)
    assert (count.updates, count.validation_batches, count.epochs) == (6, 4, 2)


def test_a_finished_training_restored_has_nothing_left_to_do(make: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = make(epochs=1)
    expected = trainer.fit()
    trainer.save(tmp_path / "c.pt")
    again = make(epochs=1)
    again.restore(tmp_path / "c.pt")
    count = Count()
    assert again.finished and again.fit(count) == expected
    assert count.updates == 0


@pytest.mark.parametrize("images", [1, 3, 5])
def test_few_images_and_a_last_batch_of_one(make: Callable[..., Trainer], images: int) -> None:
    record = make(images=images, epochs=1).fit()
    assert all(np.isfinite(value) for value in record.values())


def test_every_image_comes_once_an_epoch_in_batches_of_one_size() -> None:
    order = epoch_order(seed=0, epoch=0, count=21, batch_size=4)
    assert order.shape == (6, 4)
    assert sorted(order.flatten()[:21]) == list(range(21))
    assert order.flatten()[21:].tolist() == order.flatten()[:3].tolist()
    assert (epoch_order(0, 0, 21, 4) == order).all()
    assert not (epoch_order(0, 1, 21, 4) == order).all()
    assert not (epoch_order(1, 0, 21, 4) == order).all()


def test_the_plain_loss_is_the_same_whatever_the_gains_and_none_of_its_parts_is_left_out(
    make: Callable[..., Trainer],
) -> None:
    found = []
    for box, cls, dfl in ((1.0, 1.0, 1.0), (15.0, 0.25, 0.0)):
        gains = dataclasses.replace(SMALL, box=box, cls=cls, dfl=dfl)
        record = make(gains, images=4, epochs=1).fit()  # one step: the losses of the first weights
        found.append([record[name] for name in ("box_loss", "cls_loss", "dfl_loss", "plain_loss")])
    (box, cls, dfl, plain), other = found
    assert min(box, cls, dfl) > 0 and plain == pytest.approx(box + cls + dfl)
    assert other == [pytest.approx(value) for value in (15 * box, 0.25 * cls, 0.0, plain)]


def test_a_dataset_without_a_single_box_trains_on_background(squares: Squares) -> None:
    empty = squares("train", 6, boxes_each=0), squares("tune_val", 3, boxes_each=0)
    record = Trainer(*empty, SMALL, TrainingOptions(epochs=1), Runtime()).fit()
    assert record["box_loss"] == 0 and record["cls_loss"] > 0
    assert [record[name] for name in ("precision", "recall", "map50", "map")] == [0, 0, 0, 0]


def test_no_image_to_train_on_is_refused_and_none_to_validate_on_is_measured_as_zero(squares: Squares) -> None:
    with pytest.raises(UserError, match="the split 'train' has no image"):
        Trainer(squares("train", 0), squares("tune_val", 2), SMALL, TrainingOptions(), Runtime())
    record = Trainer(squares("train", 4), squares("tune_val", 0), SMALL, TrainingOptions(epochs=1), Runtime()).fit()
    assert record["map"] == 0


def test_weights_that_are_no_numbers_end_the_training_with_that_reason(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = make()
    with torch.no_grad():
        trainer.network.get_parameter("neck.h1.enter.conv.weight").fill_(float("nan"))
    with pytest.raises(DivergedError, match="epoch 1, step 5: the loss is not finite"):
        trainer.fit()
    with pytest.raises(DivergedError):
        trainer.save(tmp_path / "c.pt")
    assert issubclass(DivergedError, ArithmeticError) and not (tmp_path / "c.pt").exists()


def test_a_checkpoint_of_other_parameters_or_data_is_refused(make: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = make(epochs=1)
    path = tmp_path / "c.pt"
    trainer.save(path)
    with pytest.raises(UserError, match=r"hyperparameters max_lr 0\.01, not 0\.02"):
        make(dataclasses.replace(SMALL, max_lr=0.02), epochs=1).restore(path)
    with pytest.raises(UserError, match="options epochs 1, not 2, seed 0, not 7"):
        make(seed=7).restore(path)
    with pytest.raises(UserError, match="made with data images 18, not 17"):
        make(images=17, epochs=1).restore(path)
    others = make(epochs=1)
    others.batches.split.boxes[0, 0] += 1  # as many images, other labels
    with pytest.raises(UserError, match=r"made with data labels_sha256 .*, not "):
        others.restore(path)


@pytest.mark.parametrize("damage", ["weights", "momentum", "epoch", "hyperparameters"])
def test_a_checkpoint_with_something_else_in_it_is_told_as_damaged(
    make: Callable[..., Trainer], tmp_path: Path, damage: str
) -> None:
    trainer = make(epochs=1)
    path = tmp_path / "c.pt"
    trainer.save(path)
    content = torch.load(path, weights_only=True)
    if damage == "epoch":
        del content["epoch"]
    else:
        content[damage] = {"conv": 1} if damage != "hyperparameters" else 5
    torch.save(content, path)
    with pytest.raises(UserError, match=rf"{path.name}: (not a checkpoint of this program, or a damaged|made with)"):
        trainer.restore(path)


def test_a_training_may_start_from_the_weights_of_another(make: Callable[..., Trainer], tmp_path: Path) -> None:
    first = make()
    first.save(tmp_path / "c.pt")
    second = make(seed=5)
    second.start_from(tmp_path / "c.pt")
    for one, other in ((second.network, first.average.network), (second.average.network, first.average.network)):
        assert all(
            torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        )


@pytest.mark.parametrize("runtime", [Runtime(precision="bf16"), Runtime(precision="fp16"), Runtime(channels_last=True)])
def test_other_precisions_and_layouts_train_the_same_network(make: Callable[..., Trainer], runtime: Runtime) -> None:
    found, expected = make(runtime=runtime, images=6, epochs=1), make(images=6, epochs=1)
    losses = [trainer.fit()["cls_loss"] for trainer in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert all(value.dtype != torch.bfloat16 for value in found.average.network.state_dict().values())


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match="sees no GPU"):
        Runtime(device="cuda:0")
    for device in ("tpu", "cuda:first", "cuda0", ""):
        with pytest.raises(UserError, match="allowed are cpu, cuda and cuda:N"):
            Runtime(device=device)


def test_a_gpu_is_chosen_by_its_number_for_all_that_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", current.append, raising=False)  # a build for CPUs has none
    with pytest.raises(UserError, match=r"device is 'cuda:2', but this process sees 2 GPUs"):
        Runtime(device="cuda:2")
    network = torch.nn.Identity()
    monkeypatch.setattr(network, "to", lambda *_, **__: network)
    assert Runtime(device="cuda:1").place(network) is network
    assert current == [1]
    for device in ("cuda", "cpu"):
        assert Runtime(device=device).place(network) is network
    assert current == [1]


def test_gradients_can_be_clipped(make: Callable[..., Trainer]) -> None:
    """The first update moves the weights by (1 + momentum) times rate times gradient, whose norm is bounded."""
    hyperparameters = dataclasses.replace(SMALL, clip_norm=1e-3, weight_decay=0.0)
    trainer = make(hyperparameters)
    before = [parameter.detach().clone() for parameter in trainer.network.parameters()]

    class Stop(Callback):
        def on_update(self, trainer: Trainer) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Stop())
    moved = torch.nn.utils.get_total_norm(
        [new.detach() - old for new, old in zip(trainer.network.parameters(), before, strict=True)]
    )
    bound = (1 + hyperparameters.momentum) * trainer.schedule.at(1) * hyperparameters.clip_norm
    assert 0 < moved <= 1.01 * bound
