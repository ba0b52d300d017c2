"""Training batches: which images a step sees, and their way to the device."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from autospeed_model.draw import BOX_STEP, draw_table
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.images import Staged, make_images
from autospeed_model.packed import PackedSplit
from autospeed_model.runtime import Runtime

Batch = tuple[Tensor, Tensor, Tensor]


def epoch_order(seed: int, epoch: int, count: int, batch_size: int) -> np.ndarray:
    """Indices of the images of every step of an epoch: int64 (steps, batch_size).

    Every image comes once; the last batch is filled up from the start of the same order, so that all are of one size.
    """
    order = np.random.default_rng((seed, epoch)).permutation(count)
    steps = -(-count // batch_size)
    return np.resize(order, (steps, batch_size))


def step_generator(seed: int, epoch: int, step: int) -> np.random.Generator:
    """The source of a step's randomness. Trailing zeros of a seed count for nothing: (s, e, 0) would be the order's."""
    return np.random.default_rng((seed, epoch, step + 1))


def most_boxes(split: PackedSplit, hyperparameters: Hyperparameters) -> int:
    """Boxes that no augmented sample can have more of, a multiple of :data:`BOX_STEP`: the shape to compile for."""
    images = 4 if hyperparameters.mosaic > 0 or hyperparameters.mix_up > 0 else 1
    layers = 2 if hyperparameters.mix_up > 0 else 1
    most = int(np.diff(split.offsets).max(initial=0)) * images * layers
    return max(1, -(-most // BOX_STEP)) * BOX_STEP


class TrainingBatches:
    """Augmented batches of a split for the steps of a training, a function of (seed, epoch, step)."""

    def __init__(
        self, split: PackedSplit, hyperparameters: Hyperparameters, batch_size: int, seed: int, runtime: Runtime
    ) -> None:
        self.split, self.hyperparameters = split, hyperparameters
        self.batch_size, self.seed, self.runtime = batch_size, seed, runtime
        self.count = len(split)
        self.steps_per_epoch = -(-self.count // batch_size)
        # One shape for all batches where another one would be compiled or captured again.
        self.length = most_boxes(split, hyperparameters) if runtime.compile or runtime.graphs else None
        self._images = make_images(split, runtime)
        self._stream = torch.cuda.Stream(runtime.device) if runtime.on_gpu else None
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._begun: tuple[tuple[int, int], Future[Staged]] | None = None
        self._order = -1, np.empty(0)  # an epoch and its order; only the stager's thread uses it

    def of_epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Batch]]:
        """Steps ``first`` and on of an epoch, each with its batch on the device: images (B, 3, H, W) from 0 to 1,
        boxes (B, M, 5) rows class, x1, y1, x2, y2 in pixels, and the mask (B, M) of the rows that are boxes."""
        before: tuple[int, Batch, torch.cuda.Event | None] | None = None
        for step in range(first, self.steps_per_epoch):
            staged = self._begin(epoch, step)
            # After the last step comes the next epoch's first: the device would wait for it between epochs.
            following = (epoch, step + 1) if step + 1 < self.steps_per_epoch else (epoch + 1, 0)
            self._begun = following, self._begin(*following)
            launched = step, *self._launch(staged.result())
            if before is not None:
                yield _when_made(*before)
            before = launched
        if before is not None:
            yield _when_made(*before)

    def _begin(self, epoch: int, step: int) -> Future[Staged]:
        """The host's part of a batch, being made in a thread; what was begun for that step already, if it was."""
        if self._begun is not None and self._begun[0] == (epoch, step):
            return self._begun[1]
        return self._stager.submit(self._stage, epoch, step)

    def _stage(self, epoch: int, step: int) -> Staged:
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(self.seed, epoch, self.count, self.batch_size)
        rng = step_generator(self.seed, epoch, step)
        table = draw_table(rng, self._order[1][step], self.split, self.hyperparameters, self.length)
        return self._images.stage(table)

    def _launch(self, staged: Staged) -> tuple[Batch, torch.cuda.Event | None]:
        """Begin to make a batch on a stream of its own, while the device still trains on the batch before it."""
        if self._stream is None:
            return self._batch(staged), None
        # Memory of older batches may be used again once what reads them is done.
        self._stream.wait_stream(torch.cuda.current_stream(self.runtime.device))
        with torch.cuda.stream(self._stream):
            batch = self._batch(staged)
            made = torch.cuda.Event(blocking=True)
            made.record()
        return batch, made

    def _batch(self, staged: Staged) -> Batch:
        table = staged[0]
        return self._images.samples(staged), self._to(table.boxes), self._to(table.real)

    def _to(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.runtime.device, non_blocking=True) if self.runtime.on_gpu else tensor


def _when_made(step: int, batch: Batch, made: torch.cuda.Event | None) -> tuple[int, Batch]:
    """Sleep until a batch is there: the host stays one step ahead of the device, and has nothing to do earlier."""
    if made is not None:
        made.synchronize()
    return step, batch
