"""The augmentation of a batch on any device, by the fastest of three ways that compute the same.

Letters: B batch, L layers, N source images, H and W height and width (input and output have one size).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import hip_kernels
from autospeed_model.augment_host import FILL, augment_on_host
from autospeed_model.draw import Table


class PixelTable(NamedTuple):
    """The part of :class:`autospeed_model.draw.Table` that decides pixels, as tensors on the device of the output."""

    tiles: Tensor  # int32 (B, L, 4, 3)
    geometry: Tensor  # float32 (B, L, 10)
    colour: Tensor  # float32 (B, 4)

    @classmethod
    def of(cls, table: Table, device: torch.device | str = "cpu") -> PixelTable:
        """Copy to ``device``, asynchronously where the device allows."""
        return cls(*(_to(array, device) for array in table.pixels))


def _to(array: np.ndarray, device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def augment_batch(
    images: Tensor, table: PixelTable, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> Tensor:
    """Mosaic, affine, mix-up, HSV gains, flips and normalisation: (B, 3, H, W) of ``dtype``, 0 to 1.

    On a GPU the fused kernel, if :mod:`hip_kernels` is built, else :func:`augment_reference`; on the CPU OpenCV sample
    by sample, which is far faster there than either and differs by rounding (see :mod:`autospeed_model.augment_host`).

    :param images: uint8 (N, H, W, 3) that ``table.tiles`` counts: the whole dataset, or what was gathered for the
        batch; where the table is, or (with the kernel) in pinned host memory
    """
    height, width = images.shape[-3:-1]
    if table.tiles.device.type == "cpu":
        pictures = augment_on_host(images.numpy(), *(part.numpy() for part in table))
        pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return pixels.float().div_(255).to(dtype).contiguous(memory_format=layout)
    if hip_kernels.is_built(table.tiles.device.type):
        kernel_table = hip_kernels.AugmentTable(*table)
        return hip_kernels.mosaic_augment(images, kernel_table, (height, width), dtype, channels_last, FILL)
    return augment_reference(images, table, dtype, channels_last)


def augment_reference(
    images: Tensor, table: PixelTable, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> Tensor:
    """What :func:`augment_batch` computes, in plain PyTorch: one pass over the output's pixels, no loop over samples.

    Shapes are static and nothing waits for the device, so that ``torch.compile`` makes one kernel of it.
    """
    height, width = images.shape[-3:-1]
    flat = images.reshape(-1, 3)
    layers = [_layer(flat, table, layer, height, width) for layer in range(table.tiles.shape[1])]
    mixed = layers[0]
    if len(layers) == 2:
        share = table.colour[:, 3, None, None]
        mixed = [share * first + (1 - share) * second for first, second in zip(*layers, strict=True)]
    pixels = _jitter([channel / 255 for channel in mixed], table.colour)
    if channels_last:
        return torch.stack(pixels, dim=3).to(dtype).permute(0, 3, 1, 2)
    return torch.stack(pixels, dim=1).to(dtype)


def _layer(flat: Tensor, table: PixelTable, layer: int, height: int, width: int) -> list[Tensor]:
    """Red, green and blue (B, H, W), 0 to 255, of one canvas sampled at the output's pixels."""
    geometry = table.geometry[:, layer, :, None, None]
    row = torch.arange(height, device=flat.device, dtype=torch.float32)[:, None]
    column = torch.arange(width, device=flat.device, dtype=torch.float32)[None, :]
    x = geometry[:, 0] * column + geometry[:, 1] * row + geometry[:, 2]
    y = geometry[:, 3] * column + geometry[:, 4] * row + geometry[:, 5]
    left, top = x.floor(), y.floor()
    right_share, lower_share = x - left, y - top
    left, top = left.int(), top.int()
    shares = (
        (0, 0, (1 - right_share) * (1 - lower_share)),
        (1, 0, right_share * (1 - lower_share)),
        (0, 1, (1 - right_share) * lower_share),
        (1, 1, right_share * lower_share),
    )
    seam_x, seam_y, canvas_width, canvas_height = (geometry[:, number].int() for number in range(6, 10))
    tiles = table.tiles[:, layer, :, :, None, None]
    total: list[Tensor] | None = None
    for step_x, step_y, share in shares:
        u, v = left + step_x, top + step_y
        is_right, is_lower = u >= seam_x, v >= seam_y
        image, shift_x, shift_y = (_pick(tiles[:, :, number], is_right, is_lower) for number in range(3))
        inside = (u >= 0) & (u < canvas_width) & (v >= 0) & (v < canvas_height) & (image >= 0)
        u, v = u - shift_x, v - shift_y
        inside &= (u >= 0) & (u < width) & (v >= 0) & (v < height)
        place = (image.long() * height + v) * width + u
        pixels = flat[torch.where(inside, place, 0)]
        tap = [share * torch.where(inside, pixels[..., channel].float(), FILL) for channel in range(3)]
        total = tap if total is None else [old + new for old, new in zip(total, tap, strict=True)]
    assert total is not None
    return total


def _pick(values: Tensor, is_right: Tensor, is_lower: Tensor) -> Tensor:
    """One value (B, H, W) of the four (B, 4, 1, 1) of the tiles, by the side of the seam."""
    upper = torch.where(is_right, values[:, 1], values[:, 0])
    lower = torch.where(is_right, values[:, 3], values[:, 2])
    return torch.where(is_lower, lower, upper)


def _jitter(rgb: list[Tensor], colour: Tensor) -> list[Tensor]:
    """Gains on hue, saturation and value; channels (B, H, W) from 0 to 1."""
    red, green, blue = rgb
    gains = colour[:, :3, None, None]
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    step = spread.clamp(min=1e-9)
    # The hue in sixths of the circle: red at 0, green at 2, blue at 4.
    hue = torch.where(
        value == red,
        (green - blue) / step,
        torch.where(value == green, 2 + (blue - red) / step, 4 + (red - green) / step),
    )
    hue = torch.remainder(torch.remainder(hue, 6) * gains[:, 0], 6)
    saturation = (spread / value.clamp(min=1e-9) * gains[:, 1]).clamp(max=1)
    value = (value * gains[:, 2]).clamp(max=1)
    result = []
    for centre in (0.0, 2.0, 4.0):
        away = (hue - centre).abs()
        away = torch.minimum(away, 6 - away)  # on the circle
        result.append(value * (1 - saturation * (away - 1).clamp(0, 1)))
    return result
