"""The augmentation of single samples with OpenCV: on one CPU core several times faster than any whole-batch form of it.

It rounds to bytes between its steps, hue to steps of two degrees, as the public training does; the mean difference to
:func:`autospeed_model.augment.augment_reference` is below one of 255 grey levels in photographs.
"""

from __future__ import annotations

import cv2
import numpy as np

FILL = 114  # grey, where no image shows


def augment_on_host(images: np.ndarray, tiles: np.ndarray, geometry: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Augmented samples uint8 (B, H, W, 3) from images uint8 (N, H, W, 3) and the pixel arrays of a drawn table."""
    result = np.empty((len(tiles), *images.shape[1:]), np.uint8)
    for sample in range(len(result)):
        picture = _layer(images, tiles[sample, 0], geometry[sample, 0])
        hue, saturation, value, share = (float(number) for number in colour[sample])
        if share < 1:
            second = _layer(images, tiles[sample, 1], geometry[sample, 1])
            picture = cv2.addWeighted(picture, share, second, 1 - share, 0)
        result[sample] = _jitter(picture, hue, saturation, value)
    return result


def _layer(images: np.ndarray, tiles: np.ndarray, geometry: np.ndarray) -> np.ndarray:
    height, width = images.shape[1:3]
    canvas_width, canvas_height = int(geometry[8]), int(geometry[9])
    canvas = np.full((canvas_height, canvas_width, 3), FILL, np.uint8)
    for image, x, y in tiles.tolist():
        if image >= 0:
            x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + width, canvas_width), min(y + height, canvas_height)
            canvas[y1:y2, x1:x2] = images[image, y1 - y : y2 - y, x1 - x : x2 - x]
    matrix = geometry[:6].reshape(2, 3).astype(np.float64)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    grey = (FILL, FILL, FILL)
    return np.asarray(cv2.warpAffine(canvas, matrix, (width, height), flags=flags, borderValue=grey))


def _jitter(picture: np.ndarray, hue: float, saturation: float, value: float) -> np.ndarray:
    levels = np.arange(256)
    gained = (levels * hue % 180, np.minimum(levels * saturation, 255), np.minimum(levels * value, 255))
    table = np.stack(gained, axis=1).astype(np.uint8)[None]
    return np.asarray(cv2.cvtColor(cv2.LUT(cv2.cvtColor(picture, cv2.COLOR_RGB2HSV), table), cv2.COLOR_HSV2RGB))
