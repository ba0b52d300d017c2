"""Every operation is tested on the CPU and, where there are compiled kernels and a GPU, there by the same tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hip_kernels

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and hip_kernels.is_built("cuda") else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever an operation allocates holds NaN or the largest integer first, so that an unwritten element shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def quiet_reference(recwarn: pytest.WarningsRecorder) -> None:
    """The warning that the reference serves is tested in test_registration.py."""
