from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hip_kernels
from hip_kernels import _library

from .test_batched_nms import random_boxes
from .test_deformable_aggregation import random_case
from .test_mosaic_augment import random_table


def aggregation(device: str) -> tuple[Any, ...]:
    case = random_case(batch=1, anchors=2, points=2, cameras=2, embed=8, groups=2, dtype=torch.float32, device=device)
    return tuple(t.requires_grad_() if t.is_floating_point() else t for t in case)


def aggregation_backward(device: str) -> tuple[Any, ...]:
    case = random_case(batch=1, anchors=2, points=2, cameras=2, embed=8, groups=2, dtype=torch.float32, device=device)
    return torch.randn(1, 2, 8, device=device), *case


def voxels(device: str) -> tuple[Any, ...]:
    points = torch.rand(30, 4, device=device, requires_grad=True)
    return points, [0.2, 0.2, 0.5], [0.0, 0, 0, 1, 1, 1], 3, 20


def dynamic_voxels(device: str) -> tuple[Any, ...]:
    return torch.rand(30, 4, device=device), [0.2, 0.2, 0.5], [0.0, 0, 0, 1, 1, 1]


def mosaic(device: str) -> tuple[Any, ...]:
    images = torch.randint(0, 256, (3, 6, 8, 3), dtype=torch.uint8, device=device)
    return images, *random_table(2, 2, 3, (6, 8), (6, 8), device), 6, 8, 0.0, torch.float32, True


def boxes(device: str) -> tuple[Any, ...]:
    return *random_boxes(2, 20, device), 0.5, 7


SAMPLES: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "deformable_aggregation": aggregation,
    "deformable_aggregation_backward": aggregation_backward,
    "voxelize": voxels,
    "dynamic_voxelize": dynamic_voxels,
    "mosaic_augment": mosaic,
    "batched_nms": boxes,
}


def test_every_operation_has_a_sample() -> None:
    assert set(SAMPLES) == set(_library.schemas())


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_accepts_the_operation(name: str, device: str) -> None:
    torch.library.opcheck(getattr(torch.ops.hip_kernels, name).default, SAMPLES[name](device))


@pytest.mark.parametrize("name", ["dynamic_voxelize", "batched_nms", "mosaic_augment"])
def test_an_operation_without_derivative_gives_results_that_need_none(name: str, device: str) -> None:
    arguments = [
        a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in SAMPLES[name](device)
    ]
    result = getattr(torch.ops.hip_kernels, name)(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    assert not any(tensor.requires_grad for tensor in results)


def test_the_gradient_of_the_gradient_is_refused(device: str) -> None:
    case = aggregation(device)
    output = torch.ops.hip_kernels.deformable_aggregation(*case)
    (gradient,) = torch.autograd.grad(output.sum(), case[0], create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"no derivative|does not require grad"):
        torch.autograd.grad(gradient.sum(), case[4])


SAY_ONCE = """
import warnings, torch, hip_kernels
boxes = torch.rand(1, 5, 4), torch.rand(1, 5), torch.zeros(1, 5).long(), 0.5, 3
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        hip_kernels.batched_nms(*boxes)
    hip_kernels.dynamic_voxelize(torch.rand(5, 3), [1.0, 1, 1], [0.0, 0, 0, 1, 1, 1])
print([str(warning.message) for warning in said], hip_kernels.is_built("cpu"))
"""


def test_without_a_compiled_library_the_reference_serves_and_says_so_once() -> None:
    environment = {"HIP_KERNELS_LIBRARY": "/nonexistent", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, "-c", SAY_ONCE], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert output.count("hip_kernels is not built for CPU") == 1
    assert output.endswith("False\n")


def test_what_is_built_is_known() -> None:
    assert hip_kernels.is_built("cpu") == _library.LIBRARY.exists()
