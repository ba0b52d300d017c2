"""Plain PyTorch versions of the operations: what the kernels are tested against, and what serves when none is built.

Letters: B batch, A anchors or boxes, P points of an anchor, C cameras, S scales, G groups, E embedding width, R rows of
one image's features (the sum of H*W over cameras and scales), N points, F features of a point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def deformable_aggregation(
    features: Tensor, spatial_shapes: Tensor, scale_start: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sum of bilinear samples over points, cameras and scales; see :func:`hip_kernels.deformable_aggregation`.

    Differentiable through autograd, which is how the hand-written gradients are tested.
    """
    dtype = features.dtype
    work = torch.float64 if dtype == torch.float64 else torch.float32
    batch, _, embed = features.shape
    anchors, points = locations.shape[1:3]
    groups = weights.shape[5]
    total = features.new_zeros((batch, anchors, groups, embed // groups), dtype=work)
    inside = ((locations > 0) & (locations < 1)).all(dim=-1)  # (B, A, P, C); false for NaN
    safe = torch.where(inside.unsqueeze(-1), locations, 0.5)
    for camera, camera_shapes in enumerate(spatial_shapes.tolist()):
        grid = safe[:, :, :, camera].to(work) * 2 - 1
        for scale, (height, width) in enumerate(camera_shapes):
            start = int(scale_start[camera, scale])
            rows = features[:, start : start + height * width].to(work)
            image = rows.transpose(1, 2).reshape(batch, embed, height, width)
            sampled = F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
            sampled = sampled.permute(0, 2, 3, 1).reshape(batch, anchors, points, groups, embed // groups)
            weight = weights[:, :, :, camera, scale].to(work).masked_fill(~inside[:, :, :, camera, None], 0)
            total = total + (sampled * weight.unsqueeze(-1)).sum(dim=2)
    return total.reshape(batch, anchors, embed).to(dtype)


def deformable_aggregation_backward(
    grad_output: Tensor,
    features: Tensor,
    spatial_shapes: Tensor,
    scale_start: Tensor,
    locations: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of features, locations and weights, corner by corner."""
    work = torch.float64 if features.dtype == torch.float64 else torch.float32
    batch, _, embed = features.shape
    anchors, points = locations.shape[1:3]
    groups = weights.shape[5]
    grad = grad_output.to(work).reshape(batch, anchors, 1, groups, embed // groups)
    grad_features = torch.zeros_like(features, dtype=work, memory_format=torch.contiguous_format)
    grad_locations = torch.zeros_like(locations, memory_format=torch.contiguous_format)
    grad_weights = torch.zeros_like(weights, dtype=work, memory_format=torch.contiguous_format)
    inside = ((locations > 0) & (locations < 1)).all(dim=-1)
    safe = torch.where(inside.unsqueeze(-1), locations, 0.5).to(work)
    for camera, camera_shapes in enumerate(spatial_shapes.tolist()):
        for scale, (height, width) in enumerate(camera_shapes):
            size = torch.tensor([width, height], dtype=work, device=features.device)
            pixel = safe[:, :, :, camera] * size - 0.5
            base = pixel.floor()
            share = pixel - base
            weight = weights[:, :, :, camera, scale].to(work)
            for step_x, step_y in ((0, 0), (1, 0), (0, 1), (1, 1)):
                x, y = base[..., 0].long() + step_x, base[..., 1].long() + step_y
                along_x = share[..., 0] if step_x else 1 - share[..., 0]
                along_y = share[..., 1] if step_y else 1 - share[..., 1]
                valid = inside[:, :, :, camera] & (x >= 0) & (x < width) & (y >= 0) & (y < height)
                row = torch.where(valid, int(scale_start[camera, scale]) + y * width + x, 0).flatten(1)
                row = row.unsqueeze(2).expand(-1, -1, embed)
                rows = features.gather(1, row).to(work).reshape(batch, anchors, points, groups, embed // groups)
                dot = (rows * grad).sum(dim=-1) * valid.unsqueeze(-1)
                grad_weights[:, :, :, camera, scale] += (along_x * along_y).unsqueeze(-1) * dot
                pull = (weight * dot).sum(dim=-1)
                grad_locations[:, :, :, camera, 0] += pull * (2 * step_x - 1) * along_y * width
                grad_locations[:, :, :, camera, 1] += pull * (2 * step_y - 1) * along_x * height
                factor = weight * (along_x * along_y * valid).unsqueeze(-1)
                grad_features.scatter_add_(1, row, (factor.unsqueeze(-1) * grad).reshape(row.shape))
    return grad_features.to(features.dtype), grad_locations, grad_weights.to(weights.dtype)


def _cells(points: Tensor, voxel_size: Sequence[float], range: Sequence[float]) -> tuple[Tensor, Tensor, list[int]]:
    """Cell (N, 3) as x, y, z; whether the point has one (N,); the grid's size. Raises ``ValueError`` for a bad grid."""
    if len(voxel_size) != 3 or len(range) != 6:
        raise ValueError(f"expected 3 numbers of voxel_size and 6 of range, got {len(voxel_size)} and {len(range)}")
    if min(voxel_size) <= 0:
        raise ValueError(f"expected a positive voxel_size, got {list(voxel_size)}")
    size = [math.floor((range[axis + 3] - range[axis]) / voxel_size[axis] + 0.5) for axis in (0, 1, 2)]
    if min(size) < 1 or math.prod(size) >= 2**31:
        raise ValueError(f"expected a grid of 1 to 2^31 - 1 voxels, got {size}")
    lowest = torch.tensor(list(range[:3]), dtype=torch.float32, device=points.device)
    step = torch.tensor(list(voxel_size), dtype=torch.float32, device=points.device)
    cell = torch.floor((points[:, :3] - lowest) / step)
    limit = torch.tensor(size, dtype=torch.float32, device=points.device)
    valid = ((cell >= 0) & (cell < limit)).all(dim=1)
    return torch.where(valid.unsqueeze(1), cell, -1.0).to(torch.int32), valid, size


def dynamic_voxelize(points: Tensor, voxel_size: Sequence[float], range: Sequence[float]) -> Tensor:
    """Voxel coordinates (N, 3) int32 as z, y, x of every point; -1 three times outside the range and for NaN."""
    return _cells(points, voxel_size, range)[0].flip(1).contiguous()


def voxelize(
    points: Tensor, voxel_size: Sequence[float], range: Sequence[float], max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The padded results of the operation: voxels, coordinates, points per voxel, point index, voxel count."""
    cell, valid, size = _cells(points, voxel_size, range)
    device = points.device
    voxels = points.new_zeros((max_voxels, max_points, points.shape[1]))
    coordinates = torch.full((max_voxels, 3), -1, dtype=torch.int32, device=device)
    index = torch.full((max_voxels, max_points), -1, dtype=torch.int32, device=device)
    source = valid.nonzero().flatten()
    if source.numel() == 0:
        empty = torch.zeros(max_voxels, dtype=torch.int32, device=device)
        return voxels, coordinates, empty, index, torch.zeros(1, dtype=torch.int32, device=device)
    x, y, z = cell[source].long().unbind(1)
    _, member = torch.unique((z * size[1] + y) * size[0] + x, return_inverse=True)
    order = torch.arange(source.numel(), device=device)
    groups = int(member.max()) + 1
    first = torch.full((groups,), source.numel(), device=device).scatter_reduce(0, member, order, "amin")
    rank = torch.empty_like(first)
    rank[first.argsort()] = torch.arange(groups, device=device)
    voxel = rank[member]
    by_voxel = voxel.argsort(stable=True)
    start = torch.bincount(voxel, minlength=groups).cumsum(0).roll(1).index_fill(0, order[:1], 0)
    slot = torch.empty_like(voxel)
    slot[by_voxel] = order - start[voxel[by_voxel]]
    used = (voxel < max_voxels) & (slot < max_points)
    voxels[voxel[used], slot[used]] = points[source[used]]
    index[voxel[used], slot[used]] = source[used].to(torch.int32)
    count = min(groups, max_voxels)
    coordinates[:count] = cell[source[first.sort().values[:count]]].flip(1)
    per_voxel = (index >= 0).sum(dim=1, dtype=torch.int32)
    return voxels, coordinates, per_voxel, index, torch.tensor([count], dtype=torch.int32, device=device)


def _canvas_sample(images: Tensor, tiles: Tensor, geometry: Tensor, column: Tensor, row: Tensor, fill: float) -> Tensor:
    """Bilinear samples (B, 3, H, W), 0 to 255, of one layer's canvas at the output pixels (H, W)."""
    g = geometry[:, :, None, None]
    # the limits keep the conversion to integers defined, for NaN too, and lie outside every tile
    x = (g[:, 0] * column + g[:, 1] * row + g[:, 2]).nan_to_num(nan=-1e6).clamp(-1e6, 1e6)
    y = (g[:, 3] * column + g[:, 4] * row + g[:, 5]).nan_to_num(nan=-1e6).clamp(-1e6, 1e6)
    left, top = x.floor(), y.floor()
    count, height, width = images.shape[:3]

    def tap(px: Tensor, py: Tensor) -> Tensor:
        tile = (px >= g[:, 6]).long() + 2 * (py >= g[:, 7]).long()
        entry = tiles.gather(1, tile.flatten(1).unsqueeze(2).expand(-1, -1, 3)).reshape(*tile.shape, 3)
        u, v = (px - entry[..., 1]).long(), (py - entry[..., 2]).long()
        shown = (entry[..., 0] >= 0) & (entry[..., 0] < count) & (u >= 0) & (u < width) & (v >= 0) & (v < height)
        shown &= (px >= 0) & (px < g[:, 8]) & (py >= 0) & (py < g[:, 9])
        chosen = torch.where(shown, (entry[..., 0].long() * height + v) * width + u, 0)
        if images.numel() == 0:
            return torch.full((*tile.shape, 3), fill, dtype=x.dtype, device=x.device)
        pixels = images.reshape(-1, 3)[chosen.to(images.device)].to(device=x.device, dtype=x.dtype)
        return torch.where(shown.unsqueeze(-1), pixels, fill)

    part = (x - left).unsqueeze(-1)
    upper = torch.lerp(tap(left, top), tap(left + 1, top), part)
    lower = torch.lerp(tap(left, top + 1), tap(left + 1, top + 1), part)
    return torch.lerp(upper, lower, (y - top).unsqueeze(-1)).permute(0, 3, 1, 2)


def _jitter(rgb: Tensor, gains: Tensor) -> Tensor:
    """Hue, saturation and value of (B, 3, H, W), 0 to 1, times the gains (B, 3): hue on a circle, the rest up to 1."""
    red, green, blue = rgb.unbind(1)
    hue_gain, saturation_gain, value_gain = gains[:, :, None, None].unbind(1)
    high, low = rgb.amax(1), rgb.amin(1)
    chroma = high - low
    is_red, is_green = high == red, high == green
    difference = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    sector = torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0))
    hue = ((sector + difference / chroma.clamp(min=1e-12)) % 6 * hue_gain) % 6
    value = (high * value_gain).clamp(max=1)
    chroma = value * (chroma / high.clamp(min=1e-12) * saturation_gain).clamp(max=1)
    tents = torch.stack(((hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()), dim=1).clamp(0, 1)
    return (value - chroma).unsqueeze(1) + chroma.unsqueeze(1) * tents


def mosaic_augment(
    images: Tensor,
    tiles: Tensor,
    geometry: Tensor,
    colour: Tensor,
    height: int,
    width: int,
    fill: float,
    dtype: torch.dtype,
    channels_last: bool,
) -> Tensor:
    """The augmentation that :class:`hip_kernels.AugmentTable` describes: (B, 3, height, width), 0 to 1, of ``dtype``.

    Computes in float32, or in float64 where ``geometry`` and ``colour`` are float64 (for the tests' sake).
    """
    row = torch.arange(height, device=geometry.device).unsqueeze(1)
    column = torch.arange(width, device=geometry.device)
    layers = [
        _canvas_sample(images, tiles[:, layer], geometry[:, layer], column, row, fill)
        for layer in range(tiles.shape[1])
    ]
    mixed = layers[0] if len(layers) == 1 else torch.lerp(layers[1], layers[0], colour[:, 3, None, None, None])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return _jitter(mixed / 255, colour[:, :3]).to(dtype).contiguous(memory_format=layout)


def _iou(box: Tensor, boxes: Tensor) -> Tensor:
    """IoU of one box (4,) with boxes (A, 4), in the order of operations of the kernels."""
    corner = torch.minimum(box[2:], boxes[:, 2:]) - torch.maximum(box[:2], boxes[:, :2])
    both = corner.clamp(min=0).prod(dim=1)
    area = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    return both / (area - both)


def batched_nms(
    boxes: Tensor, scores: Tensor, classes: Tensor, iou_threshold: float, max_detections: int
) -> tuple[Tensor, Tensor]:
    """Indices kept (B, max_detections) by falling score, -1 past an image's last, and the count (B,)."""
    kept = torch.full((boxes.shape[0], max_detections), -1, dtype=torch.int64, device=boxes.device)
    count = torch.zeros(boxes.shape[0], dtype=torch.int64, device=boxes.device)
    for image in range(boxes.shape[0]):
        order = scores[image].nan_to_num(nan=-math.inf).argsort(descending=True, stable=True)
        order = order[scores[image, order] > -math.inf]
        found: list[Tensor] = []
        while order.numel() and len(found) < max_detections:
            best, order = order[0], order[1:]
            found.append(best)
            same = classes[image, order] == classes[image, best]
            order = order[~(same & (_iou(boxes[image, best], boxes[image, order]) > iou_threshold))]
        if found:
            kept[image, : len(found)] = torch.stack(found)
        count[image] = len(found)
    return kept, count
