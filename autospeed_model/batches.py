"""Training batches: which images a step sees, and their way to the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from autospeed_model.augment import PixelTable, augment_batch
from autospeed_model.draw import Table, draw_table, gather
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.packed import PackedSplit

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


class TrainingBatches:
    """Augmented batches of a split for the steps of a training, a function of (seed, epoch, step)."""

    def __init__(
        self, split: PackedSplit, hyperparameters: Hyperparameters, batch_size: int, seed: int, device: str
    ) -> None:
        self.split, self.hyperparameters = split, hyperparameters
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self.count = len(split)
        self.steps_per_epoch = -(-self.count // batch_size)
        self._sources = np.empty((0, *split.images.shape[1:]), dtype=np.uint8)

    def of_epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Batch]]:
        """Steps ``first`` and on of an epoch, each with its batch on the device: images float (B, 3, H, W) from 0 to 1,
        boxes (B, M, 5) rows class, x1, y1, x2, y2 in pixels, and the mask (B, M) of the rows that are boxes."""
        order = epoch_order(self.seed, epoch, self.count, self.batch_size)
        for step in range(first, self.steps_per_epoch):
            rng = step_generator(self.seed, epoch, step)
            table = draw_table(rng, order[step], self.split, self.hyperparameters)
            images = augment_batch(self._gathered(table), PixelTable.of(table.local(), self.device))
            yield step, (images, _to(table.boxes, self.device), _to(table.real, self.device))

    def _gathered(self, table: Table) -> Tensor:
        """The source images of a batch on the device, uint8 (B * L * 4, H, W, 3)."""
        needed = table.tiles[..., 0].size
        if len(self._sources) < needed:
            self._sources = np.empty((needed, *self._sources.shape[1:]), dtype=np.uint8)
        gather(self.split.images, table, self._sources)
        return _to(self._sources, self.device)


def _to(array: np.ndarray, device: str) -> Tensor:
    return torch.from_numpy(array).to(device)
