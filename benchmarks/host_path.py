"""What a training image costs the host: our path against a per-sample OpenCV pipeline, as ratios of one run.

    python benchmarks/host_path.py

CPU time, not wall time, on one core, so that other work on the machine hardly matters; the ways take turns, and the
median of the turns counts. Images are rendered frames, 1920 x 1280, about 150 kB as JPEG, prepared for AutoSpeed-2
(512 x 1024).
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cv2
import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from autospeed_model.augment_host import augment_on_host
from autospeed_model.draw import draw_table, gather
from autospeed_model.errors import UserError, run_entry
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.labels import CUT
from autospeed_model.packed import PackedDataset, PackedSplit
from autospeed_model.prepare import main as prepare
from autospeed_model.render import main as render

BATCH = 32
HYPERPARAMETERS = Hyperparameters()
Sample = tuple[np.ndarray, np.ndarray]


class PerSample:
    """The usual way: every sample by itself, each of its four images loaded, drawn, warped and recoloured."""

    def __init__(self, split: PackedSplit, files: list[Path] | None) -> None:
        """With ``files`` every image is decoded from JPEG again, without it is read from the prepared array."""
        self.split, self.files = split, files

    def load(self, index: int) -> np.ndarray:
        if self.files is None:
            return np.array(self.split.images[index])
        image = cv2.cvtColor(cv2.imread(str(self.files[index])), cv2.COLOR_BGR2RGB)
        return np.asarray(cv2.resize(image[CUT:], (self.split.width, self.split.height)))

    def sample(self, index: int) -> Sample:
        height, width = self.split.height, self.split.width
        canvas = np.full((2 * height, 2 * width, 3), 114, np.uint8)
        seam_x, seam_y = random.randint(width // 2, 3 * width // 2), random.randint(height // 2, 3 * height // 2)
        chosen = [index, *random.choices(range(len(self.split)), k=3)]
        random.shuffle(chosen)
        boxes = []
        for corner, number in enumerate(chosen):
            image = self.load(number)
            x = seam_x - (width if corner % 2 == 0 else 0)
            y = seam_y - (height if corner < 2 else 0)
            x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + width, 2 * width), min(y + height, 2 * height)
            canvas[y1:y2, x1:x2] = image[y1 - y : y2 - y, x1 - x : x2 - x]
            boxes.append(self.split.boxes_of(number) + np.array([0, x, y, x, y], np.float32))
        return self.warp(canvas, np.concatenate(boxes))

    def warp(self, canvas: np.ndarray, boxes: np.ndarray) -> Sample:
        height, width = self.split.height, self.split.width
        scale = random.uniform(1 - HYPERPARAMETERS.scale, 1 + HYPERPARAMETERS.scale)
        shift = [random.uniform(0.5 - HYPERPARAMETERS.translate, 0.5 + HYPERPARAMETERS.translate) for _ in range(2)]
        matrix = np.array(
            [[scale, 0, shift[0] * width - scale * width], [0, scale, shift[1] * height - scale * height]]
        )
        picture = cv2.warpAffine(canvas, matrix, (width, height), borderValue=(114, 114, 114))
        x = np.clip(boxes[:, [1, 3]], 0, 2 * width) * scale + matrix[0, 2]
        y = np.clip(boxes[:, [2, 4]], 0, 2 * height) * scale + matrix[1, 2]
        area = np.prod([np.ptp(x, axis=1), np.ptp(y, axis=1)], axis=0)
        x, y = np.clip(x, 0, width), np.clip(y, 0, height)
        sides = np.stack([np.ptp(x, axis=1), np.ptp(y, axis=1)], axis=1)
        kept = (sides.min(axis=1) > 2) & (sides.prod(axis=1) > 0.1 * area)
        moved = np.stack([boxes[:, 0], x[:, 0], y[:, 0], x[:, 1], y[:, 1]], axis=1)[kept]
        return self.recolour(picture, moved)

    def recolour(self, picture: np.ndarray, boxes: np.ndarray) -> Sample:
        ranges = (HYPERPARAMETERS.hsv_h, HYPERPARAMETERS.hsv_s, HYPERPARAMETERS.hsv_v)
        gains = np.random.uniform(-1, 1, 3) * ranges + 1
        levels = np.arange(256)
        tables = [levels * gains[0] % 180, np.clip(levels * gains[1], 0, 255), np.clip(levels * gains[2], 0, 255)]
        channels = cv2.split(cv2.cvtColor(picture, cv2.COLOR_RGB2HSV))
        pairs = zip(channels, tables, strict=True)
        picture = cv2.cvtColor(cv2.merge([cv2.LUT(c, t.astype(np.uint8)) for c, t in pairs]), cv2.COLOR_HSV2RGB)
        if random.random() < HYPERPARAMETERS.flip_lr:
            picture = np.fliplr(picture)
            boxes[:, [1, 3]] = self.split.width - boxes[:, [3, 1]]
        return np.ascontiguousarray(picture.transpose(2, 0, 1)), boxes

    def batch(self, indices: np.ndarray) -> list[Sample]:
        return [self.sample(int(index)) for index in indices]


def ways(split: PackedSplit, files: list[Path]) -> dict[str, Callable[[np.ndarray], object]]:
    """Each way from the indices of a batch to what the host has to deliver for it."""
    buffer = np.empty((4 * BATCH, *split.images.shape[1:]), np.uint8)

    def draw(indices: np.ndarray) -> object:
        return draw_table(np.random.default_rng(0), indices, split, HYPERPARAMETERS)

    def draw_and_gather(indices: np.ndarray) -> object:
        table = draw_table(np.random.default_rng(0), indices, split, HYPERPARAMETERS)
        gather(split.images, table, buffer)
        return buffer

    def all_on_the_host(indices: np.ndarray) -> object:
        return augment_on_host(
            split.images, *draw_table(np.random.default_rng(0), indices, split, HYPERPARAMETERS).pixels
        )

    return {
        "per sample, OpenCV, from JPEG": PerSample(split, files).batch,
        "per sample, OpenCV, prepared images": PerSample(split, None).batch,
        "ours, augmented on the CPU": all_on_the_host,
        "ours, pixels sent to the device": draw_and_gather,
        "ours, images live on the device": draw,
    }


def measure(work: Callable[[np.ndarray], object], indices: np.ndarray, seconds: float) -> float:
    """CPU milliseconds an image, over about ``seconds`` of CPU time."""
    start, count = time.process_time(), 0
    while time.process_time() - start < seconds or not count:
        work(indices)
        count += len(indices)
    return 1000 * (time.process_time() - start) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="measurements of each way (default 5)")
    parser.add_argument("--seconds", type=float, default=0.5, help="CPU seconds of a measurement (default 0.5)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    if options.turns < 1 or options.seconds < 0:
        raise UserError(f"found --turns {options.turns} --seconds {options.seconds:g}; allowed are 1 and 0 or more")
    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "openlane"), Path(folder, "packed")
        render([str(source), "--segments", "4", "--validation-segments", "0", "--frames", "8"])
        prepare([str(source), str(out)])
        split = PackedDataset(out).split("train")
        files = [source / "images" / f"{name}.jpg" for name in split.names]
        indices = np.resize(np.arange(len(split)), BATCH)
        measured: dict[str, list[float]] = {name: [] for name in ways(split, files)}
        for turn in range(options.turns + 1):
            for name, work in ways(split, files).items():
                cost = measure(work, indices[: 4 if "JPEG" in name else BATCH], options.seconds)
                if turn:  # the first turn fills caches
                    measured[name].append(cost)
    rows = [(name, statistics.median(costs)) for name, costs in measured.items()]
    grid = Grid("way", "CPU ms/image", "images/CPU s", "ratio")
    for name, cost in rows:
        grid.add_row(name, f"{cost:.3f}", f"{1000 / cost:.0f}", f"{rows[0][1] / cost:.1f}")
    Console().print(grid)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["way", "cpu_ms_per_image", "images_per_cpu_second", "ratio"])
            writer.writerows(
                [name, f"{cost:.4f}", f"{1000 / cost:.2f}", f"{rows[0][1] / cost:.2f}"] for name, cost in rows
            )
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
