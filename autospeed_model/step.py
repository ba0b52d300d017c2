"""The two halves of a training step: gather the gradients of a batch, and change the weights by them.

On a GPU the host only launches: shapes are static, the learning rate lies in device memory, and both halves can be
captured as graphs. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autospeed_model.compile_cache import cache_key, compiled
from autospeed_model.ema import WeightAverage
from autospeed_model.graphs import Graphed, GraphPool
from autospeed_model.loss import DetectionLoss
from autospeed_model.network import AutoSpeed
from autospeed_model.optimiser import set_learning_rate
from autospeed_model.runtime import Runtime

# Where fp16's loss scale starts: PyTorch's own 65536 costs a short training its first updates.
FP16_SCALE = 1024.0


class TrainingStep:
    """Owns the gradients of ``network`` and, with graphs, the memory of a batch.

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
        clip_norm: float = 0.0,
    ) -> None:
        """With ``pool`` both halves are launched as graphs. ``clip_norm`` bounds an update's gradients unless 0."""
        self.clip_norm = clip_norm
        self.network, self.loss, self.optimiser, self.average, self.runtime = network, loss, optimiser, average, runtime
        self.scaler = torch.amp.GradScaler(runtime.kind, init_scale=FP16_SCALE, enabled=runtime.precision == "fp16")
        self.sums = torch.zeros(3, device=runtime.device)  # of the losses without gains, until zeroed
        self._parameters = [value for value in network.parameters() if value.requires_grad]
        # Gradients stay where they are, so that a graph finds them again and an update is one launch for all of them.
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._losses: Callable[..., Tensor] = losses
        self._ready = not runtime.compile
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

    def accumulate(self, images: Tensor, boxes: Tensor, real: Tensor) -> None:
        """Add the gradients and losses of a batch.

        :param images: (B, 3, H, W), 0 to 1
        :param boxes: (B, M, 5), rows class, x1, y1, x2, y2 in pixels
        :param real: bool (B, M), False for padding
        """
        images = images.to(self.runtime.dtype, memory_format=self.runtime.memory_format)
        batch = (images, boxes, real)
        if self._pool is None or not self._batch:
            self._batch = batch  # with graphs the first batch's tensors become those that every other is copied into
        else:
            torch._foreach_copy_(list(self._batch), list(batch), non_blocking=True)
        if self._ready:
            self._accumulate()
            return
        arguments = self.network, self.loss, *self._batch
        with compiled(losses, arguments, self._key()) as self._losses:
            self._accumulate()
        self._ready = True

    def _key(self) -> str:
        """Names all that :func:`losses` depends on when it is traced, since nothing checks later whether it suits."""
        modules = self.network, self.loss
        tensors = *self._batch, *(value for part in modules for value in (*part.parameters(), *part.buffers()))
        described = [(str(t.device), t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in tensors]
        training = [module.training for part in modules for module in part.modules()]
        modes = (
            torch.is_autocast_enabled(self.runtime.kind),
            torch.get_autocast_dtype(self.runtime.kind),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )
        return cache_key(described, training, modes, [repr(part) for part in modules])

    def update(self, rate: float) -> None:
        """Change the weights by the gathered gradients, let their average follow, and start over."""
        set_learning_rate(self.optimiser, rate)
        self.average.count_update()
        self._update()

    def _accumulate_now(self) -> None:
        images, boxes, real = self._batch
        found = self._losses(self.network, self.loss, images, boxes, real)
        total = self.scaler.scale((found * self.loss.gains).sum() * len(images))
        new = torch.autograd.grad(total, self._parameters)
        torch._foreach_add_(self._gradients, _alike(new, self._gradients))
        self.sums += found.detach()

    def _update_now(self) -> None:
        if self.clip_norm:
            self.scaler.unscale_(self.optimiser)
            torch.nn.utils.clip_grad_norm_(self._parameters, self.clip_norm, foreach=True)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        torch._foreach_zero_(self._gradients)
        self.average.follow()


def losses(network: AutoSpeed, loss: DetectionLoss, images: Tensor, boxes: Tensor, real: Tensor) -> Tensor:
    """Forward pass and losses without their gains, a pure function of tensors: (B, 3, H, W), (B, M, 5), (B, M) -> (3,).

    The images' type is the network's precision. Automatic casting would do, but keeps compiled code out of the cache.
    """
    found: Tensor = loss(network(images), boxes, real)
    return found


def _alike(gradients: tuple[Tensor, ...], patterns: list[Tensor]) -> list[Tensor]:
    """The same values in the patterns' order in memory: else they would be added one by one, not all at once."""
    pairs = zip(gradients, patterns, strict=True)
    return [g if g.stride() == like.stride() else torch.empty_like(like).copy_(g) for g, like in pairs]
