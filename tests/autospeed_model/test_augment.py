from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import hip_kernels
from autospeed_model.augment import PixelTable, augment_batch, augment_reference
from autospeed_model.augment_host import FILL, augment_on_host
from autospeed_model.draw import Table, draw_table, gather
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.packed import PackedSplit, write_dataset

HEIGHT, WIDTH, COUNT = 64, 128, 8
STILL = {"translate": 0.0, "scale": 0.0, "flip_lr": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
ALL = {"degrees": 15.0, "shear": 5.0, "flip_ud": 0.3, "mosaic": 0.7, "mix_up": 0.5}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> PackedSplit:
    """Smooth coloured pictures: neighbouring pixels are alike, as in photographs."""
    rng = np.random.default_rng(2)
    coarse = rng.integers(0, 256, (COUNT, 6, 10, 3), dtype=np.uint8)
    images = np.stack([cv2.resize(image, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC) for image in coarse])
    boxes = [np.array([[1, 10, 10, 40, 30]], np.float32)] * COUNT
    folder: Path = tmp_path_factory.mktemp("data") / "packed"
    return write_dataset(folder, "autospeed-2", {"train": (images, boxes)}).split("train")


def draw(split: PackedSplit, batch: int = 24, seed: int = 0, **values: float) -> Table:
    return draw_table(np.random.default_rng(seed), np.arange(batch) % len(split), split, Hyperparameters(**values))


def on_device(images: np.ndarray, table: Table, **options: object) -> np.ndarray:
    """Result as float (B, H, W, 3), 0 to 255."""
    result = augment_reference(torch.from_numpy(np.array(images)), PixelTable.of(table), **options)
    return result.permute(0, 2, 3, 1).float().numpy() * 255


@pytest.mark.parametrize(
    "values", [{}, ALL, {"mosaic": 0.0}, {"hsv_h": 0.5, "hsv_s": 1.0, "hsv_v": 1.0}, {"mix_up": 1.0}]
)
def test_pixels_are_those_of_opencv_within_its_rounding(split, values):
    table = draw(split, **values)
    difference = np.abs(on_device(split.images, table) - augment_on_host(split.images, *table.pixels))
    assert difference.mean() < 1.5
    assert np.percentile(difference, 99) < 8


def test_without_colour_the_difference_is_that_of_rounding_alone(split):
    table = draw(split, **(ALL | {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}))
    difference = np.abs(on_device(split.images, table) - augment_on_host(split.images, *table.pixels))
    assert difference.mean() < 1.2


def test_without_augmentation_the_images_come_back(split):
    table = draw(split, batch=COUNT, mosaic=0.0, **STILL)
    np.testing.assert_allclose(on_device(split.images, table), split.images, atol=1e-2)


def test_a_flip_mirrors_the_pixels(split):
    plain, flipped = (on_device(split.images, draw(split, flip_lr=value)) for value in (0.0, 1.0))
    np.testing.assert_allclose(flipped, plain[:, :, ::-1], atol=0.1)


def test_every_pixel_of_a_mosaic_comes_from_its_tile_or_is_grey(split):
    """Scale 1, no shift: the output is the middle of the canvas, pixel by pixel."""
    table = draw(split, **STILL)
    result = on_device(split.images, table)
    for sample in range(len(result)):
        canvas = np.full((2 * HEIGHT, 2 * WIDTH, 3), 114.0)
        for image, x, y in table.tiles[sample, 0]:
            rows, columns = (np.arange(n) + o for n, o in ((HEIGHT, y), (WIDTH, x)))
            rows_in, columns_in = (rows >= 0) & (rows < 2 * HEIGHT), (columns >= 0) & (columns < 2 * WIDTH)
            canvas[np.ix_(rows[rows_in], columns[columns_in])] = split.images[image][np.ix_(rows_in, columns_in)]
        middle = canvas[HEIGHT // 2 : HEIGHT // 2 + HEIGHT, WIDTH // 2 : WIDTH // 2 + WIDTH]
        np.testing.assert_allclose(result[sample], middle, atol=1e-2)


def test_boxes_follow_the_pixels(tmp_path):
    """White rectangles on black: after the augmentation each box encloses white pixels and nothing else is white."""
    rng = np.random.default_rng(5)
    images, boxes = np.zeros((6, HEIGHT, WIDTH, 3), np.uint8), []
    for image in images:
        x, y, w, h = (int(rng.integers(*span)) for span in ((5, 60), (5, 25), (20, 50), (15, 30)))
        image[y : y + h, x : x + w] = 255
        boxes.append(np.array([[1, x, y, x + w, y + h]], np.float32))
    data = write_dataset(tmp_path / "white", "autospeed-2", {"train": (images, boxes)}).split("train")
    table = draw(data, batch=40, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0)
    pixels = on_device(data.images, table)[..., 0] > 190
    for sample in range(40):
        covered = np.zeros((HEIGHT, WIDTH), bool)
        for _, x1, y1, x2, y2 in table.boxes[sample][table.real[sample]]:
            # but for the outermost pixels: the matrix moves the centres of pixels, of boxes the edges
            rows, columns = (slice(int(low) + 2, int(high) - 1) for low, high in ((y1, y2), (x1, x2)))
            assert pixels[sample, rows, columns].all()
            covered[int(y1) - 2 if y1 > 2 else 0 : int(y2) + 2, int(x1) - 2 if x1 > 2 else 0 : int(x2) + 2] = True
        assert (pixels[sample] & ~covered).mean() < 0.02  # slivers whose box was dropped


def test_the_gathered_images_and_the_whole_dataset_give_the_same(split):
    table = draw(split, **ALL)
    out = np.zeros((table.tiles[..., 0].size, HEIGHT, WIDTH, 3), np.uint8)
    gather(split.images, table, out)
    np.testing.assert_array_equal(on_device(out, table.local()), on_device(split.images, table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("function", [augment_batch, augment_reference])
def test_output_has_the_type_and_the_layout_asked_for(split, dtype, channels_last, function):
    table = PixelTable.of(draw(split, batch=2))
    result = function(torch.from_numpy(np.array(split.images)), table, dtype, channels_last)
    assert result.shape == (2, 3, HEIGHT, WIDTH) and result.dtype == dtype
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert result.is_contiguous(memory_format=layout)
    assert result.min() >= 0 and result.max() <= 1


def test_on_the_cpu_a_batch_is_augmented_by_opencv(split):
    table = draw(split, **ALL)
    result = augment_batch(torch.from_numpy(np.array(split.images)), PixelTable.of(table))
    expected = augment_on_host(split.images, *table.pixels).transpose(0, 3, 1, 2) / np.float32(255)
    np.testing.assert_array_equal(result.numpy(), expected)


@pytest.mark.filterwarnings("ignore::hip_kernels._library.ReferenceWarning")
def test_the_fused_kernel_reads_the_same_table(split):
    table = PixelTable.of(draw(split, **ALL))
    images = torch.from_numpy(np.array(split.images))
    kernel = hip_kernels.mosaic_augment(images, hip_kernels.AugmentTable(*table), (HEIGHT, WIDTH), fill=FILL)
    torch.testing.assert_close(augment_reference(images, table), kernel, atol=1e-4, rtol=0)


def test_the_hue_turns_and_the_gains_saturate():
    """Pure colours of a known hue: gain 2 doubles the hue angle, and saturation and value stop at 1."""
    colours = {(200, 0, 0): (200, 0, 0), (200, 100, 0): (200, 200, 0), (200, 200, 0): (0, 200, 0)}
    images = np.zeros((len(colours), HEIGHT, WIDTH, 3), np.uint8)
    images[:] = np.array(list(colours))[:, None, None]
    batch = len(colours)
    tiles = np.full((batch, 1, 4, 3), -1, np.int32)
    tiles[:, 0, 3] = [[number, 0, 0] for number in range(batch)]
    geometry = np.tile(np.array([1, 0, 0, 0, 1, 0, 0, 0, WIDTH, HEIGHT], np.float32), (batch, 1, 1))
    nothing = np.zeros((batch, 0, 5), np.float32), np.zeros((batch, 0), bool)
    turned = on_device(images, Table(tiles, geometry, np.array([[2, 1, 1, 1]] * batch, np.float32), *nothing))
    np.testing.assert_allclose(turned[:, 0, 0], list(colours.values()), atol=0.01)
    bright = on_device(images, Table(tiles, geometry, np.array([[1, 2, 2, 1]] * batch, np.float32), *nothing))
    np.testing.assert_allclose(bright[:, 0, 0], [[255, 0, 0], [255, 127.5, 0], [255, 255, 0]], atol=0.01)


def test_statistics_are_those_of_the_opencv_pipeline_over_many_draws(split):
    table = draw(split, batch=200, seed=3)
    ours, theirs = on_device(split.images, table), augment_on_host(split.images, *table.pixels)
    assert ours.mean(axis=(0, 1, 2)) == pytest.approx(theirs.mean(axis=(0, 1, 2)), abs=1.0)
    assert ours.std(axis=(0, 1, 2)) == pytest.approx(theirs.std(axis=(0, 1, 2)), abs=1.0)
