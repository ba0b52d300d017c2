"""The parallel part of preparing: labels, then images, piece by piece into the arrays of a folder under construction.

A piece that is written is noted with its hash in ``progress.jsonl``. After a crash the pieces whose hash still fits are
kept, whatever the crash did to the file system's buffers.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from autospeed_model.labels import CUT, SOURCE_HEIGHT, SOURCE_WIDTH, Geometry, LabelError, parse_label
from autospeed_model.openlane import DamagedError, Key, Member, jpeg_size, read
from autospeed_model.packed import HASH_IMAGES, pieces

GREY = 114  # of the padding, as in the augmentation
LABELS_A_TASK = 200
REDUCED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}


class ImageError(ValueError):
    """An image that cannot be used. ``kind`` is that of the report."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def prepare_image(data: bytes, geometry: Geometry) -> np.ndarray:
    """A JPEG file of OpenLane to uint8 (height, width, 3) in RGB: cut, scaled, padded. Raises ImageError.

    The decoder itself halves the image while it stays larger than what is wanted: that is fast and does not alias.
    """
    try:
        size = jpeg_size(data)
    except DamagedError as error:
        raise ImageError("image_unreadable", str(error)) from error
    if size != (SOURCE_WIDTH, SOURCE_HEIGHT):
        raise ImageError("image_of_wrong_size", f"{size[0]} x {size[1]}")
    width, height = geometry.scaled
    step = max(step for step in REDUCED if step == 1 or width * step <= SOURCE_WIDTH)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), REDUCED[step] | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise ImageError("image_unreadable", str(error)) from error
    if image is None:
        raise ImageError("image_unreadable", "cannot be decoded")
    picture = cv2.resize(image[CUT // step :], (width, height), interpolation=cv2.INTER_LINEAR)
    result = np.full((geometry.height, geometry.width, 3), GREY, np.uint8)
    left, top = geometry.padding
    cv2.cvtColor(picture, cv2.COLOR_BGR2RGB, picture)
    result[top : top + height, left : left + width] = picture
    return result


@dataclass(frozen=True)
class Label:
    """What one label file says: boxes float32 (n, 5) in the prepared image, or None if it cannot be read."""

    boxes: np.ndarray | None
    odd: list[tuple[str, str]]
    counts: Counter[str]


@dataclass(frozen=True)
class LabelTask:
    first: int
    members: Sequence[Member]
    geometry: Geometry


def read_labels(task: LabelTask) -> tuple[int, list[Label]]:
    """Read some label files; returns the number of the first of them with what they say."""
    labels = []
    for member in task.members:
        counts: Counter[str] = Counter()
        try:
            boxes, odd = parse_label(read(member))
            labels.append(Label(task.geometry.place(boxes, counts), odd, counts))
        except (LabelError, DamagedError) as error:
            labels.append(Label(None, [("label_unreadable", str(error))], counts))
    return task.first, labels


@dataclass(frozen=True)
class Piece:
    """Consecutive images, for ``path`` from byte ``offset`` on; ``expected`` is its note if it was written."""

    split: str
    first: int
    path: str
    offset: int
    members: Sequence[Member]
    geometry: Geometry
    expected: dict[str, Any] | None = None


@dataclass(frozen=True)
class Written:
    """A piece on disk: its hash, and the images that could not be used as (index in the split, kind, detail)."""

    split: str
    first: int
    sha256: str
    failed: list[list[Any]] = field(default_factory=list)
    count: int = 0
    cpu_seconds: float = 0.0
    kept: bool = False


def write_piece(piece: Piece) -> Written:
    """Decode and write one piece, unless its bytes on disk are already the expected ones."""
    cv2.setNumThreads(1)
    start = time.process_time()
    count, geometry = len(piece.members), piece.geometry
    size = count * geometry.height * geometry.width * 3
    file = os.open(piece.path, os.O_RDWR)
    try:
        if piece.expected is not None:
            digest = hashlib.sha256(os.pread(file, size, piece.offset)).hexdigest()
            if digest == piece.expected["sha256"]:
                return Written(piece.split, piece.first, digest, piece.expected["failed"], count, 0.0, kept=True)
        images, failed = np.zeros((count, geometry.height, geometry.width, 3), np.uint8), []
        for row, member in enumerate(piece.members):
            try:
                images[row] = prepare_image(read(member), geometry)
            except ImageError as error:
                failed.append([piece.first + row, error.kind, str(error)])
            except DamagedError as error:
                failed.append([piece.first + row, "image_unreadable", str(error)])
        content = images.data.cast("B")
        while content:
            written = os.pwrite(file, content, piece.offset + size - len(content))
            content = content[written:]
    finally:
        os.close(file)
    digest = hashlib.sha256(images.data).hexdigest()
    return Written(piece.split, piece.first, digest, failed, count, time.process_time() - start)


@dataclass
class Frames:
    """The frames of one split in their order, with the boxes that their labels gave."""

    keys: list[Key]
    members: list[Member]
    boxes: list[np.ndarray]

    def without(self, rows: set[int]) -> Frames:
        kept = [row for row in range(len(self.keys)) if row not in rows]
        return Frames(
            [self.keys[row] for row in kept], [self.members[row] for row in kept], [self.boxes[row] for row in kept]
        )


class Progress:
    """``progress.jsonl`` in the folder under construction: one line a written piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[tuple[str, int], dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                self.done[entry["split"], entry["first"]] = entry
            except (ValueError, KeyError, TypeError):
                break  # the last line of a process that was killed; those before it are whole
        text = "".join(f"{json.dumps(entry)}\n" for entry in self.done.values())
        path.write_text(text)

    def note(self, written: Written) -> None:
        entry = {"split": written.split, "first": written.first, "sha256": written.sha256, "failed": written.failed}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def lay_out(path: Path, count: int, geometry: Geometry) -> int:
    """Make or repair the frame of an array file of ``count`` images; returns where the first image begins in it."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        _write_header(file, (count, geometry.height, geometry.width, 3))
        begin = file.tell()
        file.truncate(begin + count * geometry.height * geometry.width * 3)
    return begin


def _write_header(file: Any, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def pieces_of(split: str, frames: Frames, path: Path, geometry: Geometry, progress: Progress) -> Iterator[Piece]:
    begin, size = lay_out(path, len(frames.keys), geometry), geometry.height * geometry.width * 3
    for first, end in pieces(len(frames.keys)):
        expected = progress.done.get((split, first))
        yield Piece(split, first, str(path), begin + first * size, frames.members[first:end], geometry, expected)


def close_gaps(path: Path, count: int, failed: set[int], geometry: Geometry, hashes: list[str]) -> list[str]:
    """Move the images behind those that failed up, shorten the file, and return the new hashes of its pieces."""
    shape = (count, geometry.height, geometry.width, 3)
    begin = lay_out(path, count, geometry)
    images = np.memmap(path, np.uint8, "r+", begin, shape)
    place = first = min(failed)
    for row in range(first, count):
        if row not in failed:
            images[place] = images[row]
            place += 1
    images.flush()
    whole = first // HASH_IMAGES
    changed = [hashlib.sha256(images[a:b].data).hexdigest() for a, b in list(pieces(place))[whole:]]
    del images
    with path.open("r+b") as file:
        _write_header(file, (place, *shape[1:]))
        # NumPy pads a header so that a change of the first dimension does not move the data.
        if file.tell() != begin:
            raise RuntimeError(f"{path}: the header of {place} images is not as long as that of {count}")
        file.truncate(begin + place * geometry.height * geometry.width * 3)
    return hashes[:whole] + changed
