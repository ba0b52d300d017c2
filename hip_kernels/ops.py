"""The operations for PyTorch: public functions, and their fake (shape) and autograd registrations.

Letters: B batch, A anchors or boxes, P points of an anchor, C cameras, S scales, G groups, E embedding width, R rows of
one image's features, N points, F features of a point. AMD GPUs are PyTorch's device type "cuda", too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hip_kernels import _library

_registrations, _built = _library.load()
_ops = torch.ops.hip_kernels


def is_built(device: str = "cuda") -> bool:
    """Whether compiled kernels serve tensors on ``device`` ("cpu" or "cuda"; the latter on AMD GPUs, too)."""
    return device.upper() in _built


def deformable_aggregation(
    features: Tensor, spatial_shapes: Tensor, scale_start: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """Sample several cameras' feature pyramids around anchors and sum (Sparse4D, arXiv 2311.11722, section 3.2).

    Samples are bilinear with zero padding, pixel centres at (i + 0.5) / size. A location outside the open square (0, 1)
    (NaN too) counts nothing. Sums are float32 for the half types. Differentiable once in features, locations, weights.

    :param features: (B, R, E) float32, float16, bfloat16 or float64
    :param spatial_shapes: (C, S, 2) integers: height and width of each map
    :param scale_start: (C, S) integers: the map's first row in R
    :param locations: (B, A, P, C, 2) x, y; float32, or float64 with float64 features
    :param weights: (B, A, P, C, S, G) of the features' dtype; G divides E
    :returns: (B, A, E) of the features' dtype
    :raises ValueError: wrong shapes or devices; on the CPU also a map that leaves the rows (on a GPU those are zeros)
    :raises TypeError: wrong dtypes
    """
    return _ops.deformable_aggregation(features, spatial_shapes, scale_start, locations, weights)  # type: ignore[no-any-return]


def voxelize(
    points: Tensor, voxel_size: Sequence[float], range: Sequence[float], max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Group points by voxel, both in order of first appearance; waits once for the device, to cut to length.

    Points outside the half-open range, and NaN or infinite ones, are left out; so are points past ``max_points`` of a
    voxel and voxels past ``max_voxels``. Differentiable in the points. :func:`voxelize_padded` does not wait.

    :param points: (N, F) float32, x, y, z first, in metres
    :param voxel_size: x, y, z in metres
    :param range: lowest x, y, z, then highest x, y, z, in metres
    :returns: voxels (M, max_points, F) padded with zeros; int32 coordinates (M, 3) as z, y, x; int32 counts (M,)
    :raises ValueError: wrong shapes, or a grid that is empty or has 2^31 voxels and more
    """
    voxels, coordinates, per_voxel, _, count = voxelize_padded(points, voxel_size, range, max_points, max_voxels)
    found = int(count)
    return voxels[:found], coordinates[:found], per_voxel[:found]


def voxelize_padded(
    points: Tensor, voxel_size: Sequence[float], range: Sequence[float], max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Like :func:`voxelize` with M = ``max_voxels`` and without waiting for the device.

    :returns: voxels, coordinates (-1 past the last), points per voxel (0 past the last), index of each slot's point
        (max_voxels, max_points) int32 or -1, number of voxels (1,) int32
    """
    return _ops.voxelize(points, voxel_size, range, max_points, max_voxels)  # type: ignore[no-any-return]


def dynamic_voxelize(points: Tensor, voxel_size: Sequence[float], range: Sequence[float]) -> Tensor:
    """The voxel of every point: (N, 3) int32 as z, y, x; -1 three times where :func:`voxelize` leaves a point out."""
    return _ops.dynamic_voxelize(points, voxel_size, range)  # type: ignore[no-any-return]


class AugmentTable(NamedTuple):
    """What is drawn for every sample of a batch, on the device of the output. L is 1, or 2 with mix-up.

    A layer is a canvas on which four tiles meet at a seam. Tile 0 is upper left, 1 upper right, 2 lower left, 3 lower
    right; a tile shows one source image, shifted, and is cut off at the seam and at the canvas's edge. Output pixel
    (column, row) is the bilinear sample of the canvas at ``x = m0 * column + m1 * row + m2``,
    ``y = m3 * column + m4 * row + m5``, integers being pixel centres (as in OpenCV's warpAffine); each tap is looked up
    by itself, with the fill value outside. A flip is part of the matrix. Then come mix-up, the division by 255 and the
    colour jitter in HSV (in floats, without rounding to bytes).
    """

    tiles: Tensor  # int32 (B, L, 4, 3): index of the image or -1, canvas x and y of the image's upper left pixel
    geometry: Tensor  # float32 (B, L, 10): m0 to m5, seam x and y, canvas width and height in pixels (whole numbers)
    colour: Tensor  # float32 (B, 4): gains of hue, saturation and value, part of layer 0 in the mix (1 with one layer)


def mosaic_augment(
    images: Tensor,
    table: AugmentTable,
    size: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    fill: float = 0.0,
) -> Tensor:
    """Mosaic, affine, mix-up, colour jitter, flip and normalisation in one pass over the output. Not differentiable.

    :param images: (N, H, W, 3) uint8, contiguous; on the table's device, or in pinned host memory
    :param size: height and width of the output
    :param dtype: float32, float16 or bfloat16
    :param channels_last: memory format of the output
    :param fill: 0 to 255, where no image shows
    :returns: (B, 3, height, width) of ``dtype``, 0 to 1
    :raises ValueError: wrong shapes or devices
    :raises TypeError: wrong dtypes
    """
    return _ops.mosaic_augment(images, *table, *size, fill, dtype, channels_last)  # type: ignore[no-any-return]


def batched_nms(
    boxes: Tensor, scores: Tensor, classes: Tensor, iou_threshold: float, max_detections: int
) -> tuple[Tensor, Tensor]:
    """Greedy non-maximum suppression per class of a whole batch, deterministic, without waiting for the device.

    A box is dropped that overlaps a better one of its class by more than ``iou_threshold``; among equal scores the
    lower index is better. Scores of NaN and -inf mark places without a candidate. Not differentiable.

    :param boxes: (B, A, 4) float32: x1, y1, x2, y2
    :param scores: (B, A) float32
    :param classes: (B, A) int64
    :param max_detections: 1 to 1024
    :returns: indices into A (B, max_detections) int64 by falling score, -1 past the last; how many (B,) int64
    """
    return _ops.batched_nms(boxes, scores, classes, iou_threshold, max_detections)  # type: ignore[no-any-return]


@torch.library.register_fake("hip_kernels::deformable_aggregation")
def _(features: Tensor, spatial_shapes: Tensor, scale_start: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    return features.new_empty((features.shape[0], locations.shape[1], features.shape[2]))


@torch.library.register_fake("hip_kernels::deformable_aggregation_backward")
def _(
    grad_output: Tensor, features: Tensor, shapes: Tensor, start: Tensor, locations: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    def dense(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return dense(features), dense(locations), dense(weights)


@torch.library.register_fake("hip_kernels::voxelize")
def _(
    points: Tensor, voxel_size: Sequence[float], range: Sequence[float], max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def ints(*shape: int) -> Tensor:
        return points.new_empty(shape, dtype=torch.int32)

    voxels = points.new_empty((max_voxels, max_points, points.shape[1]))
    return voxels, ints(max_voxels, 3), ints(max_voxels), ints(max_voxels, max_points), ints(1)


@torch.library.register_fake("hip_kernels::dynamic_voxelize")
def _(points: Tensor, voxel_size: Sequence[float], range: Sequence[float]) -> Tensor:
    return points.new_empty((points.shape[0], 3), dtype=torch.int32)


@torch.library.register_fake("hip_kernels::mosaic_augment")
def _(
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
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = (tiles.shape[0], 3, height, width)
    return torch.empty(shape, dtype=dtype, device=tiles.device, memory_format=layout)


@torch.library.register_fake("hip_kernels::batched_nms")
def _(
    boxes: Tensor, scores: Tensor, classes: Tensor, iou_threshold: float, max_detections: int
) -> tuple[Tensor, Tensor]:
    return classes.new_empty((boxes.shape[0], max_detections)), classes.new_empty((boxes.shape[0],))


def _save_aggregation(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _aggregation_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, locations, weights = _ops.deformable_aggregation_backward(grad, *ctx.saved_tensors)
    return features, None, None, locations, weights


def _save_voxels(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[3])
    ctx.count = inputs[0].shape[0]
    ctx.mark_non_differentiable(*output[1:])


def _voxels_backward(ctx: Any, grad_voxels: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # every point lies in one slot at most, so this sum has one term; the row past the last takes the empty slots
    (index,) = ctx.saved_tensors
    target = torch.where(index < 0, ctx.count, index).flatten().long()
    sums = grad_voxels.new_zeros((ctx.count + 1, grad_voxels.shape[2]))
    return sums.index_add(0, target, grad_voxels.flatten(0, 1))[: ctx.count], None, None, None, None


def _no_gradient(name: str) -> Any:
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(f"hip_kernels: {name} has no derivative")

    return backward


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


_register = torch.library.register_autograd
_register("hip_kernels::deformable_aggregation", _aggregation_backward, setup_context=_save_aggregation)
_register("hip_kernels::voxelize", _voxels_backward, setup_context=_save_voxels)
_register("hip_kernels::deformable_aggregation_backward", _no_gradient("the gradient of deformable_aggregation"))
_register("hip_kernels::dynamic_voxelize", _no_gradient("dynamic_voxelize"), setup_context=_save_nothing)
_register("hip_kernels::mosaic_augment", _no_gradient("mosaic_augment"), setup_context=_save_nothing)
_register("hip_kernels::batched_nms", _no_gradient("batched_nms"), setup_context=_save_nothing)
