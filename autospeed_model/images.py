"""Where a split's images lie, and how the augmented samples of a batch come from there.

Letters: B batch, L layers, N images of the split, H and W height and width.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import warnings
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

import hip_kernels
from autospeed_model.augment import PixelTable, augment_batch, augment_reference
from autospeed_model.augment_host import augment_on_host
from autospeed_model.draw import Table, gather, visible_parts
from autospeed_model.packed import PackedSplit
from autospeed_model.runtime import Runtime

# Share of the device's free memory that a split may take by itself: others may share the device.
DEVICE_SHARE = 0.25
CHUNK_BYTES = 256 << 20  # of one copy to the device
READ_ONLY = 8  # cudaHostRegisterReadOnly and hipHostRegisterReadOnly
SLOTS = 2  # batches on their way from the host: one being gathered, one being read by the device

# What a thread of the host prepared for a batch.
Staged: TypeAlias = tuple[Table, Tensor | None]


class Images(Protocol):
    """The images of a split. ``stage`` does what takes the host's time, in any thread, and ``samples`` the rest."""

    def stage(self, table: Table) -> Staged: ...

    def samples(self, staged: Staged) -> Tensor:
        """(B, 3, H, W) of the runtime's type and layout, 0 to 1, on its device."""
        ...


def make_images(split: PackedSplit, runtime: Runtime) -> Images:
    """The images as ``runtime.images`` asks for: in the device's memory, or in the host's."""
    if not runtime.on_gpu:
        return CpuImages(split, runtime)
    fits = split.images.nbytes <= DEVICE_SHARE * torch.cuda.mem_get_info(runtime.device)[0]
    if runtime.images == "device" or (runtime.images == "auto" and fits):
        return DeviceImages(split, runtime)
    one_file = isinstance(split.images, np.ndarray)
    if one_file and hip_kernels.is_built("cuda") and register(split.images):
        return MappedImages(split, runtime)
    return GatheredImages(split, runtime)


class CpuImages:
    """For trainings on the CPU: OpenCV reads the mapped file, sample by sample."""

    def __init__(self, split: PackedSplit, runtime: Runtime) -> None:
        self._images, self._runtime = split.images, runtime

    def stage(self, table: Table) -> Staged:
        return table, torch.from_numpy(augment_on_host(self._images, *table.pixels))

    def samples(self, staged: Staged) -> Tensor:
        pictures = staged[1]
        assert pictures is not None
        return (pictures.permute(0, 3, 1, 2).float() / 255).contiguous(memory_format=self._runtime.memory_format)


class DeviceImages:
    """The whole split as bytes in the device's memory: the host only sends tables."""

    def __init__(self, split: PackedSplit, runtime: Runtime) -> None:
        self._runtime = runtime
        self._images = torch.empty(split.images.shape, dtype=torch.uint8, device=runtime.device)
        step = max(1, CHUNK_BYTES // max(split.images[:1].nbytes, 1))
        for first in range(0, len(split), step):
            self._images[first : first + step].copy_(as_tensor(split.images[first : first + step]))

    def stage(self, table: Table) -> Staged:
        return table, None

    def samples(self, staged: Staged) -> Tensor:
        return _augment(self._images, PixelTable.of(staged[0], self._runtime.device), self._runtime)


class MappedImages:
    """The split stays in the mapped file, which all processes of a node share, and the fused kernel reads it there:
    only pixels that it needs cross the bus, and the host touches none."""

    def __init__(self, split: PackedSplit, runtime: Runtime) -> None:
        """``split.images`` is registered with the driver."""
        self._runtime = runtime
        self._images = as_tensor(split.images)

    def stage(self, table: Table) -> Staged:
        return table, None

    def samples(self, staged: Staged) -> Tensor:
        return _augment(self._images, PixelTable.of(staged[0], self._runtime.device), self._runtime)


class GatheredImages:
    """The split stays in the mapped file. A thread gathers what a batch shows in pinned memory, from where it goes to
    the device."""

    def __init__(self, split: PackedSplit, runtime: Runtime) -> None:
        self._images, self._runtime = split.images, runtime
        self._slots: list[Tensor] = []
        self._free: list[torch.cuda.Event] = []
        self._turn = itertools.count()
        self._device_slot: Tensor | None = None

    def stage(self, table: Table) -> Staged:
        turn = next(self._turn) % SLOTS
        if turn == len(self._slots):
            count = table.tiles[..., 0].size
            self._slots.append(torch.empty((count, *self._images.shape[1:]), dtype=torch.uint8, pin_memory=True))
            self._free.append(torch.cuda.Event(blocking=True))
        self._free[turn].synchronize()
        gather(self._images, table, self._slots[turn].numpy())
        return table, self._slots[turn]

    def samples(self, staged: Staged) -> Tensor:
        table, slot = staged
        assert slot is not None
        pixels = _augment(self._copied(table, slot), PixelTable.of(table.local(), self._runtime.device), self._runtime)
        self._free[next(n for n, mine in enumerate(self._slots) if mine is slot)].record()
        return pixels

    def _copied(self, table: Table, slot: Tensor) -> Tensor:
        """The slot in device memory: of each image the rows that are seen."""
        if self._device_slot is None:
            self._device_slot = torch.empty_like(slot, device=self._runtime.device)
        parts = visible_parts(table, *slot.shape[1:3]).reshape(-1, 4)
        for place, (x1, y1, x2, y2) in enumerate(parts.tolist()):
            if x2 > x1:
                self._device_slot[place, y1:y2].copy_(slot[place, y1:y2], non_blocking=True)
        return self._device_slot


def register(images: np.ndarray) -> bool:
    """Let the device read a mapped file where it lies, for the life of this process. False where a driver cannot."""
    page = mmap.PAGESIZE
    first = images.ctypes.data // page * page
    length = images.ctypes.data + images.nbytes - first
    registered = int(torch.cuda.cudart().cudaHostRegister(first, length, READ_ONLY)) == 0
    if not registered:
        # The runtime keeps the error for whoever launches the next kernel and asks whether that went well.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return registered


def as_tensor(images: np.ndarray) -> Tensor:
    """A tensor over a mapped file, which is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(images)


def _augment(images: Tensor, table: PixelTable, runtime: Runtime) -> Tensor:
    if runtime.compile and not hip_kernels.is_built("cuda"):
        compiled = torch.compile(augment_reference, dynamic=False)
        pixels: Tensor = compiled(images, table, runtime.dtype, runtime.channels_last)
        return pixels
    return augment_batch(images, table, runtime.dtype, runtime.channels_last)
