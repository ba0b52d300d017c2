"""Measuring a network on a split, again and again while it trains.

Shapes: B batch, D detections an image at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from autospeed_model.ahead import ahead
from autospeed_model.graphs import Graphed, GraphPool
from autospeed_model.images import as_tensor
from autospeed_model.metrics import DetectionMetrics, Figures
from autospeed_model.network import AutoSpeed
from autospeed_model.nms import Detections, suppress
from autospeed_model.packed import PackedSplit
from autospeed_model.runtime import Runtime


class Evaluator:
    """Figures of ``network``, in evaluation mode on the runtime's device, over all images of a split.

    One thread reads images ahead and another matches boxes behind, while the device works on the batch between them.
    """

    def __init__(
        self, network: AutoSpeed, split: PackedSplit, batch_size: int, runtime: Runtime, pool: GraphPool | None = None
    ) -> None:
        """With ``pool`` the forward pass is launched as a graph; others may use the pool at other times."""
        self.network, self.split, self.batch_size, self.runtime = network, split, batch_size, runtime
        self._pool = pool
        # What the graph reads and writes; the last batch fills a part of it.
        self._images = self._outputs = torch.empty(0)
        self._forward: Callable[[], None] | None = None

    def run(self, on_batch: Callable[[], None] = lambda: None) -> Figures:
        """Measure. ``on_batch`` is called before each batch and may end the evaluation by raising."""
        metrics = DetectionMetrics()
        with ThreadPoolExecutor(1, thread_name_prefix="metrics") as matcher:
            matched = None
            for start, detections in self._detections(on_batch):
                if matched is not None:
                    matched.result()
                matched = matcher.submit(self._match, metrics, start, detections)
            if matched is not None:
                matched.result()
        return metrics.figures()

    def _detections(self, on_batch: Callable[[], None]) -> Iterator[tuple[int, Detections]]:
        """The first image and the detections of every batch, on the host; a batch is launched before the one before it
        is read."""
        starts = range(0, len(self.split), self.batch_size)
        before = None
        for start, images in zip(starts, ahead(self._read, starts), strict=True):
            on_batch()
            found = _to_host(self.detect(images))
            if before is not None:
                yield _arrived(*before)
            before = start, *found
        if before is not None:
            yield _arrived(*before)

    def _read(self, start: int) -> Tensor:
        images = as_tensor(np.ascontiguousarray(self.split.images[start : start + self.batch_size]))
        return images.pin_memory() if self.runtime.on_gpu else images

    def _match(self, metrics: DetectionMetrics, start: int, detections: Detections) -> None:
        rows, counts = detections.rows.numpy(), detections.counts.numpy()
        for offset, count in enumerate(counts):
            metrics.add(rows[offset, :count], self.split.boxes_of(start + offset))

    @torch.no_grad()
    def detect(self, images: Tensor) -> Detections:
        """Detections in uint8 images (up to B, H, W, 3)."""
        if self._pool is None:
            return suppress(self._outputs_of(images.to(self.runtime.device, non_blocking=True)))
        if self._forward is None:
            shape = (self.batch_size, *images.shape[1:])
            self._images = torch.zeros(shape, dtype=torch.uint8, device=self.runtime.device)
            self._outputs = torch.empty_like(self._outputs_of(self._images))
            self._forward = Graphed(self._run_forward, self._pool)
        self._images[: len(images)].copy_(images, non_blocking=True)
        self._forward()
        return suppress(self._outputs[: len(images)])

    def _run_forward(self) -> None:
        with torch.no_grad():
            self._outputs.copy_(self._outputs_of(self._images))

    def _outputs_of(self, images: Tensor) -> Tensor:
        """The network's outputs for uint8 images (B, H, W, 3) on the device."""
        pixels = images.permute(0, 3, 1, 2).to(memory_format=self.runtime.memory_format).float() / 255
        outputs: Tensor = self.network(pixels.to(self.runtime.dtype))
        return outputs


def _to_host(detections: Detections) -> tuple[Detections, torch.cuda.Event | None]:
    """Begin to copy detections to the host; the event tells when they have arrived."""
    if not detections.rows.is_cuda:
        return detections, None
    copies = Detections(*(value.to("cpu", non_blocking=True) for value in detections))
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()
    return copies, arrived


def _arrived(start: int, detections: Detections, event: torch.cuda.Event | None) -> tuple[int, Detections]:
    if event is not None:
        event.synchronize()
    return start, detections
