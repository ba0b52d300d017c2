"""SGD with Nesterov momentum; weight decay on weights only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autospeed_model.hyperparameters import Hyperparameters

NOMINAL_IMAGES = 64  # weight decay is given for so many images an update


def accumulated_steps(hyperparameters: Hyperparameters, batch_size: int) -> int:
    """Steps of ``batch_size`` images whose gradients make one update."""
    return max(round(hyperparameters.update_images / batch_size), 1)


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
    images = batch_size * accumulated_steps(hyperparameters, batch_size)
    decay = hyperparameters.weight_decay * images / NOMINAL_IMAGES
    on_gpu = decayed[0].is_cuda
    optimiser = torch.optim.SGD(
        [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
        # In device memory, so that a captured graph follows it; the host's implementation wants a number.
        lr=torch.tensor(hyperparameters.min_lr, device=decayed[0].device) if on_gpu else hyperparameters.min_lr,
        momentum=hyperparameters.momentum,
        nesterov=hyperparameters.momentum > 0,  # PyTorch refuses Nesterov without momentum
        fused=on_gpu,
        foreach=not on_gpu,
    )
    if hyperparameters.momentum > 0:
        # From zeros the first update is like any other, and a graph may capture it.
        for parameter in (*decayed, *others):
            optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimiser


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def restore_momentum(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take the state of ``state_dict()`` and nothing else: how the update is computed may differ from machine to
    machine, and the hyper-parameters are the training's own.

    :raises ValueError: when it is the state of other weights.
    """
    groups = optimiser.state_dict()["param_groups"]
    if not state.keys() <= {number for group in groups for number in group["params"]}:
        raise ValueError("momentum of weights that this network does not have")
    optimiser.load_state_dict({"state": state, "param_groups": groups})
