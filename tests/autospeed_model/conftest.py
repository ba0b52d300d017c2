"""Golden vectors, and small datasets whose boxes a network can learn."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autospeed_model.network import AutoSpeed
from autospeed_model.packed import FORMAT, VARIANTS, VERSION, PackedSplit, packed_path
from autospeed_model.upstream import load_upstream_tensors

GOLDEN = Path(__file__).parent / "golden"
HEIGHT, WIDTH = 64, 96


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def upstream() -> dict[str, Any]:
    """Per ``variant/size`` the public network's parameter count and, for size n, its tensors' shapes."""
    content: dict[str, Any] = json.loads((GOLDEN / "upstream_state_dict.json").read_text())
    return content


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """The arrays of a golden file by its name."""
    return golden_arrays


def upstream_weights(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """The golden weights: a rule over the upstream names fills every tensor."""
    tensors = {}
    for name, shape in shapes.items():
        if name.startswith("head.dfl"):
            tensors[name] = torch.arange(16.0).view(1, 16, 1, 1)
            continue
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.tensor(0)
            continue
        x = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        if name.endswith("running_var"):
            x = 1 + 0.1 * np.abs(x)
        elif name.endswith("norm.weight"):
            x = 1 + 0.1 * x
        elif name.endswith(("running_mean", "bias")):
            x = 0.1 * x
        else:
            x = x * np.sqrt(2 / np.prod(shape[1:]))
        tensors[name] = torch.from_numpy(x.astype(np.float32))
    return tensors


@dataclass(frozen=True)
class GoldenCase:
    """A network with the golden weights, its input, and the numbers that must come out."""

    network: AutoSpeed
    images: torch.Tensor
    boxes: torch.Tensor
    real: torch.Tensor
    expected: dict[str, np.ndarray]


@pytest.fixture(scope="session", params=list(VARIANTS))
def golden_case(request: pytest.FixtureRequest, upstream: dict[str, Any]) -> GoldenCase:
    height, width = VARIANTS[request.param]
    network = AutoSpeed(height, width)
    load_upstream_tensors(network, upstream_weights(upstream[f"{request.param}/n"]["tensors"]))
    pixels = np.random.RandomState(7).randint(0, 256, (2, 3, height, width)).astype(np.uint8)
    expected = golden_arrays(request.param)
    per_image = [expected["targets"][expected["targets"][:, 0] == image, 1:] for image in range(2)]
    boxes, real = torch.zeros(2, 8, 5), torch.zeros(2, 8, dtype=torch.bool)
    for image, rows in enumerate(per_image):
        label, centre, half = rows[:, :1], rows[:, 1:3], rows[:, 3:] / 2
        corners = np.concatenate((centre - half, centre + half), axis=1) * [width, height, width, height]
        boxes[image, : len(rows)] = torch.from_numpy(np.concatenate((label, corners), axis=1))
        real[image, : len(rows)] = True
    return GoldenCase(network, torch.from_numpy(pixels).float() / 255, boxes, real, expected)


def make_squares(name: str, count: int, seed: int = 0, boxes_each: int = 3) -> PackedSplit:
    """Noise with bright rectangles, whose colour is their class."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 90, (count, HEIGHT, WIDTH, 3), dtype=np.uint8)
    rows, offsets = [], [0]
    for image in images:
        for label in rng.permutation(3)[:boxes_each]:
            width, height = rng.integers(16, 40), rng.integers(16, 32)
            x, y = rng.integers(0, WIDTH - width), rng.integers(0, HEIGHT - height)
            image[y : y + height, x : x + width] = 0
            image[y : y + height, x : x + width, label] = 220
            rows.append((label + 1, x, y, x + width, y + height))
        offsets.append(len(rows))
    boxes = np.array(rows, dtype=np.float32).reshape(-1, 5)
    return PackedSplit(name, images, boxes, np.array(offsets), [str(index) for index in range(count)])


@pytest.fixture(scope="session")
def squares() -> Callable[..., PackedSplit]:
    """Makes a split in memory: ``squares(name, count, seed=0, boxes_each=3)``."""
    return make_squares


@pytest.fixture(scope="session")
def squares_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of such images: 20 to train on, 6 to tune on, 4 for the evaluation."""
    folder = tmp_path_factory.mktemp("données 'packed'")
    entries = {}
    for seed, (name, count) in enumerate({"train": 20, "tune_val": 6, "evaluation": 4}.items()):
        split = make_squares(name, count, seed)
        for what in ("images", "boxes", "offsets"):
            np.save(packed_path(folder, name, what), getattr(split, what))
        packed_path(folder, name, "names").write_text("\n".join(split.names) + "\n")
        entries[name] = {"images": count, "boxes": len(split.boxes)}
    manifest = {"format": FORMAT, "version": VERSION, "variant": "autospeed-2", "height": HEIGHT, "width": WIDTH}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "splits": entries}))
    return folder
