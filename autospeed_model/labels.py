"""OpenLane's ``cipo`` labels: parsing them with distrust, and bringing their boxes into the prepared image."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

SOURCE_WIDTH, SOURCE_HEIGHT = 1920, 1280  # pixels of an OpenLane image
CUT = 320  # rows cut off at the top
CLASS_OF_LEVEL = {1: 1, 2: 2, 3: 3, 4: 3}


@dataclass(frozen=True)
class Geometry:
    """How an image of the source becomes one of ``height`` x ``width``: cut, scaled as a whole, centred, padded."""

    height: int
    width: int

    @property
    def scaled(self) -> tuple[int, int]:
        """Width and height of the picture without padding."""
        factor = min(self.width / SOURCE_WIDTH, self.height / (SOURCE_HEIGHT - CUT))
        return max(1, round(SOURCE_WIDTH * factor)), max(1, round((SOURCE_HEIGHT - CUT) * factor))

    @property
    def padding(self) -> tuple[int, int]:
        """Columns left of the picture and rows above it."""
        width, height = self.scaled
        return (self.width - width) // 2, (self.height - height) // 2

    def place(self, boxes: np.ndarray, counts: Counter[str]) -> np.ndarray:
        """Boxes (n, 5), rows level, x, y, width, height in the source, to float32 (m, 5), rows class, x1, y1, x2, y2.

        What sticks out of the image or over the cut is cut off; what lies wholly outside is dropped. ``counts`` tells.
        """
        low, high = np.array([0.0, CUT]), np.array([SOURCE_WIDTH, SOURCE_HEIGHT], float)
        first, last = boxes[:, 1:3], boxes[:, 1:3] + boxes[:, 3:5]
        top, bottom = np.clip(first, low, high), np.clip(last, low, high)
        visible = np.all(bottom > top, axis=1)
        counts["above_the_cut"] += int(np.sum(~visible & (last[:, 1] <= CUT)))
        counts["outside"] += int(np.sum(~visible & (last[:, 1] > CUT)))
        counts["cut_short"] += int(np.sum(visible & np.any((top != first) | (bottom != last), axis=1)))
        scale = np.array(self.scaled) / (high - low)
        corners = [(point[visible] - low) * scale + np.array(self.padding) for point in (top, bottom)]
        classes = np.array([CLASS_OF_LEVEL[int(level)] for level in boxes[visible, 0]], dtype=float)
        return np.concatenate([classes[:, None], *corners], axis=1).astype(np.float32)


class LabelError(ValueError):
    """A label file that says nothing reliable about its image."""


def parse_label(data: bytes) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Boxes float64 (n, 5), rows level, x, y, width, height, and what was odd: (kind, detail) pairs.

    Reads the newer keys (``results``, ``id``) and the older ones (``result``, ``attribute``). Raises LabelError.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LabelError(f"not JSON: {error}") from error
    if not isinstance(content, dict) or not ("results" in content or "result" in content):
        raise LabelError("has no list 'results'")
    entries = content["results"] if "results" in content else content["result"]
    if not isinstance(entries, list):
        raise LabelError(f"'results' is {type(entries).__name__}, not a list")
    odd: list[tuple[str, str]] = []
    boxes = [box for number, entry in enumerate(entries) if (box := _box(entry, f"box {number}", odd)) is not None]
    if sum(box[0] == 1 for box in boxes) > 1:
        odd.append(("several_level_1", f"{sum(box[0] == 1 for box in boxes)} boxes"))
    return np.array(boxes, dtype=np.float64).reshape(-1, 5), odd


def _box(entry: Any, name: str, odd: list[tuple[str, str]]) -> tuple[float, ...] | None:
    if not isinstance(entry, dict):
        odd.append(("box_incomplete", f"{name} is {type(entry).__name__}"))
        return None
    level = entry.get("id", entry.get("attribute"))
    missing = [key for key in ("x", "y", "width", "height") if key not in entry] + ["level"] * (level is None)
    if missing:
        odd.append(("box_incomplete", f"{name} has no {', '.join(missing)}"))
        return None
    values = []
    for key in ("x", "y", "width", "height"):
        value = _number(entry[key])
        if value is None:
            odd.append(("box_not_a_number", f"{name} has {key} {entry[key]!r:.40}"))
            return None
        if isinstance(entry[key], str):
            odd.append(("box_number_as_text", f"{name} has {key} {entry[key]!r:.40}"))
        values.append(value)
    if isinstance(level, bool) or str(level).strip() not in ("1", "2", "3", "4"):
        odd.append(("box_of_unknown_level", f"{name} has level {level!r:.40}"))
        return None
    if values[2] <= 0 or values[3] <= 0:
        odd.append(("box_without_area", f"{name} is {values[2]:g} x {values[3]:g}"))
        return None
    return (float(str(level).strip()), *values)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
