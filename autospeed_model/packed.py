"""A prepared dataset: one memory-mappable uint8 array per split, its boxes, and a manifest of where they came from.

Layout of the folder, ``S`` standing for the name of a split::

    manifest.json     version, variant, size, per split the counts, segments and hashes, the source, what was odd in it
    S.images.npy      uint8 (N, H, W, 3), RGB
    S.boxes.npy       float32 (M, 5): class, x1, y1, x2, y2 in pixels of the prepared image, one image after another
    S.offsets.npy     int64 (N + 1): the boxes of image i are boxes[offsets[i]:offsets[i + 1]]
    S.names.txt       one line an image: split of OpenLane / segment / timestamp
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autospeed_model.errors import UserError

FORMAT = "autospeed-packed"
VERSION = 1
SPLITS = ("train", "tune_val", "evaluation")
# Input size (height, width) of each variant of the network.
VARIANTS: Mapping[str, tuple[int, int]] = {"autospeed": (640, 640), "autospeed-2": (512, 1024)}
CLASSES = ("unused", "in_path", "cutting", "other")
# Images are hashed in pieces of this many, so that the pieces can be hashed where and when they are written.
HASH_IMAGES = 32


def sha256_of_pieces(pieces: Sequence[str]) -> str:
    """Hash of the images of a split: SHA-256 over the hexadecimal SHA-256 of each :data:`HASH_IMAGES` images."""
    return hashlib.sha256("".join(pieces).encode()).hexdigest()


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """The ranges ``(first, end)`` that are hashed, and written, together."""
    for first in range(0, count, HASH_IMAGES):
        yield first, min(first + HASH_IMAGES, count)


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class PackedSplit:
    """One split. Arrays are memory-mapped: the processes of a node share them through the page cache.

    ``images`` uint8 (N, H, W, 3); ``boxes`` float32 (M, 5); ``offsets`` int64 (N + 1); ``names`` N strings.
    """

    name: str
    images: np.ndarray
    boxes: np.ndarray
    offsets: np.ndarray
    names: Sequence[str] = field(repr=False)

    def __len__(self) -> int:
        return int(self.images.shape[0])

    @property
    def height(self) -> int:
        return int(self.images.shape[1])

    @property
    def width(self) -> int:
        return int(self.images.shape[2])

    @property
    def labels_sha256(self) -> str:
        """Hash of the names and boxes: two splits with the same one hold the same pictures, as far as labels tell."""
        digest = hashlib.sha256("\n".join(self.names).encode(errors="surrogateescape"))
        digest.update(self.offsets.tobytes())
        digest.update(self.boxes.tobytes())
        return digest.hexdigest()

    def boxes_of(self, index: int) -> np.ndarray:
        """Boxes of one image: float32 (n, 5), rows class, x1, y1, x2, y2."""
        return self.boxes[self.offsets[index] : self.offsets[index + 1]]

    def flat_boxes(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Boxes of several images one after another: float32 (n, 5), and for each the position in ``indices``."""
        indices = np.asarray(indices, dtype=np.int64)
        first = self.offsets[indices]
        counts = self.offsets[indices + 1] - first
        owner = np.repeat(np.arange(len(indices)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.asarray(self.boxes[first[owner] + within]), owner


def pad_boxes(flat: np.ndarray, owner: np.ndarray, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Bring flat boxes (n, 5), sorted by ``owner`` (n,), to (batch, length, 5), padded with zeros, and a mask (batch,
    length) of the real ones. Raises ValueError if ``length`` is too small."""
    counts = np.bincount(owner, minlength=batch)
    most = int(counts.max(initial=0))
    if most > length:
        raise ValueError(f"an image has {most} boxes, but only {length} are to be kept per image")
    padded = np.zeros((batch, length, 5), dtype=np.float32)
    place = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    padded[owner, place] = flat
    return padded, np.arange(length) < counts[:, None]


class PackedDataset:
    """A dataset folder that ``python -m autospeed_model.prepare`` made."""

    def __init__(self, folder: Path | str) -> None:
        """Read and check the manifest. Raises UserError when ``folder`` is not a dataset, or of another version."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)

    @property
    def height(self) -> int:
        return int(self.manifest["height"])

    @property
    def width(self) -> int:
        return int(self.manifest["width"])

    def split(self, name: str) -> PackedSplit:
        """Open one split. Raises UserError for an unknown name and for files that do not fit the manifest."""
        entry = self._entry(name)
        count, boxes = int(entry["images"]), int(entry["boxes"])
        split = PackedSplit(
            name,
            self._array(name, "images", np.dtype(np.uint8), (count, self.height, self.width, 3)),
            self._array(name, "boxes", np.dtype(np.float32), (boxes, 5)),
            self._array(name, "offsets", np.dtype(np.int64), (count + 1,)),
            self._names(name, count),
        )
        if split.offsets[0] != 0 or split.offsets[-1] != boxes or np.any(np.diff(split.offsets) < 0):
            raise UserError(f"{self.path(name, 'offsets')}: does not fit the {boxes} boxes; {_AGAIN}")
        self._check_boxes(split)
        return split

    def verify(self, name: str) -> None:
        """Hash every file of a split again. Raises UserError for the first that differs from the manifest."""
        split, expected = self.split(name), self._entry(name)["sha256"]
        found = sha256_of_pieces([hashlib.sha256(split.images[a:b].data).hexdigest() for a, b in pieces(len(split))])
        actual = {"images": found} | {
            what: sha256_of_file(self.path(name, what)) for what in ("boxes", "offsets", "names")
        }
        for what, digest in actual.items():
            if digest != expected[what]:
                raise UserError(
                    f"{self.path(name, what)}: SHA-256 is {digest}, the manifest says {expected[what]}; "
                    f"the file was changed or damaged; {_AGAIN}"
                )

    def path(self, name: str, what: str) -> Path:
        """``what``: images, boxes, offsets or names."""
        return packed_path(self.folder, name, what)

    def _entry(self, name: str) -> dict[str, Any]:
        splits: dict[str, dict[str, Any]] = self.manifest["splits"]
        if name not in splits:
            raise UserError(f"{self.folder}: no split {name!r}; there are {', '.join(splits)}")
        return splits[name]

    def _array(self, name: str, what: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        path = self.path(name, what)
        try:
            # An empty array cannot be mapped.
            array = np.load(path, mmap_mode="r" if np.prod(shape) else None, allow_pickle=False)
        except FileNotFoundError:
            raise UserError(f"{path}: missing, although the manifest names it; {_AGAIN}") from None
        except (ValueError, EOFError) as error:
            raise UserError(f"{path}: truncated or not a NumPy array ({error}); {_AGAIN}") from error
        if array.dtype != dtype or array.shape != shape:
            raise UserError(f"{path}: is {array.dtype} {array.shape}, the manifest says {dtype} {shape}; {_AGAIN}")
        return np.asarray(array) if what != "images" else array

    def _check_boxes(self, split: PackedSplit) -> None:
        """A number that is none, or a class that is none, would end a training on a GPU without saying where it is."""
        labels = split.boxes[:, 0]
        good = np.isfinite(split.boxes).all(axis=1) & np.isin(labels, range(len(CLASSES)))
        if not good.all():
            first = int(np.argmin(good))
            image = split.names[int(np.searchsorted(split.offsets, first, side="right")) - 1]
            raise UserError(
                f"{self.path(split.name, 'boxes')}: box {first}, of image {image}, is {split.boxes[first].tolist()}; "
                f"allowed are a class from 0 to {len(CLASSES) - 1} and finite x1, y1, x2, y2; {_AGAIN}"
            )

    def _names(self, name: str, count: int) -> list[str]:
        path = self.path(name, "names")
        try:
            names = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]
        except FileNotFoundError:
            raise UserError(f"{path}: missing, although the manifest names it; {_AGAIN}") from None
        if len(names) != count:
            raise UserError(f"{path}: has {len(names)} lines for {count} images; {_AGAIN}")
        return names


_AGAIN = "prepare the data again with --overwrite"


def packed_path(folder: Path, name: str, what: str) -> Path:
    """Path of ``what`` (images, boxes, offsets or names) of the split ``name``."""
    return folder / f"{name}.{what}.{'txt' if what == 'names' else 'npy'}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``manifest.json``. Raises UserError if there is none, or it is broken or of another version."""
    path = folder / "manifest.json"
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; prepare data with `python -m autospeed_model.prepare SOURCE {folder}`"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: not a prepared dataset, it has no manifest.json; "
            f"prepare data with `python -m autospeed_model.prepare SOURCE OUT`"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {_AGAIN}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: not the manifest of a prepared dataset")
    if manifest.get("version") != VERSION:
        raise UserError(f"{path}: version {manifest.get('version')!r}, this program reads version {VERSION}; {_AGAIN}")
    missing = [key for key in ("variant", "height", "width", "splits") if key not in manifest]
    if missing:
        raise UserError(f"{path}: has no {', '.join(missing)}; {_AGAIN}")
    return manifest


def write_labels(folder: Path, name: str, boxes: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Write the small files of a split: ``boxes`` holds (n, 5) for each image, ``names`` one line each."""
    counts = [len(rows) for rows in boxes]
    flat = np.concatenate([np.zeros((0, 5), np.float32), *boxes]).astype(np.float32)
    np.save(packed_path(folder, name, "boxes"), flat)
    np.save(
        packed_path(folder, name, "offsets"), np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    )
    # File names are bytes: what is no UTF-8 in them is kept as it is.
    lines = "".join(f"{line}\n" for line in names).encode("utf-8", errors="surrogateescape")
    packed_path(folder, name, "names").write_bytes(lines)


def describe_split(folder: Path, name: str, segments: Sequence[str], image_hashes: Sequence[str]) -> dict[str, Any]:
    """What the manifest says of a split whose files are written; ``image_hashes`` are those of its pieces."""
    boxes = np.load(packed_path(folder, name, "boxes"))
    levels = np.bincount(boxes[:, 0].astype(np.int64), minlength=len(CLASSES))
    return {
        "images": len(np.load(packed_path(folder, name, "offsets"))) - 1,
        "boxes": len(boxes),
        "boxes_of_class": {CLASSES[number]: int(levels[number]) for number in range(1, len(CLASSES))},
        "segments": list(segments),
        "sha256": {"images": sha256_of_pieces(image_hashes)}
        | {what: sha256_of_file(packed_path(folder, name, what)) for what in ("boxes", "offsets", "names")},
    }


def write_dataset(
    folder: Path, variant: str, splits: Mapping[str, tuple[np.ndarray, Sequence[np.ndarray]]]
) -> PackedDataset:
    """Write arrays in memory as a dataset: per split, images uint8 (N, H, W, 3) and N arrays of boxes (n, 5).

    For data that does not come from OpenLane, and for tests. All splits have one image size.
    """
    folder.mkdir(parents=True)
    described = {}
    for name, (images, boxes) in splits.items():
        np.save(packed_path(folder, name, "images"), np.ascontiguousarray(images, dtype=np.uint8))
        write_labels(folder, name, boxes, [f"{name}/{index}" for index in range(len(images))])
        hashes = [hashlib.sha256(images[a:b].tobytes()).hexdigest() for a, b in pieces(len(images))]
        described[name] = describe_split(folder, name, [name], hashes)
    height, width = next(iter(splits.values()))[0].shape[1:3]
    write_manifest(folder, variant, height, width, described)
    return PackedDataset(folder)


def write_manifest(folder: Path, variant: str, height: int, width: int, splits: Mapping[str, Any], **more: Any) -> None:
    """Write ``manifest.json``: the last file, a folder without it is not a dataset."""
    manifest = {"format": FORMAT, "version": VERSION, "variant": variant, "height": height, "width": width}
    manifest |= {"classes": list(CLASSES), "splits": dict(splits), **more}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
