"""Losses and gradients stay numbers for boxes that no sane dataset has, in every precision, up to the weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autospeed_model.assignment import CHUNK
from autospeed_model.ema import WeightAverage
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.iou import complete_iou
from autospeed_model.loss import DetectionLoss
from autospeed_model.network import BINS, STRIDES, AutoSpeed, make_anchors
from autospeed_model.optimiser import make_optimiser
from autospeed_model.runtime import Runtime
from autospeed_model.step import TrainingStep

HEIGHT, WIDTH, CLASSES = 64, 96, 4
HYPERPARAMETERS = Hyperparameters(batch_size=2)
CENTRES, CELLS = make_anchors(HEIGHT, WIDTH)

coordinates = st.one_of(
    st.floats(0, WIDTH, width=32),
    st.sampled_from((0.0, 4.0, 8.0, 12.0, 12.000001, 32.0, 64.0, 96.0)),  # centres of cells and borders between them
    st.sampled_from((-1e6, -300.0, -1e-6, 1e-30, 300.0, 1e6)),  # outside the image
)
extents = st.one_of(
    st.just(0.0), st.just(1.0), st.sampled_from((1e-30, 1e-7, 1e-3, 96.0, 1e6)), st.floats(0, 96, width=32)
)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two images' boxes (2, M, 5) and which of them are real; some are the same box again and again."""
    row = st.tuples(st.integers(0, CLASSES - 1), coordinates, coordinates, extents, extents)
    drawn = draw(st.lists(row, min_size=0, max_size=6))
    rows = [(label, x, y, x + width, y + height) for label, x, y, width, height in drawn]
    rows *= draw(st.sampled_from((1, 1, 3, CHUNK)))
    found = torch.tensor(rows, dtype=torch.float32).reshape(1, -1, 5).repeat(2, 1, 1)
    real = torch.ones(found.shape[:2], dtype=torch.bool)
    real[1, draw(st.integers(0, len(rows))) :] = False
    return found, real


@st.composite
def maps(draw: st.DrawFn) -> list[Tensor]:
    """The head's maps: usual logits, all alike, or so large that a distribution is one bin and a box without width."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    size = draw(st.sampled_from((0.0, 1.0, 30.0, 1e4)))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    shapes = [(2, 4 * BINS + CLASSES, HEIGHT // stride, WIDTH // stride) for stride in STRIDES]
    made = [torch.randn(shape, generator=generator) * size for shape in shapes]
    if draw(st.booleans()):
        for one in made:
            one[:, : 4 * BINS : BINS] += 2e4  # every side at distance 0
    return [one.to(dtype).requires_grad_() for one in made]


@given(maps(), boxes(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_losses_and_gradients_are_numbers(maps: list[Tensor], boxes: tuple[Tensor, Tensor], autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        losses = DetectionLoss(HEIGHT, WIDTH, HYPERPARAMETERS)(maps, *boxes)
    assert losses.isfinite().all() and (losses >= 0).all()
    for gradient in torch.autograd.grad(losses.sum(), maps):
        assert gradient.isfinite().all()


def exact_maps(distance: int) -> tuple[list[Tensor], Tensor]:
    """Maps whose boxes all reach ``distance`` cells from their centres, and those boxes (A, 4) in pixels."""
    found = []
    for stride in STRIDES:
        one = torch.zeros(1, 4 * BINS + CLASSES, HEIGHT // stride, WIDTH // stride)
        one[:, distance : 4 * BINS : BINS] = 1000.0
        found.append(one.requires_grad_())
    centres = CENTRES.T
    return found, torch.cat((centres - distance, centres + distance), dim=1) * CELLS[:, None]


@pytest.mark.parametrize("distance", [0, 1, 15])
def test_predictions_that_equal_their_boxes_to_the_last_bit(distance: int) -> None:
    maps, corners = exact_maps(distance)
    rows = torch.cat((torch.ones(len(corners), 1), corners), dim=1)[None]
    losses = DetectionLoss(HEIGHT, WIDTH, HYPERPARAMETERS)(maps, rows, torch.ones(rows.shape[:2], dtype=torch.bool))
    assert losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(losses.sum(), maps))


class Upwards(TorchDispatchMode):
    """Quotients are one place too large, as a GPU's fast division may give them."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.div.Tensor:
            result = torch.nextafter(result, torch.full_like(result, torch.inf))
        return result


def test_equal_boxes_overlap_by_a_number_also_where_divisions_round_upwards() -> None:
    box = torch.tensor([[8.0, 8, 40, 24], [0, 0, 96, 64], [1, 1, 2, 2]])
    moved = box.clone().requires_grad_()
    with Upwards():
        overlap = complete_iou(box, moved)
        (gradient,) = torch.autograd.grad(overlap.sum(), moved)
    torch.testing.assert_close(overlap, torch.ones(3))
    assert gradient.isfinite().all()


@given(boxes(), st.sampled_from(("fp32", "bf16")), st.sampled_from(("noise", "black", "white")))
@settings(max_examples=15, deadline=None)
def test_weights_and_their_average_are_numbers_after_an_update(
    boxes: tuple[Tensor, Tensor], precision: str, picture: str
) -> None:
    torch.manual_seed(0)
    runtime = Runtime(precision=precision)
    network = AutoSpeed(HEIGHT, WIDTH).train()
    average = WeightAverage(network)
    optimiser = make_optimiser(network, HYPERPARAMETERS, 2)
    step = TrainingStep(network, DetectionLoss(HEIGHT, WIDTH, HYPERPARAMETERS), optimiser, average, runtime)
    images = {"noise": torch.rand, "black": torch.zeros, "white": torch.ones}[picture](2, 3, HEIGHT, WIDTH)
    for _ in range(2):
        step.accumulate(images, *boxes)
        assert all(value.grad is not None and value.grad.isfinite().all() for value in network.parameters())
        step.update(HYPERPARAMETERS.max_lr)
    assert step.sums.isfinite().all()
    for part in (network, average.network):
        assert all(value.isfinite().all() for value in part.state_dict().values())
