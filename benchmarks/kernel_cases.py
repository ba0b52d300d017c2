"""Inputs for benchmarks/kernels.py, the bytes that each case cannot do without, and the baselines in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_kernels import AugmentTable


@dataclass
class Sampling:
    """Arguments of deformable_aggregation."""

    features: Tensor
    spatial_shapes: Tensor
    scale_start: Tensor
    locations: Tensor
    weights: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.features, self.spatial_shapes, self.scale_start, self.locations, self.weights

    def needed_bytes(self) -> tuple[int, int]:
        """Forward and backward: every byte that must be read or written, once.

        Rows of features that some sample touches, all locations, the weights of locations inside an image, the output;
        backward also the output's gradient and all three gradients.
        """
        loc = self.locations
        inside = ((loc > 0) & (loc < 1)).all(-1)
        touched = torch.zeros(self.features.shape[:2], dtype=torch.bool, device=loc.device)
        image = torch.arange(loc.shape[0], device=loc.device)[:, None, None].expand(loc.shape[:3])
        for camera, shapes in enumerate(self.spatial_shapes.tolist()):
            for scale, (height, width) in enumerate(shapes):
                pixel = (loc[:, :, :, camera] * torch.tensor([width, height], device=loc.device) - 0.5).floor().long()
                for step_x, step_y in ((0, 0), (1, 0), (0, 1), (1, 1)):
                    x, y = pixel[..., 0] + step_x, pixel[..., 1] + step_y
                    valid = inside[:, :, :, camera] & (x >= 0) & (x < width) & (y >= 0) & (y < height)
                    row = int(self.scale_start[camera, scale]) + y * width + x
                    touched[image[valid], row[valid]] = True
        row_bytes = self.features.shape[2] * self.features.element_size()
        read = int(touched.sum()) * row_bytes + loc.numel() * 4
        read += int(inside.sum()) * self.weights[0, 0, 0, 0].numel() * self.weights.element_size()
        output = loc.shape[0] * loc.shape[1] * row_bytes
        written = self.features.numel() * self.features.element_size() + loc.numel() * 4
        return read + output, read + output + written + self.weights.numel() * self.weights.element_size()


def sampling(batch: int, dtype: torch.dtype, device: str, projected: bool = True) -> Sampling:
    """Sparse4D's sizes: six cameras of 256 x 704, strides 4 to 32, 900 anchors of 13 points, 256 channels, 8 groups.

    ``projected``: boxes around the vehicle seen by a ring of cameras, so that a point is in one or two of them and the
    points of an anchor are neighbours. Otherwise uniform locations in every camera, which no real model has.
    """
    maps = [(256 // stride, 704 // stride) for stride in (4, 8, 16, 32)]
    rows = sum(height * width for height, width in maps)
    starts = [[camera * rows + sum(h * w for h, w in maps[:scale]) for scale in range(4)] for camera in range(6)]
    locations = torch.rand(batch, 900, 13, 6, 2, device=device)
    if projected:
        locations = projected_locations(batch, device)
    weights = torch.rand(batch, 900, 13, 6, 4, 8, device=device).softmax(dim=4)
    return Sampling(
        torch.randn(batch, 6 * rows, 256, device=device).to(dtype),
        torch.tensor([maps] * 6, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        locations,
        weights.to(dtype),
    )


def projected_locations(batch: int, device: str) -> Tensor:
    """Locations (batch, 900, 13, 6, 2) of points in and around boxes of a vehicle's size, denser near the cameras."""
    angle = torch.rand(batch, 900, 1, device=device) * 2 * math.pi
    radius = torch.rand(batch, 900, 1, device=device) * 52 + 3
    centre = torch.cat((radius * angle.cos(), radius * angle.sin(), torch.rand_like(angle) * 2.5 - 1), dim=2)
    faces = torch.tensor(
        [[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]], device=device
    )
    learned = torch.rand(batch, 900, 6, 3, device=device) * 2 - 1
    offsets = torch.cat((faces.float().expand(batch, 900, -1, -1), learned), dim=2)
    half = torch.tensor([2.3, 1.0, 0.85], device=device)
    yaw = torch.rand(batch, 900, 1, device=device) * 2 * math.pi
    x, y, z = (offsets * half).unbind(3)
    points = torch.stack((x * yaw.cos() - y * yaw.sin(), x * yaw.sin() + y * yaw.cos(), z), dim=3) + centre.unsqueeze(2)
    seen = []
    for heading in (0, -55, 55, 180, -110, 110):
        direction = math.radians(heading)
        forward = points[..., 0] * math.cos(direction) + points[..., 1] * math.sin(direction)
        left = -points[..., 0] * math.sin(direction) + points[..., 1] * math.cos(direction)
        focal = 352 / math.tan(math.radians(35))
        depth = forward.clamp(min=0.1)
        place = torch.stack((0.5 - focal * left / depth / 704, 0.5 - focal * points[..., 2] / depth / 256), dim=3)
        seen.append(torch.where(forward.unsqueeze(3) > 0.1, place, -1.0))
    return torch.stack(seen, dim=3).contiguous()


def lidar_points(count: int, device: str) -> Tensor:
    """Points (count, 4) of a turning lidar: rings on the ground and scattered objects, about 52 m around."""
    angle = torch.rand(count, device=device) * 2 * math.pi
    radius = 2 + 50 * torch.rand(count, device=device) ** 2
    height = torch.where(torch.rand(count, device=device) < 0.6, -1.8 + 0.05 * torch.randn(count, device=device), 0.0)
    height = height + torch.where(height == 0, torch.rand(count, device=device) * 4 - 1.8, 0)
    return torch.stack((radius * angle.cos(), radius * angle.sin(), height, torch.rand(count, device=device)), dim=1)


def mosaic_table(batch: int, images: int, size: tuple[int, int], device: str) -> AugmentTable:
    """Mosaics as AutoSpeed draws them: random centre, scale 0.5 to 1.5, shift 10 %, half of them mirrored."""
    height, width = size
    generator = torch.Generator().manual_seed(0)

    def draw(low: float, high: float) -> Tensor:
        return torch.rand(batch, generator=generator) * (high - low) + low

    seam = torch.stack((draw(width / 2, 1.5 * width), draw(height / 2, 1.5 * height)), dim=1).floor()
    tiles = torch.zeros(batch, 1, 4, 3)
    tiles[:, 0, :, 0] = torch.randint(0, images, (batch, 4), generator=generator)
    for k in range(4):
        tiles[:, 0, k, 1] = seam[:, 0] - (0 if k % 2 else width)
        tiles[:, 0, k, 2] = seam[:, 1] - (0 if k // 2 else height)
    scale = 1 / draw(0.5, 1.5)
    mirror = torch.where(draw(0, 1) < 0.5, -1.0, 1.0)
    geometry = torch.zeros(batch, 1, 10)
    geometry[:, 0, 0], geometry[:, 0, 4] = scale * mirror, scale
    geometry[:, 0, 2] = width + draw(-0.1, 0.1) * width - scale * mirror * width / 2
    geometry[:, 0, 5] = height + draw(-0.1, 0.1) * height - scale * height / 2
    geometry[:, 0, 6:8] = seam
    geometry[:, 0, 8], geometry[:, 0, 9] = 2 * width, 2 * height
    colour = torch.stack((draw(0.985, 1.015), draw(0.3, 1.7), draw(0.6, 1.4), torch.ones(batch)), dim=1)
    return AugmentTable(tiles.int().to(device), geometry.to(device), colour.to(device))


def mosaic_needed_bytes(images: Tensor, table: AugmentTable, size: tuple[int, int], element_size: int) -> int:
    """The output, and every source pixel that some output pixel samples, once."""
    height, width = size
    touched = torch.zeros(images.shape[:3], dtype=torch.bool, device=images.device)
    row = torch.arange(height, device=images.device)[:, None]
    column = torch.arange(width, device=images.device)[None]
    for tiles, g in zip(table.tiles[:, 0].tolist(), table.geometry[:, 0].tolist(), strict=True):
        left = (g[0] * column + g[1] * row + g[2]).floor().long()
        top = (g[3] * column + g[4] * row + g[5]).floor().long()
        for step_x, step_y in ((0, 0), (1, 0), (0, 1), (1, 1)):
            x, y = (left + step_x).expand(size), (top + step_y).expand(size)
            tile = torch.tensor(tiles, device=images.device)[(x >= g[6]).long() + 2 * (y >= g[7]).long()]
            u, v = x - tile[..., 1], y - tile[..., 2]
            shown = (u >= 0) & (u < width) & (v >= 0) & (v < height) & (x >= 0) & (x < g[8]) & (y >= 0) & (y < g[9])
            touched[tile[..., 0][shown], v[shown], u[shown]] = True
    return table.tiles.shape[0] * height * width * 3 * element_size + int(touched.sum()) * 3


def torch_mosaic(images: Tensor, table: AugmentTable, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The augmentation from PyTorch's own parts: canvases by slicing, grid_sample, colour conversion there and back."""
    height, width = size
    batch = table.tiles.shape[0]
    fill = 114.0  # taken off and put back, since grid_sample pads with zeros
    canvas = torch.zeros((batch, 3, 2 * height, 2 * width), device=images.device)
    for sample, tiles in enumerate(table.tiles[:, 0].tolist()):
        for image, x, y in tiles:
            left, top, right, bottom = max(x, 0), max(y, 0), min(x + width, 2 * width), min(y + height, 2 * height)
            part = images[image, top - y : bottom - y, left - x : right - x]
            canvas[sample, :, top:bottom, left:right] = part.permute(2, 0, 1) - fill
    row = torch.arange(height, device=images.device, dtype=torch.float32)[:, None]
    column = torch.arange(width, device=images.device, dtype=torch.float32)[None]
    g = table.geometry[:, 0, :, None, None]
    x, y = g[:, 0] * column + g[:, 1] * row + g[:, 2], g[:, 3] * column + g[:, 4] * row + g[:, 5]
    grid = torch.stack(((2 * x + 1) / (2 * width) - 1, (2 * y + 1) / (2 * height) - 1), dim=3)
    rgb = (F.grid_sample(canvas, grid, align_corners=False) + fill) / 255
    value, low = rgb.amax(1), rgb.amin(1)
    chroma = value - low
    red, green, blue = rgb.unbind(1)
    step = chroma.clamp(min=1e-9)
    hue = torch.where(value == red, (green - blue) / step, torch.where(value == green, 2 + (blue - red) / step, 0))
    hue = torch.where((value == blue) & (value != red) & (value != green), 4 + (red - green) / step, hue) % 6
    gains = table.colour[:, :3, None, None]
    hue = hue * gains[:, 0] % 6
    saturation = (chroma / value.clamp(min=1e-9) * gains[:, 1]).clamp(max=1)
    value = (value * gains[:, 2]).clamp(max=1)
    planes = []
    for shift in (5, 3, 1):
        k = (hue + shift) % 6
        planes.append(value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(planes, dim=1).to(dtype).contiguous(memory_format=torch.channels_last)


def detections(batch: int, anchors: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes around a few hundred objects an image, as a detector in training gives them: most scores are low."""
    objects = torch.rand(batch, 60, 2, device=device) * torch.tensor([1024.0, 512.0], device=device)
    extent = torch.rand(batch, 60, 2, device=device) * 80 + 8
    which = torch.randint(0, 60, (batch, anchors), device=device).unsqueeze(2).expand(-1, -1, 2)
    centre = objects.gather(1, which) + torch.randn(batch, anchors, 2, device=device) * 6
    size = extent.gather(1, which) * (torch.randn(batch, anchors, 2, device=device) * 0.15).exp()
    scores = torch.rand(batch, anchors, device=device) ** 4
    boxes = torch.cat((centre - size / 2, centre + size / 2), dim=2)
    return boxes, scores, torch.randint(0, 4, (batch, anchors), device=device)


def nms_per_image(boxes: Tensor, scores: Tensor, classes: Tensor, threshold: float, limit: int) -> list[Tensor]:
    """torchvision's class-aware suppression, image by image, as detection code bases call it."""
    from torchvision.ops import batched_nms  # type: ignore[import-not-found]

    results = []
    for box, score, label in zip(boxes, scores, classes, strict=True):
        chosen = score > 0.001
        kept = batched_nms(box[chosen], score[chosen], label[chosen], threshold)[:limit]
        results.append(chosen.nonzero().flatten()[kept])
    return results
