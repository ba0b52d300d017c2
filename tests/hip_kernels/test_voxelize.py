from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hip_kernels

RANGE = [-10.0, -8.0, -2.0, 10.0, 8.0, 2.0]
VOXEL = [0.5, 0.4, 1.0]


def by_dictionary(
    points: Tensor, voxel_size: list[float], limits: list[float], max_points: int, max_voxels: int
) -> dict:
    """The definition, point by point: cell to the indices of its points, in order of first appearance."""
    size = [round((limits[axis + 3] - limits[axis]) / voxel_size[axis]) for axis in range(3)]
    step, low = torch.tensor(voxel_size), torch.tensor(limits[:3])
    voxels: dict[tuple[int, ...], list[int]] = {}
    for index, point in enumerate(points.cpu()):
        place = torch.floor((point[:3] - low) / step)
        if not all(0 <= float(place[axis]) < size[axis] for axis in range(3)):
            continue
        cell = tuple(int(v) for v in place.flip(0))
        if cell not in voxels and len(voxels) == max_voxels:
            continue
        voxels.setdefault(cell, []).append(index)
    return {cell: indices[:max_points] for cell, indices in voxels.items()}


def check(points: Tensor, voxel_size: list[float], limits: list[float], max_points: int, max_voxels: int) -> None:
    expected = by_dictionary(points, voxel_size, limits, max_points, max_voxels)
    voxels, coordinates, per_voxel = hip_kernels.voxelize(points, voxel_size, limits, max_points, max_voxels)
    assert [tuple(row) for row in coordinates.tolist()] == list(expected)
    assert per_voxel.tolist() == [len(indices) for indices in expected.values()]
    wanted = torch.zeros(len(expected), max_points, points.shape[1])
    for voxel, indices in enumerate(expected.values()):
        wanted[voxel, : len(indices)] = points.cpu()[indices]
    assert torch.equal(voxels.cpu(), wanted)
    padded = hip_kernels.voxelize_padded(points, voxel_size, limits, max_points, max_voxels)
    count = len(expected)
    assert padded[4].tolist() == [count]
    assert (padded[1][count:] == -1).all()
    assert not padded[0][count:].any()
    assert not padded[2][count:].any()
    flat = [index for indices in expected.values() for index in indices]
    assert sorted(padded[3][padded[3] >= 0].tolist()) == sorted(flat)


@pytest.mark.parametrize("features", [3, 4, 5, 8])
def test_voxels_come_in_order_of_first_appearance(features: int, device: str) -> None:
    points = torch.randn(1777, features) * 4
    check(points.to(device), VOXEL, RANGE, max_points=3, max_voxels=2000)


def test_more_voxels_than_allowed_keeps_the_first_ones(device: str) -> None:
    check((torch.randn(900, 4) * 4).to(device), VOXEL, RANGE, max_points=4, max_voxels=37)


def test_one_voxel_with_all_the_points(device: str) -> None:
    points = torch.rand(5000, 4) * 0.3
    check(points.to(device), [1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], max_points=4000, max_voxels=3)


def test_no_points_give_no_voxels(device: str) -> None:
    voxels, coordinates, per_voxel = hip_kernels.voxelize(torch.empty(0, 4, device=device), VOXEL, RANGE, 5, 10)
    assert (voxels.shape, coordinates.shape, per_voxel.shape) == ((0, 5, 4), (0, 3), (0,))
    assert hip_kernels.dynamic_voxelize(torch.empty(0, 4, device=device), VOXEL, RANGE).shape == (0, 3)


def test_points_outside_the_range_or_not_finite_are_left_out(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    outside = [
        [-10.1, 0, 0],
        [10.0, 0, 0],
        [0, 8.0, 0],
        [0, 0, -2.5],
        [nan, 0, 0],
        [0, nan, 0],
        [0, 0, inf],
        [-inf, 0, 0],
    ]
    points = torch.tensor([*outside, [-10.0, -8.0, -2.0], [9.99, 7.99, 1.99]], device=device)
    _, coordinates, per_voxel = hip_kernels.voxelize(points, VOXEL, RANGE, 2, 10)
    assert coordinates.tolist() == [[0, 0, 0], [3, 39, 39]]
    assert per_voxel.tolist() == [1, 1]
    dynamic = hip_kernels.dynamic_voxelize(points, VOXEL, RANGE)
    assert dynamic[:8].tolist() == [[-1, -1, -1]] * 8
    assert dynamic[8:].tolist() == coordinates.tolist()


def test_a_view_that_starts_anywhere_is_read_right(device: str) -> None:
    buffer = torch.randn(4 * 500 + 1, device=device) * 4
    check(buffer[1:].view(500, 4), VOXEL, RANGE, max_points=3, max_voxels=500)
    check((torch.randn(4, 300, device=device) * 4).t(), VOXEL, RANGE, max_points=3, max_voxels=500)


def test_the_gradient_goes_back_to_the_points_that_were_kept(device: str) -> None:
    points = (torch.randn(400, 4) * 4).to(device).requires_grad_()
    voxels, _, _ = hip_kernels.voxelize(points, VOXEL, RANGE, 2, 50)
    grad = torch.randn_like(voxels)
    voxels.backward(grad)
    assert points.grad is not None
    expected = by_dictionary(points.detach(), VOXEL, RANGE, 2, 50)
    wanted = torch.zeros(400, 4)
    for voxel, indices in enumerate(expected.values()):
        wanted[indices] = grad.cpu()[voxel, : len(indices)]
    assert torch.equal(points.grad.cpu(), wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.rand(5, 2), VOXEL, RANGE, 2, 2), "x, y, z first"),
        ((torch.rand(5, 4), [1.0, 1.0], RANGE, 2, 2), "3 numbers"),
        ((torch.rand(5, 4), [1.0, 0.0, 1.0], RANGE, 2, 2), "positive voxel_size"),
        ((torch.rand(5, 4), VOXEL, [0, 0, 0, 0, 1, 1], 2, 2), "at least one voxel on axis 0"),
        ((torch.rand(5, 4), [1e-3] * 3, [0, 0, 0, 1e3, 1e3, 1e3], 2, 2), r"fewer than 2\^31 voxels"),
        ((torch.rand(5, 4), VOXEL, RANGE, 0, 2), "positive max_points"),
    ],
    ids=range(6),
)
def test_wrong_arguments_name_what_was_expected(arguments: tuple, message: str) -> None:
    if not hip_kernels.is_built("cpu"):
        pytest.skip("the messages come from the compiled operations")
    with pytest.raises(ValueError, match=message):
        hip_kernels.voxelize(*arguments)
