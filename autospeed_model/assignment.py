"""Task-aligned assignment (TOOD, Feng et al. 2021): static shapes, no host round trip.

Shapes: B batch, M boxes an image (padded), A anchors, nc classes, K candidates a box, E = M * K entries an image.

Every box claims K anchors at most, so that after their choice only E entries an image are carried on. Nothing of the
size B * M * A lives longer than the choice of one chunk of boxes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autospeed_model.iou import complete_iou

CANDIDATES = 10
ALPHA, BETA = 0.5, 6.0  # exponents of probability and overlap in the alignment
CHUNK = 32  # boxes whose overlaps with all anchors are held at once
INSIDE = 1e-9  # pixels that a centre must be away from every side of its box


class Assignment(NamedTuple):
    """Entry e of an image says that box ``e // K`` claims ``anchor[e]`` with weight ``score[e]``.

    An entry that lost its anchor to another box, or never was a candidate, has score 0.
    """

    anchor: Tensor  # int64 (B, E)
    score: Tensor  # float32 (B, E): target probability of the box's class at the anchor


@torch.no_grad()
def assign(
    probabilities: Tensor, predicted: Tensor, centres: Tensor, labels: Tensor, boxes: Tensor, real: Tensor
) -> Assignment:
    """Choose for every box the anchors that answer for it.

    :param probabilities: (B, nc, A) of the classes
    :param predicted: (B, A, 4) predicted boxes, pixels
    :param centres: (A, 2) of the anchors, pixels
    :param labels: int64 (B, M)
    :param boxes: (B, M, 4), pixels
    :param real: bool (B, M), False for padding
    """
    batch, count = labels.shape
    anchors = centres.shape[0]
    candidates = min(CANDIDATES, anchors)
    parts = [
        _candidates(probabilities, predicted, centres, labels[:, i:j], boxes[:, i:j], real[:, i:j], candidates)
        for i, j in ((i, min(i + CHUNK, count)) for i in range(0, count, CHUNK))
    ]
    if not parts:
        return Assignment(labels.new_zeros((batch, 0)), predicted.new_zeros((batch, 0)))
    alignment, overlap, anchor = (torch.cat(piece, dim=1).flatten(1) for piece in zip(*parts, strict=True))
    won = (alignment > 0) & _wins(overlap, anchor, alignment > 0, anchors)
    return Assignment(anchor, _normalise(alignment * won, overlap * won, count, candidates))


def _candidates(
    probabilities: Tensor,
    predicted: Tensor,
    centres: Tensor,
    labels: Tensor,
    boxes: Tensor,
    real: Tensor,
    candidates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best anchors inside each box: alignment, overlap and index, each (B, chunk, K)."""

    def overlap_with(predicted: Tensor) -> Tensor:
        return complete_iou(boxes.unsqueeze(2), predicted).clamp(min=0)

    overlap = overlap_with(predicted.unsqueeze(1))  # (B, chunk, A)
    low, high = boxes.unsqueeze(2).split(2, dim=-1)
    inside = torch.minimum(centres - low, high - centres).amin(-1) > INSIDE
    of_class = probabilities.gather(1, labels.unsqueeze(2).expand(-1, -1, probabilities.shape[2]))
    alignment = of_class.pow(ALPHA) * overlap.pow(BETA) * (inside & real.unsqueeze(2))
    best, anchor = alignment.topk(candidates, dim=2)
    # Computed again for the few that were chosen: overlaps kept for all would take as much memory as alignments.
    chosen = predicted.gather(1, anchor.flatten(1).unsqueeze(2).expand(-1, -1, 4)).unflatten(1, anchor.shape[1:])
    return best, overlap_with(chosen), anchor


def _wins(overlap: Tensor, anchor: Tensor, claims: Tensor, anchors: int) -> Tensor:
    """Whether an entry keeps its anchor: the claimant of the largest overlap does, of equal ones the first."""
    claimed = torch.where(claims, overlap, -1.0)
    largest = claimed.new_full((anchor.shape[0], anchors), -1.0).scatter_reduce(1, anchor, claimed, "amax")
    ties = claims & (claimed == largest.gather(1, anchor))
    entry = torch.arange(anchor.shape[1], device=anchor.device).expand_as(anchor)
    rank = torch.where(ties, entry, anchor.shape[1])
    first = rank.new_full((anchor.shape[0], anchors), anchor.shape[1]).scatter_reduce(1, anchor, rank, "amin")
    return ties & (entry == first.gather(1, anchor))


def _normalise(alignment: Tensor, overlap: Tensor, count: int, candidates: int) -> Tensor:
    """Scale each box's alignments so that its best anchor's target is its best overlap: (B, E) -> (B, E)."""
    alignment, overlap = alignment.unflatten(1, (count, candidates)), overlap.unflatten(1, (count, candidates))
    scale = overlap.amax(2, keepdim=True) / (alignment.amax(2, keepdim=True) + 1e-9)
    return (alignment * scale).flatten(1)
