"""Non-maximum suppression per class for a whole batch on its device: deterministic, without a time limit.

Shapes: B batch, nc classes, A anchors, D detections kept an image at most, S candidates of a block.

Candidates are taken in blocks of falling confidence. Within a block the greedy rule is the fixed point of "a box stays
unless a better box that stays overlaps it", which few rounds over the block's overlap matrix reach. The host is asked
once per round whether it is reached, never per image.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import hip_kernels
from autospeed_model.iou import pairwise_iou

BLOCK = 512


class Detections(NamedTuple):
    """What is left of a batch, best first."""

    rows: Tensor  # float32 (B, D, 6): x1, y1, x2, y2 in pixels, confidence, class; zeros past the count
    counts: Tensor  # int64 (B,)


@torch.no_grad()
def suppress(outputs: Tensor, confidence: float = 0.001, iou: float = 0.65, limit: int = 300) -> Detections:
    """Keep the best of overlapping boxes of one class. On a GPU by the kernel of :mod:`hip_kernels`, if it is built.

    :param outputs: (B, 4 + nc, A): centre x, centre y, width, height, probability per class
    :param confidence: boxes of a probability at or below it are dropped
    :param iou: a box is dropped that overlaps a better one of its class by more
    :param limit: D
    """
    if hip_kernels.is_built("cuda") and outputs.is_cuda:
        return suppress_fused(outputs, confidence, iou, limit)
    batch, _, anchors = outputs.shape
    scores, order = outputs[:, 4:].flatten(1).sort(dim=1, descending=True, stable=True)
    available = (scores > confidence).sum(dim=1)
    most = int(available.max()) if batch else 0
    rows = outputs.new_zeros((batch, limit + 1, 6))  # the last place takes what nobody asked for
    count = torch.zeros_like(available)
    for start in range(0, most, BLOCK):
        end = min(start + BLOCK, most)
        block = _candidate_rows(outputs, order[:, start:end], scores[:, start:end], anchors)
        free = (block[:, :, 4] > confidence) & ~_overlapped_by_kept(block, rows[:, :limit], count, iou)
        stays = _greedy(block, free, iou)
        place = count.unsqueeze(1) + stays.cumsum(dim=1) - 1
        place = torch.where(stays, place, limit).clamp(max=limit)
        rows.scatter_(1, place.unsqueeze(2).expand(-1, -1, 6), block)
        count = (count + stays.sum(dim=1)).clamp(max=limit)
        if bool(((count == limit) | (available <= end)).all()):
            break
    return Detections(rows[:, :limit].clone(), count)


def suppress_fused(outputs: Tensor, confidence: float = 0.001, iou: float = 0.65, limit: int = 300) -> Detections:
    """What :func:`suppress` computes, without a single wait for the device."""
    batch, channels, anchors = outputs.shape
    classes = channels - 4
    centre, half = outputs[:, :2], outputs[:, 2:4] / 2
    boxes = torch.cat((centre - half, centre + half), dim=1).transpose(1, 2).repeat(1, classes, 1)
    scores = outputs[:, 4:].flatten(1)
    labels = torch.arange(classes, device=outputs.device).repeat_interleave(anchors).repeat(batch, 1)
    candidates = torch.where(scores > confidence, scores, -torch.inf)
    index, counts = hip_kernels.batched_nms(boxes, candidates, labels, iou, limit)
    place = index.clamp(min=0)
    kept = boxes.gather(1, place.unsqueeze(2).expand(-1, -1, 4))
    about = torch.stack((scores.gather(1, place), labels.gather(1, place).to(scores.dtype)), dim=2)
    rows = torch.where((index >= 0).unsqueeze(2), torch.cat((kept, about), dim=2), 0.0)
    return Detections(rows, counts)


def _candidate_rows(outputs: Tensor, order: Tensor, scores: Tensor, anchors: int) -> Tensor:
    """The candidates at ``order`` (B, S) of the flattened class scores, as rows (B, S, 6)."""
    anchor, label = order % anchors, order // anchors
    boxes = outputs[:, :4].gather(2, anchor.unsqueeze(1).expand(-1, 4, -1)).transpose(1, 2)
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((centre - half, centre + half, scores.unsqueeze(2), label.unsqueeze(2).to(boxes.dtype)), dim=2)


def _conflicts(first: Tensor, second: Tensor, iou: float) -> Tensor:
    """Which rows (B, N, 6) and (B, M, 6) are of one class and overlap too much: bool (B, N, M)."""
    same = first[:, :, 5].unsqueeze(2) == second[:, :, 5].unsqueeze(1)
    return same & (pairwise_iou(first[..., :4], second[..., :4]) > iou)


def _overlapped_by_kept(block: Tensor, kept: Tensor, count: Tensor, iou: float) -> Tensor:
    real = torch.arange(kept.shape[1], device=kept.device) < count.unsqueeze(1)
    return (_conflicts(block, kept, iou) & real.unsqueeze(1)).any(dim=2)


def _greedy(block: Tensor, free: Tensor, iou: float) -> Tensor:
    """Greedy suppression among the rows of a block, which are sorted by confidence: bool (B, S)."""
    better = torch.ones(block.shape[1], block.shape[1], dtype=torch.bool, device=block.device).triu(1)
    conflicts = _conflicts(block, block, iou) & better
    stays = free
    while True:
        after = free & ~(conflicts & stays.unsqueeze(2)).any(dim=1)
        if torch.equal(after, stays):
            return stays
        stays = after
