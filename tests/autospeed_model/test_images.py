"""Where images lie on a machine with a GPU, as far as it can be tried without one."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autospeed_model.images import READ_ONLY, register


@pytest.mark.parametrize("code", [0, 801])
def test_a_file_that_the_driver_cannot_register_leaves_no_error_to_the_next_kernel(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = [code]  # as CUDA and HIP keep it for each thread
    asked = []

    def host_register(first: int, length: int, flags: int) -> int:
        asked.append((first, length, flags))
        return code

    def launch(*_: object, **__: object) -> None:
        if pending.pop():
            raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=host_register))
    monkeypatch.setattr(torch, "ones", launch)
    images = np.zeros(3 * mmap.PAGESIZE, np.uint8)[5:-5]
    assert register(images) is (code == 0)
    assert pending == ([code] if code == 0 else [])
    ((first, length, flags),) = asked
    assert first % mmap.PAGESIZE == 0 and flags == READ_ONLY
    assert first <= images.ctypes.data and first + length == images.ctypes.data + images.nbytes
