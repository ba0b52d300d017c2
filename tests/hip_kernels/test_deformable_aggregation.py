from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import hip_kernels
from hip_kernels import reference


class Case(NamedTuple):
    features: Tensor
    spatial_shapes: Tensor
    scale_start: Tensor
    locations: Tensor
    weights: Tensor


def random_case(
    batch: int = 2,
    anchors: int = 7,
    points: int = 5,
    cameras: int = 3,
    maps: tuple[tuple[int, int], ...] = ((9, 13), (5, 7), (3, 4)),
    embed: int = 24,
    groups: int = 3,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    spread: float = 0.3,
) -> Case:
    """Locations from -spread to 1 + spread: inside, on the zero padding, outside."""
    sizes = [height * width for height, width in maps]
    rows = cameras * sum(sizes)
    starts = torch.tensor(
        [[camera * sum(sizes) + sum(sizes[:s]) for s in range(len(maps))] for camera in range(cameras)]
    )
    location_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    locations = torch.rand(batch, anchors, points, cameras, 2, dtype=torch.float64) * (1 + 2 * spread) - spread
    weights = torch.randn(batch, anchors, points, cameras, len(maps), groups, dtype=torch.float64)
    return Case(
        torch.randn(batch, rows, embed, dtype=torch.float64).to(dtype).to(device),
        torch.tensor([list(maps)] * cameras, dtype=torch.int32, device=device).reshape(cameras, len(maps), 2),
        starts.to(torch.int32).to(device).reshape(cameras, len(maps)),
        locations.to(location_dtype).to(device),
        weights.to(dtype).to(device),
    )


def in_float64(case: Case) -> Case:
    return Case(*(t.double() if t.is_floating_point() else t for t in case))


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm().clamp(min=1e-30))


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"embed": 64, "groups": 8, "points": 13, "cameras": 6},
        {"embed": 35, "groups": 5},
        {"embed": 256, "groups": 8, "maps": ((16, 44), (8, 22), (4, 11), (2, 6)), "anchors": 3},
        {"embed": 1032, "groups": 1, "anchors": 2},
        {"embed": 66, "groups": 33},
        {"maps": ((1, 1),), "embed": 8, "groups": 8},
        {"points": 130, "anchors": 2, "spread": 0.0},
        {"embed": 256, "groups": 128, "anchors": 2},
    ],
    ids=str,
)
def test_the_forward_pass_equals_the_reference_in_float64(shape: dict, dtype: torch.dtype, device: str) -> None:
    case = random_case(**shape, dtype=dtype, device=device)
    expected = reference.deformable_aggregation(*in_float64(case))
    assert relative_error(hip_kernels.deformable_aggregation(*case), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"embed": 35, "groups": 5},
        {"embed": 256, "groups": 8, "maps": ((16, 44), (8, 22), (4, 11), (2, 6)), "anchors": 3, "points": 13},
        {"embed": 1032, "groups": 1, "anchors": 2},
        {"embed": 66, "groups": 33},
        {"points": 130, "anchors": 2, "spread": 0.0},
    ],
    ids=str,
)
def test_the_gradients_equal_the_reference_in_float64(shape: dict, dtype: torch.dtype, device: str) -> None:
    case = random_case(**shape, dtype=dtype, device=device)
    inputs = [tensor.clone().requires_grad_() for tensor in (case.features, case.locations, case.weights)]
    output = hip_kernels.deformable_aggregation(inputs[0], case.spatial_shapes, case.scale_start, inputs[1], inputs[2])
    grad = torch.randn_like(output)
    gradients = torch.autograd.grad(output, inputs, grad)
    wide = in_float64(case)
    exact = [tensor.clone().requires_grad_() for tensor in (wide.features, wide.locations, wide.weights)]
    reference_output = reference.deformable_aggregation(
        exact[0], case.spatial_shapes, case.scale_start, exact[1], exact[2]
    )
    expected = torch.autograd.grad(reference_output, exact, grad.double())
    for value, wanted, source in zip(gradients, expected, inputs, strict=True):
        assert value.dtype == source.dtype
        assert relative_error(value, wanted) < 3 * TOLERANCE[dtype]


def test_gradcheck_in_float64(device: str) -> None:
    maps = ((4, 5), (2, 3))
    case = random_case(batch=1, anchors=2, points=2, cameras=2, maps=maps, embed=4, groups=2, device=device)
    # finite differences must not step over a pixel's centre, where the derivative jumps
    sizes = torch.tensor([(width, height) for height, width in maps], device=device)
    while ((case.locations.unsqueeze(-2) * sizes - 0.5).frac().abs() - 0.5).abs().gt(0.49).any():
        case.locations.uniform_(-0.2, 1.2)

    def function(features: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return hip_kernels.deformable_aggregation(features, case.spatial_shapes, case.scale_start, locations, weights)

    inputs = [tensor.requires_grad_() for tensor in (case.features, case.locations, case.weights)]
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=1e-12)


@pytest.mark.parametrize("empty", ["batch", "anchors", "points"])
def test_an_empty_dimension_gives_an_empty_or_zero_result(empty: str, device: str) -> None:
    case = random_case(**{empty: 0}, dtype=torch.float32, device=device)
    inputs = [tensor.clone().requires_grad_() for tensor in (case.features, case.locations, case.weights)]
    output = hip_kernels.deformable_aggregation(inputs[0], case.spatial_shapes, case.scale_start, inputs[1], inputs[2])
    assert output.shape == (case.features.shape[0], case.locations.shape[1], 24)
    assert not output.any()
    output.sum().backward()
    assert inputs[0].grad is not None
    assert not inputs[0].grad.any()


def test_views_with_any_strides_and_any_start_are_read_right(device: str) -> None:
    case = random_case(embed=32, groups=4, dtype=torch.float32, device=device)
    expected = hip_kernels.deformable_aggregation(*case)
    wide = torch.zeros(case.features.numel() + 1, device=device)
    wide[1:] = case.features.flatten()
    shifted = wide[1:].view_as(case.features)  # starts 4 bytes behind a 16-byte boundary
    strided = case.weights.transpose(1, 2).contiguous().transpose(1, 2)
    mirrored = case.locations.flip(-1).contiguous().flip(-1)
    value = hip_kernels.deformable_aggregation(
        shifted, case.spatial_shapes.long(), case.scale_start.long(), mirrored, strided
    )
    assert torch.equal(value, expected)


def test_equal_inputs_give_equal_bits(device: str) -> None:
    case = random_case(embed=64, groups=8, points=40, spread=0.0, dtype=torch.float32, device=device)
    first = hip_kernels.deformable_aggregation(*case)
    assert all(torch.equal(hip_kernels.deformable_aggregation(*case), first) for _ in range(5))


@pytest.mark.parametrize("location", [0.0, 1.0, -0.5, 1.5, float("nan"), float("inf")])
def test_a_location_outside_the_image_counts_nothing(location: float, device: str) -> None:
    case = random_case(dtype=torch.float32, device=device)
    locations = torch.full_like(case.locations, location).requires_grad_()
    output = hip_kernels.deformable_aggregation(
        case.features, case.spatial_shapes, case.scale_start, locations, case.weights
    )
    assert not output.any()
    weights = case.weights.clone().requires_grad_()
    output = hip_kernels.deformable_aggregation(
        case.features, case.spatial_shapes, case.scale_start, locations, weights
    )
    gradients = torch.autograd.grad(output, [locations, weights], torch.ones_like(output))
    assert not any(gradient.any() for gradient in gradients)


def test_a_map_that_leaves_the_features_is_an_error_or_zeros(device: str) -> None:
    case = random_case(dtype=torch.float32, device=device)
    if device == "cpu" and hip_kernels.is_built("cpu"):
        with pytest.raises(
            ValueError, match=r"expected the map of camera 0, scale 0 inside the 492 rows.*got rows 500"
        ):
            hip_kernels.deformable_aggregation(*case._replace(scale_start=case.scale_start + 500))
    if device == "cuda":
        far = case._replace(scale_start=case.scale_start + 10_000)
        assert not hip_kernels.deformable_aggregation(*far).any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"locations": torch.rand(2, 7, 5, 4, 2)}, ValueError, "expected locations of shape"),
        ({"weights": torch.rand(2, 7, 5, 3, 3, 5)}, ValueError, "groups that divide the embedding width 24, got 5"),
        ({"weights": torch.rand(2, 7, 5, 3, 2, 3)}, ValueError, "expected weights of shape"),
        ({"features": torch.rand(2, 492)}, ValueError, r"expected features of shape \(B, R, E\)"),
        ({"features": torch.ones(2, 492, 24, dtype=torch.int32)}, TypeError, "expected features of dtype float32"),
        ({"locations": torch.rand(2, 7, 5, 3, 2).half()}, TypeError, "expected locations of dtype Float, got Half"),
        ({"scale_start": torch.zeros(3, 3)}, TypeError, "expected integer spatial_shapes and scale_start"),
        ({"weights": torch.rand(2, 7, 5, 3, 3, 24).repeat(1, 1, 1, 1, 1, 8)}, ValueError, "groups that divide"),
    ],
    ids=range(8),
)
def test_wrong_arguments_name_what_was_expected(change: dict, error: type[Exception], message: str) -> None:
    if not hip_kernels.is_built("cpu"):
        pytest.skip("the messages come from the compiled operations")
    case = random_case(dtype=torch.float32)._replace(**change)
    with pytest.raises(error, match=message):
        hip_kernels.deformable_aggregation(*case)
