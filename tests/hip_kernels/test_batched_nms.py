from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import hip_kernels


def iou(a: list[float], b: list[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    area_a, area_b = (a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (area_a + area_b - width * height)


def greedy(boxes: Tensor, scores: Tensor, classes: Tensor, threshold: float, limit: int) -> list[int]:
    """The definition, for one image, in Python's double precision."""
    order = sorted(
        (i for i in range(len(scores)) if float(scores[i]) > -float("inf")), key=lambda i: (-float(scores[i]), i)
    )
    kept: list[int] = []
    rows = boxes.tolist()
    for i in order:
        if len(kept) < limit and all(classes[i] != classes[k] or iou(rows[k], rows[i]) <= threshold for k in kept):
            kept.append(i)
    return kept


def random_boxes(batch: int, count: int, device: str, size: float = 40.0) -> tuple[Tensor, Tensor, Tensor]:
    """Corners on a grid of sixteenths, so that float32 and double precision agree about every area."""
    corner = (torch.rand(batch, count, 2) * 100 * 16).round() / 16
    extent = ((torch.rand(batch, count, 2) * size + 1) * 16).round() / 16
    boxes = torch.cat((corner, corner + extent), dim=2)
    classes = torch.randint(0, 3, (batch, count))
    return boxes.to(device), torch.rand(batch, count).to(device), classes.to(device)


def check(boxes: Tensor, scores: Tensor, classes: Tensor, threshold: float, limit: int) -> None:
    kept, count = hip_kernels.batched_nms(boxes, scores, classes, threshold, limit)
    assert kept.shape == (boxes.shape[0], limit)
    for image in range(boxes.shape[0]):
        expected = greedy(boxes[image].cpu(), scores[image].cpu(), classes[image].cpu(), threshold, limit)
        assert count[image] == len(expected)
        assert kept[image].tolist() == expected + [-1] * (limit - len(expected))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300, 1300])
def test_boxes_are_kept_as_by_the_definition(count: int, device: str) -> None:
    check(*random_boxes(2, count, device), 0.45, 100)


def test_more_survivors_than_allowed_stop_at_the_best(device: str) -> None:
    check(*random_boxes(2, 700, device, size=2.0), 0.6, 17)
    check(*random_boxes(1, 1500, device, size=0.5), 0.9, 1024)


def test_among_equal_scores_the_lower_index_wins(device: str) -> None:
    boxes, scores, classes = random_boxes(2, 400, device)
    check(boxes, (scores * 4).round() / 4 - 0.5, classes, 0.3, 300)


def test_places_without_a_candidate_are_passed_over(device: str) -> None:
    boxes, scores, classes = random_boxes(3, 200, device)
    scores[0] = -float("inf")
    scores[1, ::2] = float("nan")
    scores[2, 5:] = -float("inf")
    check(boxes, scores, classes, 0.5, 50)


def test_boxes_without_area_or_not_finite_are_kept(device: str) -> None:
    nan = float("nan")
    boxes = torch.tensor([[[0.0, 0, 0, 0], [0, 0, 0, 0], [nan, 0, 1, 1], [nan, 0, 1, 1], [5, 5, 2, 2]]], device=device)
    kept, count = hip_kernels.batched_nms(
        boxes,
        torch.arange(5.0, 0, -1, device=device).unsqueeze(0),
        torch.zeros(1, 5, dtype=torch.int64, device=device),
        0.5,
        5,
    )
    assert kept.tolist() == [[0, 1, 2, 3, 4]]
    assert count.tolist() == [5]


@pytest.mark.parametrize("shape", [(0, 10), (2, 0)])
def test_an_empty_batch_and_no_candidates(shape: tuple[int, int], device: str) -> None:
    kept, count = hip_kernels.batched_nms(*random_boxes(*shape, device), 0.5, 7)
    assert kept.tolist() == [[-1] * 7] * shape[0]
    assert count.tolist() == [0] * shape[0]


def test_views_with_any_strides_are_read_right(device: str) -> None:
    boxes, scores, classes = random_boxes(2, 150, device)
    flipped = boxes.transpose(1, 2).contiguous().transpose(1, 2)
    check(flipped, scores.t().contiguous().t(), classes.t().contiguous().t(), 0.4, 60)
    buffer = torch.zeros(boxes.numel() + 1, device=device)
    buffer[1:] = boxes.flatten()
    check(buffer[1:].view_as(boxes), scores, classes, 0.4, 60)


@pytest.mark.skipif(not torch.cuda.is_available() or not hip_kernels.is_built("cuda"), reason="needs a GPU")
def test_the_host_does_not_wait_for_the_device() -> None:
    arguments = random_boxes(2, 300, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        hip_kernels.batched_nms(*arguments, 0.5, 50)
        hip_kernels.voxelize_padded(arguments[0][0], [1.0, 1, 1], [0.0, 0, 0, 100, 100, 100], 5, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.rand(1, 5, 3), torch.rand(1, 5), torch.zeros(1, 5).long(), 0.5, 5),
            r"expected boxes of shape \(B, A, 4\)",
        ),
        ((torch.rand(1, 5, 4), torch.rand(1, 6), torch.zeros(1, 5).long(), 0.5, 5), "expected scores of shape"),
        (
            (torch.rand(1, 5, 4), torch.rand(1, 5), torch.zeros(1, 5), 0.5, 5),
            "expected classes of dtype Long, got Float",
        ),
        ((torch.rand(1, 5, 4), torch.rand(1, 5), torch.zeros(1, 5).long(), 1.5, 5), "iou_threshold in"),
        ((torch.rand(1, 5, 4), torch.rand(1, 5), torch.zeros(1, 5).long(), 0.5, 0), "max_detections from 1 to 1024"),
    ],
    ids=range(5),
)
def test_wrong_arguments_name_what_was_expected(arguments: tuple, message: str) -> None:
    if not hip_kernels.is_built("cpu"):
        pytest.skip("the messages come from the compiled operations")
    with pytest.raises((ValueError, TypeError), match=message):
        hip_kernels.batched_nms(*arguments)


def test_kept_boxes_are_the_golden_ones(device: str) -> None:
    golden = np.load(Path(__file__).parents[1] / "autospeed_model/golden/nms.npz")
    raw = torch.from_numpy(golden["raw"]).to(device)
    classes_count, anchors = raw.shape[1] - 4, raw.shape[2]
    centre, half = raw[:, :2].transpose(1, 2), raw[:, 2:4].transpose(1, 2) / 2
    boxes = torch.cat((centre - half, centre + half), dim=2).repeat(1, classes_count, 1)
    scores = raw[:, 4:].flatten(1)
    candidates = torch.where(scores > 0.001, scores, -torch.inf)
    labels = torch.arange(classes_count, device=device).repeat_interleave(anchors).expand_as(scores)
    kept, count = hip_kernels.batched_nms(boxes, candidates, labels, 0.65, 300)
    for image in range(raw.shape[0]):
        expected = golden[f"kept{image}"]
        chosen = kept[image, : count[image]]
        rows = torch.cat((boxes[image, chosen], scores[image, chosen, None], labels[image, chosen, None]), dim=1)
        np.testing.assert_allclose(rows.cpu().numpy(), expected, rtol=1e-5, atol=1e-4)
