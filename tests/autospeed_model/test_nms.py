from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from autospeed_model import nms
from autospeed_model.iou import pairwise_iou
from autospeed_model.nms import suppress, suppress_fused


def test_kept_boxes_are_the_golden_ones(golden: Callable[[str], dict[str, np.ndarray]]) -> None:
    expected = golden("nms")
    found = suppress(torch.from_numpy(expected["raw"]), confidence=0.001, iou=0.65, limit=300)
    for image in range(2):
        kept = found.rows[image, : found.counts[image]].numpy()
        np.testing.assert_allclose(kept, expected[f"kept{image}"], rtol=1e-6, atol=1e-6)


def random_outputs(seed: int, batch: int = 3, anchors: int = 200, classes: int = 3, levels: int = 20) -> Tensor:
    """Crowded boxes; probabilities from a few levels, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    centre = 100 * torch.rand(batch, 2, anchors, generator=generator)
    extent = 10 + 30 * torch.rand(batch, 2, anchors, generator=generator)
    probability = torch.randint(0, levels, (batch, classes, anchors), generator=generator) / levels
    return torch.cat((centre, extent, probability), dim=1)


def one_by_one(output: Tensor, confidence: float, iou: float, limit: int) -> list[list[float]]:
    """Greedy suppression of one image as everybody writes it first."""
    candidates = [
        (-float(output[4 + label, anchor]), label, anchor)
        for label in range(output.shape[0] - 4)
        for anchor in range(output.shape[1])
        if output[4 + label, anchor] > confidence
    ]
    kept: list[list[float]] = []
    for score, label, anchor in sorted(candidates):
        x, y, width, height = output[:4, anchor]
        box = torch.stack((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
        rivals = [row[:4] for row in kept if row[5] == label]
        if len(kept) < limit and not (rivals and bool((pairwise_iou(box[None], torch.tensor(rivals)) > iou).any())):
            kept.append([*box.tolist(), -score, float(label)])
    return kept


@pytest.mark.parametrize("block", [7, 64, 512])
@pytest.mark.parametrize("limit", [5, 300])
def test_blocks_keep_what_one_by_one_keeps(block: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nms, "BLOCK", block)
    outputs = random_outputs(block)
    found = suppress(outputs, confidence=0.3, iou=0.4, limit=limit)
    for image in range(len(outputs)):
        expected = one_by_one(outputs[image], 0.3, 0.4, limit)
        assert int(found.counts[image]) == len(expected)
        np.testing.assert_allclose(found.rows[image, : len(expected)].numpy(), expected, rtol=1e-6)
        assert not found.rows[image, len(expected) :].any()


def test_boxes_of_other_classes_do_not_suppress() -> None:
    outputs = torch.tensor([50.0, 50, 20, 20, 0.9, 0.8]).view(1, 6, 1)
    assert suppress(outputs).counts.tolist() == [2]


def test_an_image_without_candidates_beside_a_crowded_one() -> None:
    outputs = random_outputs(0, batch=2)
    outputs[0, 4:] = 0
    found = suppress(outputs)
    assert found.counts[0] == 0 and found.counts[1] > 0


@pytest.mark.parametrize("shape", [(0, 7, 10), (2, 7, 0)])
def test_an_empty_batch_and_no_anchors(shape: tuple[int, int, int]) -> None:
    found = suppress(torch.zeros(shape))
    assert found.rows.shape == (shape[0], 300, 6) and not found.counts.any()


@pytest.mark.parametrize("limit", [5, 300])
def test_the_kernels_operation_keeps_the_same_boxes(limit: int) -> None:
    generator = torch.Generator().manual_seed(3)
    corner = torch.rand(3, 2, 60, generator=generator) * 40
    extent = 5 + torch.rand(3, 2, 60, generator=generator) * 30
    scores = torch.rand(3, 2, 60, generator=generator).round(decimals=1)  # with equal ones
    scores[2] = 0
    outputs = torch.cat((corner, extent, scores), dim=1)
    found, expected = suppress_fused(outputs, limit=limit), suppress(outputs, limit=limit)
    assert torch.equal(found.counts, expected.counts)
    torch.testing.assert_close(found.rows, expected.rows)
