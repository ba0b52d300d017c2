"""The training loss: static shapes, no host synchronisation, float32 inside whatever the network's precision.

Shapes: B batch, M boxes an image (padded), A anchors, nc classes, E entries of the assignment.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autospeed_model.assignment import Assignment, assign
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.iou import complete_iou
from autospeed_model.network import BINS, distances, flatten_maps, make_anchors


class DetectionLoss(torch.nn.Module):
    """Box (CIoU), class (binary cross-entropy on the assigned scores) and distribution (DFL) loss.

    ``gains`` are what each counts in the sum that is trained on.
    """

    centres: Tensor  # (A, 2), cells
    strides: Tensor  # (A,)
    gains: Tensor  # (3,)

    def __init__(self, height: int, width: int, hyperparameters: Hyperparameters) -> None:
        super().__init__()
        centres, strides = make_anchors(height, width)
        gains = torch.tensor((hyperparameters.box, hyperparameters.cls, hyperparameters.dfl), dtype=torch.float32)
        self.register_buffer("centres", centres.T.contiguous(), persistent=False)
        self.register_buffer("strides", strides, persistent=False)
        self.register_buffer("gains", gains, persistent=False)

    def forward(self, maps: list[Tensor], boxes: Tensor, real: Tensor) -> Tensor:
        """The three losses box, cls, dfl of a batch without their gains: a float32 tensor (3,), finite also without a
        single box.

        :param maps: the head's three maps (B, 4 * BINS + nc, h, w)
        :param boxes: (B, M, 5) rows class, x1, y1, x2, y2 in pixels of the input
        :param real: bool (B, M), False where a row is padding
        """
        sides, logits = flatten_maps(maps)
        labels = torch.where(real, boxes[:, :, 0].long(), 0)
        corners = torch.where(real.unsqueeze(2), boxes[:, :, 1:], 0.0)
        with torch.no_grad():
            low, high = distances(sides).transpose(1, 2).split(2, dim=2)
            predicted = torch.cat((self.centres - low, self.centres + high), dim=2) * self.strides.unsqueeze(1)
            probabilities = logits.sigmoid()
        centres = self.centres * self.strides.unsqueeze(1)
        assignment = assign(probabilities, predicted, centres, labels, corners, real)
        total = assignment.score.sum().clamp(min=1.0)
        box, dfl = self._side_losses(sides, corners, assignment)
        return torch.stack((box, _class_loss(logits, labels, assignment), dfl)) / total

    def _side_losses(self, sides: Tensor, corners: Tensor, assignment: Assignment) -> tuple[Tensor, Tensor]:
        """CIoU and DFL summed over the entries: only their predictions are gathered."""
        batch, entries = assignment.anchor.shape
        per_box = entries // max(corners.shape[1], 1)
        index = assignment.anchor.unsqueeze(1).expand(-1, sides.shape[1], -1)
        chosen = sides.gather(2, index).view(batch, 4, BINS, entries)
        strides = self.strides[assignment.anchor].unsqueeze(2)
        centres = self.centres[assignment.anchor]
        targets = corners.repeat_interleave(per_box, dim=1) / strides  # (B, E, 4), cells

        low, high = distances(chosen.flatten(1, 2)).transpose(1, 2).split(2, dim=2)
        predicted = torch.cat((centres - low, centres + high), dim=2)
        box = ((1 - complete_iou(targets, predicted)) * assignment.score).sum()

        target = torch.cat((centres - targets[:, :, :2], targets[:, :, 2:] - centres), dim=2).transpose(1, 2)
        target = target.clamp(0, BINS - 1 - 0.01).unsqueeze(2)  # (B, 4, 1, E)
        bins = torch.arange(BINS, dtype=target.dtype, device=target.device).view(BINS, 1)
        weights = F.relu(1 - (bins - target).abs())  # linear between the two bins beside the target
        distribution = -(weights * chosen.log_softmax(dim=2)).sum(dim=2).mean(dim=1)
        return box, (distribution * assignment.score).sum()


def _class_loss(logits: Tensor, labels: Tensor, assignment: Assignment) -> Tensor:
    """Binary cross-entropy over all anchors and classes, summed. Targets are 0 but for the assigned scores."""
    batch, classes, anchors = logits.shape
    per_box = assignment.anchor.shape[1] // max(labels.shape[1], 1)
    place = labels.repeat_interleave(per_box, dim=1) * anchors + assignment.anchor
    targets = logits.new_zeros((batch, classes * anchors)).scatter_add(1, place, assignment.score)
    return F.binary_cross_entropy_with_logits(logits, targets.view_as(logits), reduction="sum")
