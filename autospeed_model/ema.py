"""Exponential moving average of a network's weights, which is what gets evaluated."""

from __future__ import annotations

import copy
import math
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

DECAY = 0.9999
RAMP_UPDATES = 2000  # the average follows the weights closely at first


Network = TypeVar("Network", bound=nn.Module)


class WeightAverage(Generic[Network]):
    """Averages parameters and batch statistics of ``network`` in ``network`` of its own, in float32 throughout."""

    def __init__(self, network: Network) -> None:
        self.network: Network = copy.deepcopy(network).eval().requires_grad_(False)
        self.updates = 0
        self._averages, self._averages_exact = _tensors(self.network)
        self._values, self._values_exact = _tensors(network)
        # In device memory, so that a captured graph follows it.
        self._weight = torch.zeros((), device=self._averages[0].device)

    def update(self) -> None:
        """Move the average towards the network by one update: a few launches, whatever the number of tensors."""
        self.count_update()
        self.follow()

    def count_update(self) -> None:
        """The host's half of :meth:`update`: how much the next :meth:`follow` weighs."""
        self.updates += 1
        self._weight.fill_(1 - DECAY * (1 - math.exp(-self.updates / RAMP_UPDATES)))

    @torch.no_grad()
    def follow(self) -> None:
        """The device's half of :meth:`update`."""
        difference = torch._foreach_sub(self._values, self._averages)
        torch._foreach_mul_(difference, self._weight)
        torch._foreach_add_(self._averages, difference)
        torch._foreach_copy_(self._averages_exact, self._values_exact)


def _tensors(network: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors to be averaged, and counters, which cannot be. Shared storage, not copies."""
    every = [value.detach() for value in network.state_dict().values()]
    return [v for v in every if v.is_floating_point()], [v for v in every if not v.is_floating_point()]
