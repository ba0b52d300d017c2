from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autospeed_model.assignment import CHUNK, Assignment, assign
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.iou import complete_iou
from autospeed_model.loss import DetectionLoss
from autospeed_model.network import BINS, STRIDES, make_anchors
from autospeed_model.upstream import upstream_names

HEIGHT, WIDTH, CLASSES = 64, 96, 4


def random_maps(seed: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, 4 * BINS + CLASSES, HEIGHT // stride, WIDTH // stride) for stride in STRIDES]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def random_boxes(seed: int, count: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    extent = torch.tensor([WIDTH, HEIGHT])
    low = torch.rand(batch, count, 2, generator=generator) * 0.6 * extent
    high = low + (0.1 + 0.3 * torch.rand(batch, count, 2, generator=generator)) * extent
    label = torch.randint(0, CLASSES, (batch, count, 1), generator=generator).float()
    return torch.cat((label, low, high), dim=2)


def total(maps: list[Tensor], boxes: Tensor, real: Tensor) -> Tensor:
    loss = DetectionLoss(HEIGHT, WIDTH, Hyperparameters())
    losses: Tensor = loss(maps, boxes, real) * loss.gains
    return losses


def test_losses_and_gradients_are_the_golden_ones(golden_case: Any) -> None:
    network, expected = golden_case.network.train(), golden_case.expected
    statistics = {name: value.clone() for name, value in network.state_dict().items()}
    network.zero_grad()
    loss = DetectionLoss(network.height, network.width, Hyperparameters())
    losses = loss(network(golden_case.images), golden_case.boxes, golden_case.real) * loss.gains
    losses.sum().backward()
    network.load_state_dict(statistics)

    np.testing.assert_allclose(losses.detach().numpy(), expected["loss"], rtol=1e-4)
    parameters = dict(network.named_parameters())
    names = {theirs: ours for ours, theirs in upstream_names(network).items()}
    found = [parameters[names[name]].grad.norm().item() for name in expected["grad_names"]]
    # The absolute part is for biases before a batch norm, whose true gradient is zero.
    np.testing.assert_allclose(found, expected["grad_norms"], rtol=1e-3, atol=1e-5)
    assert len(found) == len(parameters)


def test_loss_without_any_box_is_the_golden_one(golden_case: Any) -> None:
    network = golden_case.network.train()
    statistics = {name: value.clone() for name, value in network.state_dict().items()}
    loss = DetectionLoss(network.height, network.width, Hyperparameters())
    with torch.no_grad():
        maps = network(golden_case.images)
        padded = loss(maps, golden_case.boxes, torch.zeros_like(golden_case.real)) * loss.gains
        empty = loss(maps, golden_case.boxes[:, :0], golden_case.real[:, :0]) * loss.gains
    network.load_state_dict(statistics)
    np.testing.assert_allclose(padded.numpy(), golden_case.expected["loss_without_targets"], rtol=1e-4)
    torch.testing.assert_close(empty, padded)


@pytest.mark.parametrize("count", [0, 3])
def test_without_boxes_the_loss_and_its_gradients_are_finite(count: int) -> None:
    maps = random_maps(0)
    losses = total(maps, torch.zeros(2, count, 5), torch.zeros(2, count, dtype=torch.bool))
    losses.sum().backward()
    assert losses.isfinite().all() and losses[0] == 0 and losses[2] == 0
    assert all(value.grad is not None and value.grad.isfinite().all() for value in maps)


def test_padding_and_the_order_of_boxes_change_nothing() -> None:
    boxes, real = random_boxes(1, 5), torch.ones(2, 5, dtype=torch.bool)
    expected = total(random_maps(0), boxes, real)
    junk = torch.full((2, CHUNK + 3, 5), float("nan"))
    order = torch.randperm(5 + junk.shape[1], generator=torch.Generator().manual_seed(3))
    padded = torch.cat((boxes, junk), dim=1)[:, order]
    mask = torch.cat((real, torch.zeros(junk.shape[:2], dtype=torch.bool)), dim=1)[:, order]
    torch.testing.assert_close(total(random_maps(0), padded, mask), expected)


def test_boxes_without_an_anchor_inside_or_without_area_cost_no_more_than_background() -> None:
    maps = random_maps(0, batch=1)
    boxes = torch.tensor([[[1.0, 1, 1, 2, 2], [2.0, 8, 8, 8, 8], [3.0, 0, 0, 0, 40]]])
    losses = total(maps, boxes, torch.ones(1, 3, dtype=torch.bool))
    losses.sum().backward()
    assert losses[0] == 0 and losses.isfinite().all()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in maps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_computed_in_float32_whatever_the_network_gives(dtype: torch.dtype) -> None:
    boxes, real = random_boxes(1, 4), torch.ones(2, 4, dtype=torch.bool)
    maps = random_maps(0, dtype=dtype)
    losses = total(maps, boxes, real)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, total([value.detach().float() for value in maps], boxes, real))


def test_the_loss_is_one_graph_without_a_look_at_its_values() -> None:
    loss = DetectionLoss(HEIGHT, WIDTH, Hyperparameters())
    whole = torch.compile(loss, fullgraph=True, backend="eager", dynamic=False)
    maps, boxes = random_maps(0), random_boxes(1, CHUNK + 2)
    real = torch.rand(boxes.shape[:2]) < 0.5
    torch.testing.assert_close(whole(maps, boxes, real), loss(maps, boxes, real))


def test_nothing_of_the_size_of_all_boxes_by_all_anchors_is_held() -> None:
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, Tensor):
                    largest = max(largest, value.untyped_storage().nbytes())
            return result

    count, height, width = 20 * CHUNK, 256, 512
    anchors = sum((height // stride) * (width // stride) for stride in STRIDES)
    maps = [torch.zeros(2, 4 * BINS + CLASSES, height // s, width // s, requires_grad=True) for s in STRIDES]
    boxes, real = random_boxes(1, count), torch.ones(2, count, dtype=torch.bool)
    with Sizes():
        DetectionLoss(height, width, Hyperparameters())(maps, boxes, real).sum().backward()
    assert largest < 2 * count * anchors * 4 / 4


def slow_assignment(
    probabilities: Tensor, predicted: Tensor, centres: Tensor, labels: Tensor, boxes: Tensor
) -> dict[int, tuple[int, float]]:
    """Anchor -> (box, target) for one image, by the definition, with Python's loops."""
    claims: dict[int, list[tuple[float, int, float]]] = {}
    for box, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        scored = []
        for anchor, (x, y) in enumerate(centres.tolist()):
            if min(x - x1, y - y1, x2 - x, y2 - y) > 1e-9:
                overlap = max(complete_iou(boxes[box], predicted[anchor]).item(), 0.0)
                scored.append((probabilities[labels[box], anchor].item() ** 0.5 * overlap**6, overlap, anchor))
        for alignment, overlap, anchor in sorted(scored, reverse=True)[:10]:
            if alignment > 0:
                claims.setdefault(anchor, []).append((overlap, box, alignment))
    winners = {anchor: max(claimants) for anchor, claimants in claims.items()}
    found = {}
    for box in range(len(boxes)):
        own = {anchor: claim for anchor, claim in winners.items() if claim[1] == box}
        if own:
            scale = max(claim[0] for claim in own.values()) / (max(claim[2] for claim in own.values()) + 1e-9)
            found |= {anchor: (box, claim[2] * scale) for anchor, claim in own.items()}
    return found


@pytest.mark.parametrize("seed", range(4))
def test_assignment_follows_its_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    centres, strides = make_anchors(HEIGHT, WIDTH)
    centres = (centres * strides).T
    reach = 25 * torch.rand(2, len(centres), 2, generator=generator)
    predicted = torch.cat((centres - reach, centres + reach), dim=2)
    probabilities = torch.rand(2, CLASSES, len(centres), generator=generator)
    boxes = random_boxes(seed + 10, 6)
    labels, corners = boxes[:, :, 0].long(), boxes[:, :, 1:]
    found: Assignment = assign(probabilities, predicted, centres, labels, corners, torch.ones(2, 6, dtype=torch.bool))
    for image in range(2):
        per_box = found.anchor.shape[1] // 6
        mine = {
            int(anchor): (entry // per_box, float(score))
            for entry, (anchor, score) in enumerate(zip(found.anchor[image], found.score[image], strict=True))
            if score > 0
        }
        expected = slow_assignment(probabilities[image], predicted[image], centres, labels[image], corners[image])
        assert {anchor: box for anchor, (box, _) in mine.items()} == {a: box for a, (box, _) in expected.items()}
        for anchor, (_, score) in mine.items():
            assert score == pytest.approx(expected[anchor][1], rel=1e-4)


def test_no_anchor_answers_for_two_boxes_even_if_they_are_equal() -> None:
    boxes = random_boxes(5, 1).repeat(1, 3, 1)
    centres, strides = make_anchors(HEIGHT, WIDTH)
    centres = (centres * strides).T
    predicted = torch.cat((centres - 12, centres + 12), dim=1).expand(2, -1, -1)
    found = assign(
        torch.full((2, CLASSES, len(centres)), 0.5),
        predicted,
        centres,
        boxes[:, :, 0].long(),
        boxes[:, :, 1:],
        torch.ones(2, 3, dtype=torch.bool),
    )
    for image in range(2):
        used = found.anchor[image][found.score[image] > 0]
        assert len(used) > 0 and len(used) == len(used.unique())
