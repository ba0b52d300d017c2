"""SGD with Nesterov momentum; weight decay on weights only."""

from __future__ import annotations

import torch
from torch import nn

from autospeed_model.hyperparameters import Hyperparameters

NOMINAL_IMAGES = 64  # images an update aims at, by accumulation; weight decay is given for so many


def accumulated_steps(batch_size: int) -> int:
    """Steps whose gradients make one update."""
    return max(round(NOMINAL_IMAGES / batch_size), 1)


def make_optimiser(network: nn.Module, hyperparameters: Hyperparameters, batch_size: int) -> torch.optim.SGD:
    """Two groups: weights, and everything that is not decayed (biases and norms).

    ``batch_size`` is the size that is really used; decay is scaled by the images of an update.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            plain = name == "weight" and not isinstance(module, nn.modules.batchnorm._BatchNorm)
            (decayed if plain else others).append(parameter)
    decay = hyperparameters.weight_decay * batch_size * accumulated_steps(batch_size) / NOMINAL_IMAGES
    on_gpu = decayed[0].is_cuda
    return torch.optim.SGD(
        [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
        lr=hyperparameters.min_lr,
        momentum=hyperparameters.momentum,
        nesterov=hyperparameters.momentum > 0,  # PyTorch refuses Nesterov without momentum
        fused=on_gpu,
        foreach=not on_gpu,
    )


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
