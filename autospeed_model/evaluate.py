"""Measure a network on a split: ``python -m autospeed_model.evaluate --data OUT --weights best.pt``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from autospeed_model.checkpoint import load_network
from autospeed_model.errors import UserError, run_entry
from autospeed_model.hyperparameters import RuntimeOptions
from autospeed_model.metrics import DetectionMetrics, Figures
from autospeed_model.network import AutoSpeed
from autospeed_model.nms import Detections, suppress
from autospeed_model.packed import PackedDataset, PackedSplit
from autospeed_model.runtime import Runtime, add_runtime_arguments, runtime_from
from autospeed_model.upstream import load_upstream


def evaluate(
    network: AutoSpeed,
    split: PackedSplit,
    batch_size: int,
    runtime: Runtime,
    on_batch: Callable[[], None] = lambda: None,
) -> Figures:
    """Figures of ``network`` (in evaluation mode, on the runtime's device) over all images of a split.

    ``on_batch`` is called before each batch and may end the evaluation by raising.
    """
    metrics = DetectionMetrics()
    for start in range(0, len(split), batch_size):
        on_batch()
        end = min(start + batch_size, len(split))
        detections = detect(network, split.images[start:end], runtime)
        rows, counts = detections.rows.cpu().numpy(), detections.counts.cpu().numpy()
        for offset in range(end - start):
            metrics.add(rows[offset, : counts[offset]], split.boxes_of(start + offset))
    return metrics.figures()


@torch.inference_mode()
def detect(network: AutoSpeed, images: np.ndarray, runtime: Runtime) -> Detections:
    """Detections in uint8 images (B, H, W, 3)."""
    batch = torch.from_numpy(np.array(images)).to(runtime.device, non_blocking=True)
    pixels = batch.permute(0, 3, 1, 2).to(memory_format=runtime.memory_format).float() / 255
    with runtime.autocast():
        outputs = network(pixels)
    return suppress(outputs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.evaluate",
        description="Precision, recall and average precision of a network on one split of a prepared dataset.",
        epilog="example: python -m autospeed_model.evaluate --data prepared --weights runs/train/best.pt",
    )
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--weights", type=Path, help="best.pt, last.pt or checkpoint.pt of a training")
    parser.add_argument("--upstream", type=Path, help="instead of --weights: a checkpoint of the public project")
    parser.add_argument("--size", default="n", help="size of the --upstream network (default n)")
    parser.add_argument("--split", default="evaluation", help="train, tune_val or evaluation (default)")
    parser.add_argument("--batch-size", type=int, default=32, help="images at a time (default 32)")
    add_runtime_arguments(parser)
    given = parser.parse_args(arguments)
    if (given.weights is None) == (given.upstream is None):
        raise UserError("give either --weights or --upstream")
    if given.batch_size < 1:
        raise UserError(f"--batch-size is {given.batch_size}; it must be at least 1")
    runtime = runtime_from(given, RuntimeOptions())
    data = PackedDataset(given.data)
    if given.weights is not None:
        network = load_network(given.weights)
    else:
        network = AutoSpeed(data.height, data.width, given.size).eval()
        load_upstream(network, given.upstream)
    if (network.height, network.width) != (data.height, data.width):
        raise UserError(
            f"{given.data} has images of {data.height} x {data.width}, "
            f"the network is for {network.height} x {network.width}"
        )
    split = data.split(given.split)
    figures = evaluate(runtime.place(network), split, given.batch_size, runtime)
    text = "  ".join(f"{name} {value:.4f}" for name, value in figures.to_mapping().items())
    Console().print(f"{given.split} ({len(split)} images)  {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
