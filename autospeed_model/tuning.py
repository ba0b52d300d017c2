"""One training step of a given shape, by which a library of convolutions chooses its kernels."""

from __future__ import annotations

import torch

from autospeed_model.ema import WeightAverage
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.loss import DetectionLoss
from autospeed_model.network import AutoSpeed
from autospeed_model.optimiser import make_optimiser
from autospeed_model.runtime import Runtime
from autospeed_model.step import TrainingStep


def tune(height: int, width: int, size: str, batch: int, precision: str, device: str = "cuda") -> None:
    """Forward and backward pass of ``batch`` images, without compilation, which calls the same convolutions."""
    runtime = Runtime(device, precision, channels_last=True)
    hyperparameters = Hyperparameters(batch_size=batch)
    network = runtime.place(AutoSpeed(height, width, size))
    loss = DetectionLoss(height, width, hyperparameters).to(device)
    optimiser = make_optimiser(network, hyperparameters, batch)
    step = TrainingStep(network, loss, optimiser, WeightAverage(network), runtime)
    boxes = torch.tensor((1, 8, 8, 40, 40), dtype=torch.float32, device=device).expand(batch, 1, 5)
    step.accumulate(torch.rand(batch, 3, height, width, device=device), boxes, boxes[:, :, 0] > 0)
    step.update(hyperparameters.min_lr)
    runtime.wait()
