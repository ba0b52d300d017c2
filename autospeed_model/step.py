"""The two halves of a training step: gather the gradients of a batch, and change the weights by them.

On a GPU the host only launches: shapes are static, the learning rate lies in device memory, and both halves can be
captured as graphs. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autospeed_model.ema import WeightAverage
from autospeed_model.graphs import Graphed, GraphPool
from autospeed_model.loss import DetectionLoss
from autospeed_model.network import AutoSpeed
from autospeed_model.optimiser import set_learning_rate
from autospeed_model.runtime import Runtime

# Where fp16's loss scale starts: PyTorch's own 65536 costs a short training its first updates.
FP16_SCALE = 1024.0


class TrainingStep:
    """Owns the gradients of ``network`` and, with graphs, the tensors that a batch is copied into.

    Shapes: B batch, M boxes an image (padded; with graphs the same in every batch).
    """

    def __init__(
        self,
        network: AutoSpeed,
        loss: DetectionLoss,
        optimiser: torch.optim.Optimizer,
        average: WeightAverage,
        runtime: Runtime,
        pool: GraphPool | None = None,
    ) -> None:
        """With ``pool`` both halves are launched as graphs."""
        self.network, self.loss, self.optimiser, self.average, self.runtime = network, loss, optimiser, average, runtime
        self.scaler = torch.amp.GradScaler(runtime.kind, init_scale=FP16_SCALE, enabled=runtime.precision == "fp16")
        self.sums = torch.zeros(3, device=runtime.device)  # of box, cls and dfl loss since they were last zeroed
        self._parameters = [value for value in network.parameters() if value.requires_grad]
        # Gradients stay where they are, so that a graph finds them again and an update is one launch for all of them.
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._losses = torch.compile(losses, dynamic=False) if runtime.compile else losses
        self._batch: tuple[Tensor, ...] = ()
        self._pool = pool
        self._accumulate: Callable[[], None] = self._accumulate_now
        self._update: Callable[[], None] = self._update_now
        self.reset()

    def reset(self) -> None:
        """Forget captured graphs: whoever replaced a tensor of the optimiser calls it."""
        if self._pool is not None:
            self._accumulate, self._update = (
                Graphed(half, self._pool) for half in (self._accumulate_now, self._update_now)
            )

    def inputs(self, images: Tensor, boxes: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """The tensors that hold a batch for :meth:`accumulate`, shaped like these; the caller may fill them itself."""
        if not self._batch:
            self._batch = tuple(torch.empty_like(value) for value in (images, boxes, real))
        return self._batch

    def accumulate(self, images: Tensor, boxes: Tensor, real: Tensor) -> None:
        """Add the gradients and losses of a batch.

        :param images: (B, 3, H, W), 0 to 1
        :param boxes: (B, M, 5), rows class, x1, y1, x2, y2 in pixels
        :param real: bool (B, M), False for padding
        """
        images = images.contiguous(memory_format=self.runtime.memory_format)
        if self._pool is None:
            self._batch = (images, boxes, real)
        else:
            for mine, given in zip(self.inputs(images, boxes, real), (images, boxes, real), strict=True):
                if mine is not given:
                    mine.copy_(given, non_blocking=True)
        self._accumulate()

    def update(self, rate: float) -> None:
        """Change the weights by the gathered gradients, let their average follow, and start over."""
        set_learning_rate(self.optimiser, rate)
        self.average.count_update()
        self._update()

    def _accumulate_now(self) -> None:
        images, boxes, real = self._batch
        found = self._losses(self.network, self.loss, self.runtime, images, boxes, real)
        total = self.scaler.scale(found.sum() * len(images))
        torch._foreach_add_(self._gradients, list(torch.autograd.grad(total, self._parameters)))
        self.sums += found.detach()

    def _update_now(self) -> None:
        self.scaler.step(self.optimiser)
        self.scaler.update()
        torch._foreach_zero_(self._gradients)
        self.average.follow()


def losses(
    network: AutoSpeed, loss: DetectionLoss, runtime: Runtime, images: Tensor, boxes: Tensor, real: Tensor
) -> Tensor:
    """Forward pass and loss, a pure function of tensors: (B, 3, H, W), (B, M, 5), (B, M) -> (3,)."""
    with runtime.autocast():
        maps = network(images)
    found: Tensor = loss(maps, boxes, real)
    return found
