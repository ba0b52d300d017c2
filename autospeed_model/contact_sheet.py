"""Augmented samples with their boxes, as one picture: ``python -m autospeed_model.contact_sheet --data D --out F``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cv2
import numpy as np
import torch

from autospeed_model.augment import PixelTable, augment_reference
from autospeed_model.augment_host import augment_on_host
from autospeed_model.draw import draw_table, gather
from autospeed_model.errors import UserError, run_entry
from autospeed_model.hyperparameters import Hyperparameters, check_names
from autospeed_model.packed import CLASSES, SPLITS, PackedDataset, PackedSplit

COLOURS = {1: (230, 60, 60), 2: (240, 190, 40), 3: (70, 170, 240)}  # red, green, blue of each class
SETTABLE = (
    "hsv_h",
    "hsv_s",
    "hsv_v",
    "degrees",
    "translate",
    "scale",
    "shear",
    "flip_ud",
    "flip_lr",
    "mosaic",
    "mix_up",
)
MOST_SAMPLES = 1000  # in memory at once


def sheet(
    split: PackedSplit, hyperparameters: Hyperparameters, rows: int, columns: int, seed: int, host: bool
) -> np.ndarray:
    """Samples of a split, uint8 (rows * H, columns * W, 3), by the device's augmentation or by the one of the host."""
    rng = np.random.Generator(np.random.PCG64(seed))
    indices = rng.permutation(len(split))
    table = draw_table(rng, np.resize(indices, rows * columns), split, hyperparameters)
    images = np.zeros((table.tiles[..., 0].size, split.height, split.width, 3), np.uint8)
    gather(split.images, table, images)
    if host:
        pictures = augment_on_host(images, *table.local().pixels)
    else:
        pixels = augment_reference(torch.from_numpy(images), PixelTable.of(table.local()), channels_last=True)
        pictures = (pixels.permute(0, 2, 3, 1) * 255).round().byte().contiguous().numpy()
    for picture, boxes in zip(pictures, (table.boxes[n][table.real[n]] for n in range(len(pictures))), strict=True):
        draw_boxes(picture, boxes)
    lines = [np.concatenate(list(pictures[n * columns : (n + 1) * columns]), axis=1) for n in range(rows)]
    return np.concatenate(lines, axis=0)


def draw_boxes(picture: np.ndarray, boxes: np.ndarray) -> None:
    """Outline boxes (n, 5), rows class, x1, y1, x2, y2, on an RGB picture."""
    for number, x1, y1, x2, y2 in boxes:
        colour = COLOURS[int(number)]
        corner, other = (round(float(x1)), round(float(y1))), (round(float(x2)) - 1, round(float(y2)) - 1)
        cv2.rectangle(picture, corner, other, colour, 2 if number < 3 else 1)
        cv2.putText(
            picture, CLASSES[int(number)], (corner[0] + 2, corner[1] + 12), cv2.FONT_HERSHEY_SIMPLEX, 0.4, colour
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.contact_sheet",
        description="Show augmented training samples with their boxes in one picture.",
        epilog="example:\n  python -m autospeed_model.contact_sheet --data demo/data --out sheet.png --set degrees=10",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="prepared dataset")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="picture to write, .png or .jpg")
    parser.add_argument("--split", choices=SPLITS, default="train", help="which images (default train)")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--columns", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", action="store_true", help="augment with OpenCV, as a training on a CPU does")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"change one of {', '.join(SETTABLE)}"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.out.suffix not in (".png", ".jpg"):
        raise UserError(f"--out {options.out}: must end with .png or .jpg")
    shape = f"--rows {options.rows} --columns {options.columns}"
    if options.rows < 1 or options.columns < 1:
        raise UserError(f"{shape}: must be at least 1")
    if options.rows * options.columns > MOST_SAMPLES:
        raise UserError(f"{shape}: allowed are {MOST_SAMPLES} samples at most")
    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: must be at least 0")
    for item in options.set:
        if "=" not in item:
            raise UserError(f"--set {item}: write it as NAME=VALUE, such as degrees=10")
    values = dict(item.partition("=")[::2] for item in options.set)
    check_names(values, "--set", SETTABLE)
    hyperparameters = Hyperparameters.from_mapping(values, "--set")
    split = PackedDataset(options.data).split(options.split)
    if not len(split):
        raise UserError(f"{options.data}: split {options.split} has no images")
    picture = sheet(split, hyperparameters, options.rows, options.columns, options.seed, options.host)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    encoded = cv2.imencode(options.out.suffix, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))[1]
    options.out.write_bytes(encoded.tobytes())
    print(f"{options.out}: {options.rows * options.columns} samples, {picture.shape[1]} x {picture.shape[0]} pixels")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
