"""A training as it is usually written, with the three published optimisations one by one, for comparison.

    python benchmarks/reference_variants.py all --data OUT --source RENDERED --json result.json

Written from the description of the published training: batches from worker processes that build each sample with
OpenCV, fp16 with automatic loss scaling, NCHW, an average of the weights in a Python loop, losses read at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor

from autospeed_model.ema import DECAY
from autospeed_model.errors import UserError, run_entry
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.network import AutoSpeed
from autospeed_model.optimiser import accumulated_steps, make_optimiser
from autospeed_model.packed import PackedDataset, PackedSplit
from autospeed_model.runtime import Runtime
from benchmarks.host_path import PerSample
from benchmarks.reference_loss import DenseLoss

VARIANTS = {
    "original": {},
    "vectorised": {"vectorised"},
    "preprocessed": {"preprocessed"},
    "compiled": {"compiled"},
    "all": {"vectorised", "preprocessed", "compiled"},
}
WARM_UP_STEPS = 10


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, split: PackedSplit, files: list[Path] | None) -> None:
        self.pipeline = PerSample(split, files)

    def __len__(self) -> int:
        return len(self.pipeline.split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels, boxes = self.pipeline.sample(index)
        return torch.from_numpy(pixels), torch.from_numpy(boxes.astype(np.float32))


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Images uint8 (B, 3, H, W), boxes (N, 6) with the number of their image."""
    flat = [torch.cat((torch.full((len(boxes), 1), float(n)), boxes), 1) for n, (_, boxes) in enumerate(samples)]
    return torch.stack([pixels for pixels, _ in samples]), torch.cat(flat)


class Reference:
    """The training of one variant."""

    def __init__(self, split: PackedSplit, files: list[Path], variant: str, batch: int, device: str) -> None:
        flags = VARIANTS[variant]
        self.device, self.batch = device, batch
        hyperparameters = Hyperparameters(batch_size=batch)
        self.network = AutoSpeed(split.height, split.width).to(device).train()
        self.average = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.loss = DenseLoss(split.height, split.width, hyperparameters, "vectorised" not in flags).to(device)
        self.optimiser = make_optimiser(self.network, hyperparameters, batch)
        self.scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=device == "cuda")
        self.forward = torch.compile(self.network) if "compiled" in flags else self.network
        self.accumulated, self.step, self.updates = accumulated_steps(hyperparameters, batch), 0, 0
        self.loader = torch.utils.data.DataLoader(
            Samples(split, None if "preprocessed" in flags else files),
            batch,
            shuffle=True,
            num_workers=min(16, len(os.sched_getaffinity(0))),
            collate_fn=collate,
            pin_memory=device == "cuda",
            drop_last=True,
            persistent_workers=True,
        )

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.loader

    def take(self, pixels: Tensor, boxes: Tensor) -> None:
        """A step, after which the host waits for the device."""
        images = pixels.to(self.device, non_blocking=True).float() / 255
        images = images.half() if self.device == "cuda" else images
        losses = self.loss(self.forward(images), boxes.to(self.device))
        self.shown = [loss.item() for loss in losses]
        self.scaler.scale(torch.stack(losses).sum() * self.batch).backward()
        self.step += 1
        if self.step % self.accumulated == 0:
            self.scaler.step(self.optimiser)
            self.scaler.update()
            self.optimiser.zero_grad()
            self.updates += 1
            self.follow()
        if self.device == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def follow(self) -> None:
        """Tensor by tensor."""
        decay = DECAY * (1 - np.exp(-self.updates / 2000))
        for name, value in self.network.state_dict().items():
            if value.is_floating_point():
                self.average[name] = self.average[name] * decay + value * (1 - decay)


def measure(reference: Reference, seconds: float) -> dict[str, float]:
    batches, computing, steps = reference.batches(), 0.0, 0
    for _ in range(WARM_UP_STEPS):
        reference.take(*next(batches))
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        batch = next(batches)
        fetched = time.monotonic()
        reference.take(*batch)
        computing += time.monotonic() - fetched
        steps += 1
    images = steps * reference.batch
    return {"compute_only": images / computing, "end_to_end": images / (time.monotonic() - began)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--source", type=Path, required=True, help="the OpenLane folder that it was prepared from")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    Runtime(given.device)  # or a word why not
    if given.seconds <= 0:
        raise UserError(f"--seconds is {given.seconds:g}; allowed is any number above 0")
    split = PackedDataset(given.data).split("train")
    if not 1 <= given.batch_size <= len(split):
        raise UserError(
            f"--batch-size is {given.batch_size}; allowed are 1 to {len(split)}, the images to train on in {given.data}"
        )
    files = [given.source / "images" / f"{name}.jpg" for name in split.names]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{missing[0]}: no such file; --source must be the OpenLane folder that --data was made from")
    found: dict[str, Any] = measure(
        Reference(split, files, given.variant, given.batch_size, given.device), given.seconds
    )
    text = json.dumps(found)
    if given.json is not None:
        given.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
