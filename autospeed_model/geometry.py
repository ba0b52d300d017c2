"""Coordinate transforms of many points by few matrices, as one matrix product per matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def transform_points(matrix: Tensor, points: Tensor) -> Tensor:
    """``(matrix @ points[..., None])[..., 0]`` without a product per point.

    A broadcasting ``matmul`` repeats the matrix for every point and runs one tiny product each. Here the points that
    share a matrix become the columns of one product.

    :param matrix: (*L, R, C), such as (B, N, 3, 3) for the N cameras of B samples
    :param points: (*L, ..., C), up to broadcasting of the dimensions ``L``; whatever dimensions follow them share the
        matrix, such as X, Y and Z in (B, N, X, Y, Z, 3)
    :returns: (*L, ..., R)
    :raises ValueError: when the shapes do not fit
    """
    lead = matrix.ndim - 2
    if lead < 0 or points.ndim < lead + 1 or matrix.shape[-1] != points.shape[-1]:
        raise ValueError(
            f"expected a matrix (*L, R, C) and points (*L, ..., C), got {tuple(matrix.shape)} and {tuple(points.shape)}"
        )
    try:
        shared = torch.broadcast_shapes(matrix.shape[:lead], points.shape[:lead])
    except RuntimeError:
        raise ValueError(
            f"the matrices' leading dimensions {tuple(matrix.shape[:lead])} do not fit those of the points, "
            f"{tuple(points.shape[:lead])}"
        ) from None
    inner = points.shape[lead:-1]
    columns = points.expand(*shared, *inner, points.shape[-1]).flatten(lead, -2) if inner else points.unsqueeze(-2)
    moved = columns @ matrix.transpose(-2, -1)  # (*shared, prod(inner), R): a product per matrix
    return moved.reshape(*shared, *inner, matrix.shape[-2])
