from collections.abc import Callable

import torch

from autospeed_model.batches import Batch, TrainingBatches
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.packed import PackedSplit
from autospeed_model.runtime import Runtime

Squares = Callable[..., PackedSplit]


def make(split: PackedSplit) -> TrainingBatches:
    return TrainingBatches(split, Hyperparameters(), 2, 0, Runtime())


def assert_equal(one: list[tuple[int, Batch]], other: list[tuple[int, Batch]]) -> None:
    assert [step for step, _ in one] == [step for step, _ in other]
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


def test_epochs_in_any_order_and_from_any_step_are_the_same(squares: Squares) -> None:
    split = squares("train", 5)
    through = make(split)
    epochs = [list(through.of_epoch(epoch)) for epoch in range(3)]
    assert_equal(epochs[2], list(make(split).of_epoch(2)))
    assert_equal(epochs[1][1:], list(make(split).of_epoch(1, first=1)))
    assert_equal(epochs[0], list(through.of_epoch(0)))
    assert_equal(epochs[1], list(through.of_epoch(1)))


def test_the_next_epochs_first_batch_is_begun_before_the_last_one_is_used(squares: Squares) -> None:
    batches = make(squares("train", 4))
    epoch = batches.of_epoch(0)
    assert [next(epoch)[0], next(epoch)[0]] == [0, 1]
    assert batches._begun is not None
    assert batches._begun[0] == (1, 0)
