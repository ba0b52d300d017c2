from pathlib import Path

import numpy as np
import pytest

from autospeed_model.augment_host import augment_on_host
from autospeed_model.draw import BOX_STEP, Table, draw_table, gather, visible_parts
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.packed import PackedSplit, write_dataset

HEIGHT, WIDTH, COUNT = 32, 64, 12
STILL = {"translate": 0.0, "scale": 0.0, "flip_lr": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
ALL = {"degrees": 20.0, "shear": 8.0, "flip_ud": 0.5, "mosaic": 0.7, "mix_up": 0.5}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> PackedSplit:
    rng = np.random.default_rng(1)
    boxes = []
    for count in rng.integers(0, 7, COUNT):
        corner = rng.uniform((0, 0), (WIDTH - 12, HEIGHT - 12), (count, 2))
        far = np.minimum(corner + rng.uniform(3, 30, (count, 2)), (WIDTH, HEIGHT))
        boxes.append(np.concatenate([rng.integers(1, 4, (count, 1)), corner, far], axis=1).astype(np.float32))
    images = rng.integers(0, 256, (COUNT, HEIGHT, WIDTH, 3), dtype=np.uint8)
    folder: Path = tmp_path_factory.mktemp("data") / "packed"
    return write_dataset(folder, "autospeed-2", {"train": (images, boxes)}).split("train")


def draw(split: PackedSplit, batch: int = 64, seed: int = 0, length: int | None = None, **values: float) -> Table:
    rng = np.random.Generator(np.random.PCG64([seed, 1, 2]))
    return draw_table(rng, np.arange(batch) % COUNT, split, Hyperparameters(**values), length)


def boxes_by_hand(split: PackedSplit, table: Table) -> list[list[tuple[float, ...]]]:
    """The boxes of every sample, one at a time: onto the canvas, corners through the inverse of the table's matrix."""
    result = []
    for sample in range(len(table.tiles)):
        found = []
        for layer in range(table.tiles.shape[1]):
            *matrix, _, _, canvas_width, canvas_height = table.geometry[sample, layer].astype(float)
            forwards = np.linalg.inv(np.array([matrix[:3], matrix[3:], [0, 0, 1]]))
            scale = np.sqrt(np.linalg.det(forwards[:2, :2]))
            for image, x, y in table.tiles[sample, layer]:
                if image < 0:
                    continue
                for level, x1, y1, x2, y2 in split.boxes_of(image).astype(float):
                    x1, x2 = (min(max(value + x, 0), canvas_width) for value in (x1, x2))
                    y1, y2 = (min(max(value + y, 0), canvas_height) for value in (y1, y2))
                    corners = forwards @ np.array([[x1, x2, x1, x2], [y1, y1, y2, y2], [1, 1, 1, 1]])
                    left, right = (min(max(v, 0), WIDTH) for v in (corners[0].min(), corners[0].max()))
                    top, bottom = (min(max(v, 0), HEIGHT) for v in (corners[1].min(), corners[1].max()))
                    wide, high = right - left, bottom - top
                    area = (x2 - x1) * (y2 - y1) * scale**2
                    if wide > 2 and high > 2 and wide * high > 0.1 * area and max(wide / high, high / wide) < 100:
                        found.append((level, left, top, right, bottom))
        result.append(found)
    return result


@pytest.mark.parametrize(
    "values", [{}, {"degrees": 20.0}, {"mosaic": 0.5}, {"mix_up": 1.0}, {"mosaic": 0.0, "scale": 0.9}]
)
def test_boxes_are_those_of_a_plain_loop(split, values):
    table = draw(split, **values, flip_lr=0.0, shear=0.0)
    for sample, expected in enumerate(boxes_by_hand(split, table)):
        found = table.boxes[sample][table.real[sample]]
        assert len(found) == len(expected)
        np.testing.assert_allclose(found, np.array(expected).reshape(-1, 5), atol=2e-3)


@pytest.mark.parametrize(("name", "low", "high"), [("flip_lr", 1, 3), ("flip_ud", 2, 4)])
def test_a_flip_mirrors_the_boxes(split, name, low, high):
    size = WIDTH if name == "flip_lr" else HEIGHT
    plain, flipped = (draw(split, **{"flip_lr": 0.0, name: value}) for value in (0.0, 1.0))
    np.testing.assert_array_equal(plain.real, flipped.real)
    expected = plain.boxes.copy()
    expected[..., low], expected[..., high] = size - plain.boxes[..., high], size - plain.boxes[..., low]
    np.testing.assert_allclose(flipped.boxes[flipped.real], expected[plain.real], atol=1e-4)


def test_without_augmentation_boxes_stay_where_they_are(split):
    table = draw(split, batch=COUNT, mosaic=0.0, **STILL)
    for sample in range(COUNT):
        np.testing.assert_allclose(table.boxes[sample][table.real[sample]], split.boxes_of(sample), atol=1e-4)


def test_boxes_stay_inside_the_output_and_keep_their_class(split):
    table = draw(split, batch=200, **ALL)
    boxes = table.boxes[table.real]
    assert len(boxes) > 100
    assert (boxes[:, 1:3] >= 0).all() and (boxes[:, 3] <= WIDTH).all() and (boxes[:, 4] <= HEIGHT).all()
    assert (boxes[:, 3:5] - boxes[:, 1:3] > 2).all()
    assert set(np.unique(boxes[:, 0])) <= {1.0, 2.0, 3.0}


def test_the_same_generator_state_gives_the_same_table(split):
    first, second, other = draw(split, **ALL), draw(split, **ALL), draw(split, seed=1, **ALL)
    for name in ("tiles", "geometry", "colour", "boxes", "real"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert not np.array_equal(first.geometry, other.geometry)


def test_every_mosaic_shows_its_own_image_and_all_corners_do_so_equally_often(split):
    table = draw(split, batch=1200)
    own = table.tiles[:, 0, :, 0] == (np.arange(1200) % COUNT)[:, None]
    assert own.any(axis=1).all()
    assert own.mean(axis=0) == pytest.approx(np.full(4, 0.25 + 0.75 / COUNT), abs=0.06)


def test_draws_follow_the_ranges_of_the_hyperparameters(split):
    table = draw(split, batch=4000, mosaic=0.6, flip_lr=0.0)
    scales = 1 / table.geometry[:, 0, 0]
    assert scales.min() == pytest.approx(0.5, abs=0.01) and scales.max() == pytest.approx(1.5, abs=0.01)
    assert scales.mean() == pytest.approx(1.0, abs=0.02)
    gains = table.colour[:, :3] - 1
    assert np.abs(gains).max(axis=0) == pytest.approx([0.015, 0.7, 0.4], rel=0.01)
    assert np.abs(gains.mean(axis=0)).max() < 0.03
    is_mosaic = table.geometry[:, 0, 8] == 2 * WIDTH
    assert is_mosaic.mean() == pytest.approx(0.6, abs=0.03)
    seam = table.geometry[is_mosaic, 0, 6]
    assert seam.min() == WIDTH // 2 and seam.max() == 3 * WIDTH // 2
    assert seam.mean() == pytest.approx(WIDTH, abs=1.5)


def test_only_mosaics_are_mixed_and_only_as_often_as_asked(split):
    table = draw(split, batch=4000, mosaic=0.5, mix_up=0.4)
    mixed = table.tiles[:, 1, 0, 0] >= 0
    assert not mixed[table.geometry[:, 0, 8] == WIDTH].any()
    assert mixed.mean() == pytest.approx(0.2, abs=0.03)
    assert (table.colour[~mixed, 3] == 1).all()
    assert table.colour[mixed, 3].mean() == pytest.approx(0.5, abs=0.01)
    assert table.colour[mixed, 3].std() == pytest.approx(0.062, abs=0.006)


def test_a_batch_without_boxes_is_padded_all_the_same(tmp_path):
    images = np.zeros((3, HEIGHT, WIDTH, 3), np.uint8)
    empty = write_dataset(tmp_path / "empty", "autospeed-2", {"train": (images, [np.zeros((0, 5))] * 3)}).split("train")
    table = draw_table(np.random.default_rng(0), np.array([0]), empty, Hyperparameters())
    assert table.boxes.shape == (1, BOX_STEP, 5) and not table.real.any()


def test_a_fixed_length_keeps_the_largest_boxes_and_counts_the_others(split):
    free, fixed = draw(split), draw(split, length=4)
    assert fixed.boxes.shape == (64, 4, 5)
    assert fixed.dropped == free.real.sum() - fixed.real.sum() > 0
    for sample in range(64):
        all_boxes, kept = free.boxes[sample][free.real[sample]], fixed.boxes[sample][fixed.real[sample]]
        areas = [np.prod(boxes[:, 3:] - boxes[:, 1:3], axis=1) for boxes in (all_boxes, kept)]
        np.testing.assert_allclose(sorted(areas[1]), sorted(areas[0])[-4:], rtol=1e-6)


def test_gathered_images_hold_all_that_the_output_shows(split):
    """What the augmentation never reads may be anything: two buffers of different rubbish must give the same pixels."""
    table = draw(split, batch=16, **ALL)
    expected = augment_on_host(split.images, *table.pixels)
    for rubbish in (0, 255):
        out = np.full((table.tiles[..., 0].size, HEIGHT, WIDTH, 3), rubbish, np.uint8)
        gather(split.images, table, out)
        np.testing.assert_array_equal(augment_on_host(out, *table.local().pixels), expected)


def test_only_about_one_image_a_sample_is_gathered(split):
    parts = visible_parts(draw(split, batch=500), HEIGHT, WIDTH)
    pixels = ((parts[..., 2] - parts[..., 0]) * (parts[..., 3] - parts[..., 1])).sum() / 500
    assert 0.8 < pixels / (HEIGHT * WIDTH) < 1.6
