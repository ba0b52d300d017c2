"""Overlap of boxes. A box is x1, y1, x2, y2 in the last dimension; leading dimensions broadcast."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPSILON = 1e-7


def complete_iou(first: Tensor, second: Tensor) -> Tensor:
    """CIoU (Zheng et al. 2020): IoU less the distance of the centres and the difference of the aspect ratios.

    (..., 4) and (..., 4) -> (...). No gradient flows through the weight of the aspect ratio, as in the paper.
    """
    ax1, ay1, ax2, ay2 = first.unbind(-1)
    bx1, by1, bx2, by2 = second.unbind(-1)
    a_width, a_height = ax2 - ax1, ay2 - ay1 + EPSILON
    b_width, b_height = bx2 - bx1, by2 - by1 + EPSILON
    overlap_x = (torch.minimum(ax2, bx2) - torch.maximum(ax1, bx1)).clamp(min=0)
    overlap_y = (torch.minimum(ay2, by2) - torch.maximum(ay1, by1)).clamp(min=0)
    intersection = overlap_x * overlap_y
    iou = intersection / (a_width * a_height + b_width * b_height - intersection + EPSILON)

    hull_width = torch.maximum(ax2, bx2) - torch.minimum(ax1, bx1)
    hull_height = torch.maximum(ay2, by2) - torch.minimum(ay1, by1)
    diagonal = hull_width.square() + hull_height.square() + EPSILON
    distance = ((bx1 + bx2 - ax1 - ax2).square() + (by1 + by2 - ay1 - ay2).square()) / 4
    aspect = (4 / math.pi**2) * (torch.atan(b_width / b_height) - torch.atan(a_width / a_height)).square()
    with torch.no_grad():
        # Divisions of compiled code may give an IoU of a little more than 1, beside which the usual
        # aspect - iou + (1 + EPSILON) can be 0.
        weight = aspect / (aspect + (1 - iou).clamp(min=0) + EPSILON)
    return iou - (distance / diagonal + aspect * weight)


def pairwise_iou(first: Tensor, second: Tensor) -> Tensor:
    """Plain IoU of every pair: (..., N, 4) and (..., M, 4) -> (..., N, M)."""
    a, b = first.unsqueeze(-2), second.unsqueeze(-3)
    extent = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    intersection = extent[..., 0] * extent[..., 1]
    a_area = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    b_area = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    union = a_area + b_area - intersection
    # Two boxes without any area have an empty union and overlap nothing.
    return torch.where(union > 0, intersection / union.clamp(min=torch.finfo(union.dtype).tiny), 0.0)
