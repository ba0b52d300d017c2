"""Training batches: which images a step sees, and their way to the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

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


class TrainingBatches:
    """Batches of a split for the steps of a training, a function of (seed, epoch, step)."""

    def __init__(
        self, split: PackedSplit, hyperparameters: Hyperparameters, batch_size: int, seed: int, device: str
    ) -> None:
        self.split, self.hyperparameters = split, hyperparameters
        self.batch_size, self.seed, self.device = batch_size, seed, device
        self.count = len(split)
        self.steps_per_epoch = -(-self.count // batch_size)

    def of_epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[int, Batch]]:
        """Steps ``first`` and on of an epoch, each with its batch on the device: images float (B, 3, H, W) from 0 to 1,
        boxes (B, M, 5) rows class, x1, y1, x2, y2 in pixels, and the mask (B, M) of the rows that are boxes."""
        order = epoch_order(self.seed, epoch, self.count, self.batch_size)
        for step in range(first, self.steps_per_epoch):
            yield step, self._batch(order[step], np.random.default_rng((self.seed, epoch, step)))

    def _batch(self, indices: np.ndarray, rng: np.random.Generator) -> Batch:
        images = torch.from_numpy(np.stack([self.split.images[index] for index in indices]))
        boxes, real = self.split.padded_boxes(indices)
        pixels = images.to(self.device).permute(0, 3, 1, 2).float() / 255
        return pixels, torch.from_numpy(boxes).to(self.device), torch.from_numpy(real).to(self.device)
