"""Several splits as one: the full training set is what a study splits into ``train`` and ``tune_val``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from autospeed_model.errors import UserError
from autospeed_model.packed import PackedSplit


class JoinedImages:
    """Stands in for an array uint8 (N, H, W, 3) over the mapped files of several splits; nothing is copied.

    It is indexed as the training does it: by one image, also with ranges of rows and columns, or by a range of images,
    which is copied where it crosses from one split to the next.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.shape = (int(self._ends[-1]), *parts[0].shape[1:])
        self.dtype = parts[0].dtype
        self.nbytes = sum(part.nbytes for part in parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: Any) -> np.ndarray:
        first, inside = (key[0], tuple(key[1:])) if isinstance(key, tuple) else (key, ())
        if isinstance(first, slice):
            everything = (slice(None), *inside)
            return np.asarray(self._range(*first.indices(len(self)))[everything])
        index = int(first)
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        part = int(np.searchsorted(self._ends, index, side="right"))
        place = (index - self._start(part), *inside)
        return np.asarray(self._parts[part][place])

    def _range(self, first: int, end: int, step: int) -> np.ndarray:
        found = []
        for number, part in enumerate(self._parts):
            start = self._start(number)
            low, high = max(first - start, 0), min(end - start, len(part))
            if low < high:
                found.append(part[low:high])
        if not found:
            return np.asarray(self._parts[0][:0])
        return (found[0] if len(found) == 1 else np.concatenate(found))[::step]

    def _start(self, part: int) -> int:
        return int(self._ends[part] - len(self._parts[part]))


def join(splits: Sequence[PackedSplit]) -> PackedSplit:
    """One split with the images of all, in their order.

    :raises UserError: when their images differ in size.
    """
    sizes = {(split.height, split.width) for split in splits}
    if len(sizes) > 1:
        raise UserError(f"splits of different image sizes cannot be joined: {sorted(sizes)}")
    if len(splits) == 1:
        return splits[0]
    boxes = np.cumsum([0, *(len(split.boxes) for split in splits)])
    offsets = [splits[0].offsets[:1], *(split.offsets[1:] + first for split, first in zip(splits, boxes, strict=False))]
    return PackedSplit(
        "+".join(split.name for split in splits),
        cast(np.ndarray, JoinedImages([split.images for split in splits])),
        np.concatenate([split.boxes for split in splits]),
        np.concatenate(offsets),
        [name for split in splits for name in split.names],
    )
