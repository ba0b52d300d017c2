"""The detection loss as published trainings usually compute it, for comparison with :mod:`autospeed_model.loss`.

Written from the description of the method. It computes the same numbers, but holds every box against every anchor,
picks positives by boolean indexing, which waits for the device, and may build its targets image by image.

Shapes: B batch, M boxes an image, A anchors, N boxes of all images.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.iou import complete_iou
from autospeed_model.network import BINS, distances, flatten_maps, make_anchors


def looped_targets(flat: Tensor, batch: int) -> Tensor:
    """(N, 6) rows image, class, box -> (B, M, 5), image by image; -1 marks padding."""
    counts = [int((flat[:, 0] == image).sum()) for image in range(batch)]
    targets = flat.new_full((batch, max(counts, default=0), 5), -1.0)
    for image in range(batch):
        chosen = flat[:, 0] == image
        if counts[image]:
            targets[image, : counts[image]] = flat[chosen, 1:]
    return targets


def scattered_targets(flat: Tensor, batch: int) -> Tensor:
    """The same without a loop."""
    owner = flat[:, 0].long()
    counts = torch.bincount(owner, minlength=batch)
    place = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[owner]
    targets = flat.new_full((batch, int(counts.max()), 5), -1.0)
    targets[owner, place] = flat[:, 1:]
    return targets


class DenseLoss(torch.nn.Module):
    """Sum of the three losses for the flat boxes of a batch."""

    centres: Tensor
    strides: Tensor

    def __init__(self, height: int, width: int, hyperparameters: Hyperparameters, loops: bool) -> None:
        super().__init__()
        centres, strides = make_anchors(height, width)
        self.register_buffer("centres", centres.T.contiguous())
        self.register_buffer("strides", strides)
        self.gains = (hyperparameters.box, hyperparameters.cls, hyperparameters.dfl)
        self.loops = loops

    def forward(self, maps: list[Tensor], flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sides, logits = flatten_maps(maps)
        batch = len(sides)
        targets = (looped_targets if self.loops else scattered_targets)(flat, batch)
        low, high = distances(sides).transpose(1, 2).split(2, dim=2)
        predicted = torch.cat((self.centres - low, self.centres + high), dim=2)  # (B, A, 4), cells
        logits = logits.transpose(1, 2)
        boxes, scores, positive = self._assign(
            logits.detach().sigmoid(), predicted.detach() * self.strides[:, None], targets
        )
        total = max(scores.sum(), 1.0)
        cls = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum") / total
        if not positive.any():
            return cls * 0, cls * self.gains[1], cls * 0
        boxes = boxes / self.strides[:, None]
        weight = scores.sum(2)[positive]
        box = ((1 - complete_iou(boxes[positive], predicted[positive])) * weight).sum() / total
        near = torch.cat((self.centres - boxes[..., :2], boxes[..., 2:] - self.centres), dim=2)
        near = near.clamp(0, BINS - 1.01)[positive]  # (P, 4)
        lower = near.long()
        logs = sides.transpose(1, 2)[positive].view(-1, 4, BINS).log_softmax(2)
        share = near - lower
        taken = logs.gather(2, lower[..., None])[..., 0] * (1 - share)
        taken = taken + logs.gather(2, lower[..., None] + 1)[..., 0] * share
        dfl = (-taken.mean(1) * weight).sum() / total
        return box * self.gains[0], cls * self.gains[1], dfl * self.gains[2]

    @torch.no_grad()
    def _assign(self, probabilities: Tensor, predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes (B, A, 4) in pixels, scores (B, A, nc) and whether an anchor has a box (B, A)."""
        batch, anchors, classes = probabilities.shape
        if not targets.shape[1]:
            empty = probabilities.new_zeros
            return (
                empty(batch, anchors, 4),
                empty(batch, anchors, classes),
                empty(batch, anchors, dtype=torch.bool),
            )
        labels, corners, real = targets[..., 0].long().clamp(min=0), targets[..., 1:], targets[..., 0] >= 0
        centres = self.centres * self.strides[:, None]
        inside = torch.cat((centres - corners[:, :, None, :2], corners[:, :, None, 2:] - centres), -1).amin(-1) > 1e-9
        inside &= real[..., None]
        overlap = complete_iou(corners[:, :, None], predicted[:, None]).clamp(min=0) * inside
        of_class = probabilities.transpose(1, 2).gather(1, labels[..., None].expand(-1, -1, anchors))
        alignment = of_class.pow(0.5) * overlap.pow(6)
        best = torch.zeros_like(alignment).scatter_(2, alignment.topk(10, dim=2).indices, 1.0)
        claims = best * inside
        shared = claims.sum(1) > 1
        winner = F.one_hot(overlap.argmax(1), targets.shape[1]).transpose(1, 2)
        claims = torch.where(shared[:, None], winner, claims)
        positive = claims.sum(1) > 0
        owner = claims.argmax(1)  # (B, A)
        boxes = corners.gather(1, owner[..., None].expand(-1, -1, 4))
        alignment, overlap = alignment * claims, overlap * claims
        scale = overlap.amax(2, keepdim=True) / (alignment.amax(2, keepdim=True) + 1e-9)
        scores = F.one_hot(labels.gather(1, owner), classes) * (alignment * scale).amax(1)[..., None]
        return boxes, scores * positive[..., None], positive
