"""Drawing the augmentation of a batch on the host: small tables of numbers, no pixels.

Letters: B batch, L layers (1, or 2 where mix-up can occur), M boxes of a sample, N images of the dataset. The
augmentation is that of the public AutoSpeed training: mosaic of four around a random seam on a canvas of twice the
size, affine back to the input size, mix-up with a second mosaic, HSV gains, flips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autospeed_model.packed import PackedSplit, pad_boxes

if TYPE_CHECKING:
    from autospeed_model.hyperparameters import Hyperparameters

BOX_STEP = 32  # boxes of a sample are padded to a multiple of this: few shapes to compile for
SMALLEST_SIDE = 2.0  # pixels
SMALLEST_SHARE = 0.1  # of a box's scaled area that must be left
LARGEST_ASPECT = 100.0
MIX_UP_BETA = 32.0  # both parameters of the beta distribution of the mixing share


@dataclass(frozen=True)
class Table:
    """All that decides the augmented samples of a batch.

    ``tiles`` int32 (B, L, 4, 3): number of the image in the dataset or -1, canvas x and y of its upper left pixel.
    Tiles 0 to 3 are upper left, upper right, lower left, lower right of the seam. ``geometry`` float32 (B, L, 10): the
    matrix m0 to m5 from output pixel (column, row) to canvas (m0 column + m1 row + m2, m3 column + m4 row + m5), seam x
    and y, canvas width and height. ``colour`` float32 (B, 4): gains of hue, saturation and value, share of layer 0 in
    the mix. ``boxes`` float32 (B, M, 5): class, x1, y1, x2, y2 in pixels of the output; ``real`` bool (B, M) marks
    those that are boxes. ``dropped``: boxes left out because a fixed M was too small.
    """

    tiles: np.ndarray
    geometry: np.ndarray
    colour: np.ndarray
    boxes: np.ndarray
    real: np.ndarray
    dropped: int = 0

    @property
    def pixels(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What decides pixels: tiles, geometry, colour."""
        return self.tiles, self.geometry, self.colour

    def local(self) -> Table:
        """The same for :func:`gather`'s images: tiles are numbered by their place, B * L * 4 of them."""
        place = np.arange(self.tiles[..., 0].size, dtype=np.int32).reshape(self.tiles.shape[:3])
        tiles = self.tiles.copy()
        tiles[..., 0] = np.where(tiles[..., 0] >= 0, place, -1)
        return Table(tiles, self.geometry, self.colour, self.boxes, self.real, self.dropped)


def draw_table(
    rng: np.random.Generator,
    indices: np.ndarray,
    split: PackedSplit,
    hyperparameters: Hyperparameters,
    length: int | None = None,
) -> Table:
    """Draw the augmentation of the samples ``indices`` (B,) of a split.

    :param length: fixed M, for static shapes; the smallest boxes of a sample that has more are dropped. By default M is
        the next multiple of :data:`BOX_STEP`.
    """
    height, width = split.height, split.width
    batch, layers = len(indices), 2 if hyperparameters.mix_up > 0 else 1
    mosaic = rng.random((batch, 1)) < np.array([[hyperparameters.mosaic, 1.0]])[:, :layers]
    mosaic = np.broadcast_to(mosaic, (batch, layers)).copy()
    used = np.ones((batch, layers), dtype=bool)
    if layers == 2:  # only a mosaic is mixed, and only with another mosaic
        used[:, 1] = mosaic[:, 0] & (rng.random(batch) < hyperparameters.mix_up)
        mosaic[:, 1] = True
    tiles, seam, canvas = _tiles(rng, indices, len(split), mosaic, used, height, width)
    matrix, scale = _affine(rng, hyperparameters, canvas, height, width)
    flips = rng.random((batch, 2)) < (hyperparameters.flip_lr, hyperparameters.flip_ud)
    geometry = np.concatenate([_backwards(matrix, flips, height, width), seam, canvas], axis=2).astype(np.float32)
    gains = 1 + rng.uniform(-1, 1, (batch, 3)) * (hyperparameters.hsv_h, hyperparameters.hsv_s, hyperparameters.hsv_v)
    share = np.ones(batch) if layers == 1 else np.where(used[:, 1], rng.beta(MIX_UP_BETA, MIX_UP_BETA, batch), 1.0)
    colour = np.concatenate([gains, share[:, None]], axis=1).astype(np.float32)
    flat, owner = _move_boxes(split, tiles, matrix, scale, canvas, flips)
    flat, owner, dropped = _limit(flat, owner, batch, length)
    most = int(np.bincount(owner, minlength=batch).max(initial=0))
    padded = length if length is not None else max(1, -(-most // BOX_STEP)) * BOX_STEP
    boxes, real = pad_boxes(flat, owner, batch, padded)
    return Table(tiles, geometry, colour, boxes, real, dropped)


def _tiles(
    rng: np.random.Generator,
    indices: np.ndarray,
    count: int,
    mosaic: np.ndarray,
    used: np.ndarray,
    height: int,
    width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles int32 (B, L, 4, 3), seam (B, L, 2) as x, y and canvas size (B, L, 2) as width, height.

    A sample without mosaic is a canvas of the input size whose seam lies at its origin, so that tile 3 covers it.
    """
    shape = mosaic.shape
    chosen = rng.integers(0, count, (*shape, 4))
    chosen[:, 0, 0] = indices
    chosen = rng.permuted(chosen, axis=2)
    size = np.array([width, height])
    seam = rng.integers(size // 2, 2 * size - size // 2 + 1, (*shape, 2)) * mosaic[..., None]
    canvas = np.where(mosaic[..., None], 2 * size, size)
    single = np.full_like(chosen, -1)
    single[..., 3] = np.asarray(indices)[:, None]
    chosen = np.where(mosaic[..., None], chosen, single)
    chosen = np.where(used[..., None], chosen, -1)
    corner = seam[:, :, None, :] - np.array([[1, 1], [0, 1], [1, 0], [0, 0]]) * size
    return np.concatenate([chosen[..., None], corner], axis=3).astype(np.int32), seam, canvas


def _affine(
    rng: np.random.Generator, hyperparameters: Hyperparameters, canvas: np.ndarray, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (B, L, 2, 3) from the canvas to the output before flips, and their scales (B, L).

    Canvas centre to the origin, rotation with scale, shear, then to the output's centre and a random shift.
    """
    shape = canvas.shape[:2]
    angle = np.deg2rad(rng.uniform(-hyperparameters.degrees, hyperparameters.degrees, shape))
    scale = rng.uniform(1 - hyperparameters.scale, 1 + hyperparameters.scale, shape)
    shear = np.tan(np.deg2rad(rng.uniform(-hyperparameters.shear, hyperparameters.shear, (*shape, 2))))
    low, high = 0.5 - hyperparameters.translate, 0.5 + hyperparameters.translate
    shift = rng.uniform(low, high, (*shape, 2)) * (width, height)
    cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
    rotation = np.stack([cosine, sine, -sine, cosine], axis=-1).reshape(*shape, 2, 2)
    slant = np.stack([np.ones(shape), shear[..., 0], shear[..., 1], np.ones(shape)], axis=-1).reshape(*shape, 2, 2)
    linear = slant @ rotation
    offset = shift - (linear @ (canvas / 2)[..., None])[..., 0]
    return np.concatenate([linear, offset[..., None]], axis=3), scale


def _backwards(matrix: np.ndarray, flips: np.ndarray, height: int, width: int) -> np.ndarray:
    """The inverse as (B, L, 6), with flips (B, 2), left-right and up-down, of the output put before it."""
    inverse = np.linalg.inv(matrix[..., :2])
    offset = -(inverse @ matrix[..., 2:])[..., 0]
    # Column c of a flipped picture is column (width - 1 - c) of the other one; rows alike.
    sign = np.where(flips, -1.0, 1.0)[:, None, None, :]
    last = (np.array([width - 1, height - 1]) * flips)[:, None, :, None]
    offset = offset + (inverse @ last)[..., 0]
    return np.concatenate([inverse * sign, offset[..., None]], axis=3).reshape(*matrix.shape[:2], 6)


def _move_boxes(
    split: PackedSplit,
    tiles: np.ndarray,
    matrix: np.ndarray,
    scale: np.ndarray,
    canvas: np.ndarray,
    flips: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The boxes of all tiles in the output, flat float32 (n, 5), and their samples (n,). Keeps what is still seen."""
    size = np.array([split.width, split.height], dtype=np.float64)
    layers = tiles.shape[1]
    flat_tiles = tiles.reshape(-1, 3)
    present = np.nonzero(flat_tiles[:, 0] >= 0)[0]
    boxes, position = split.flat_boxes(flat_tiles[present, 0])
    tile = present[position]
    layer = tile // 4
    limit = canvas.reshape(-1, 2)[layer]
    shift = flat_tiles[tile, 1:]
    first = np.clip(boxes[:, 1:3] + shift, 0, limit)
    last = np.clip(boxes[:, 3:5] + shift, 0, limit)
    # The four corners through the matrix, then the upright box around them.
    x, y = np.stack([first[:, 0], last[:, 0]], axis=1), np.stack([first[:, 1], last[:, 1]], axis=1)
    m = matrix.reshape(-1, 6)[layer]
    ranges = []
    for row in (0, 3):
        along_x, along_y = m[:, row, None] * x, m[:, row + 1, None] * y
        low = along_x.min(axis=1) + along_y.min(axis=1) + m[:, row + 2]
        high = along_x.max(axis=1) + along_y.max(axis=1) + m[:, row + 2]
        ranges.append((low, high))
    top = np.clip(np.stack([ranges[0][0], ranges[1][0]], axis=1), 0, size)
    bottom = np.clip(np.stack([ranges[0][1], ranges[1][1]], axis=1), 0, size)
    sides, before = bottom - top, (last - first) * scale.reshape(-1)[layer, None]
    aspect = sides.max(axis=1) / (sides.min(axis=1) + 1e-16)
    share = sides.prod(axis=1) / (before.prod(axis=1) + 1e-16)
    kept = (sides > SMALLEST_SIDE).all(axis=1) & (share > SMALLEST_SHARE) & (aspect < LARGEST_ASPECT)
    owner = layer // layers
    flip = flips[owner]
    moved = np.concatenate(
        [boxes[:, :1], np.where(flip, size - bottom, top), np.where(flip, size - top, bottom)], axis=1
    )
    return moved[kept].astype(np.float32), owner[kept]


def _limit(flat: np.ndarray, owner: np.ndarray, batch: int, length: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Leave at most ``length`` boxes a sample, the largest ones; also returns how many were dropped."""
    counts = np.bincount(owner, minlength=batch)
    if length is None or counts.max(initial=0) <= length:
        return flat, owner, 0
    area = (flat[:, 3] - flat[:, 1]) * (flat[:, 4] - flat[:, 2])
    order = np.lexsort((-area, owner))
    rank = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    kept = np.sort(order[rank < length])
    return flat[kept], owner[kept], len(flat) - len(kept)


def visible_parts(table: Table, height: int, width: int) -> np.ndarray:
    """The part of each tile's image that the output can show: int64 (B, L, 4, 4) as x1, y1, x2, y2, empty if none."""
    geometry = table.geometry.astype(np.float64)
    ends = np.array([[0, 0], [width - 1, 0], [0, height - 1], [width - 1, height - 1]], dtype=float)
    matrix = geometry[..., :6].reshape(*geometry.shape[:2], 2, 3)
    points = np.einsum("blij,pj->blpi", matrix[..., :2], ends) + matrix[..., None, :, 2]
    # Two more pixels than bilinear sampling needs: float32 on the device rounds otherwise than float64 here.
    low, high = np.floor(points.min(axis=2)) - 2, np.floor(points.max(axis=2)) + 4
    corner = table.tiles[..., 1:].astype(np.float64)
    first = np.maximum(low[:, :, None] - corner, 0)
    last = np.minimum(high[:, :, None] - corner, (width, height))
    parts = np.concatenate([first, last], axis=3)
    parts[(table.tiles[..., 0] < 0) | (last <= first).any(axis=3)] = 0
    return parts.astype(np.int64)


def gather(images: np.ndarray, table: Table, out: np.ndarray) -> None:
    """Copy what ``table.local()`` refers to from the dataset's images (N, H, W, 3) to ``out`` (B * L * 4, H, W, 3).

    Only the visible part of each image is copied: on average about as many pixels as one image a sample. The rest of
    ``out`` keeps what it holds; the augmentation never reads it.
    """
    parts = visible_parts(table, images.shape[1], images.shape[2]).reshape(-1, 4)
    for place, (image, (x1, y1, x2, y2)) in enumerate(zip(table.tiles[..., 0].flat, parts.tolist(), strict=True)):
        if x2 > x1:
            out[place, y1:y2, x1:x2] = images[image, y1:y2, x1:x2]
