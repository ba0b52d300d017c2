import json
from pathlib import Path

import numpy as np
import pytest

from autospeed_model.errors import UserError
from autospeed_model.packed import PackedDataset, pad_boxes, write_dataset

RNG = np.random.default_rng(0)
COUNTS = [2, 0, 3, 1, 0]


def boxes_of(count: int) -> np.ndarray:
    corner = RNG.uniform(0, 20, (count, 2))
    rows = [RNG.integers(1, 4, (count, 1)), corner, corner + RNG.uniform(3, 20, (count, 2))]
    return np.concatenate(rows, axis=1).astype(np.float32)


@pytest.fixture
def arrays() -> tuple[np.ndarray, list[np.ndarray]]:
    return RNG.integers(0, 256, (5, 24, 48, 3), dtype=np.uint8), [boxes_of(count) for count in COUNTS]


@pytest.fixture
def dataset(tmp_path: Path, arrays: tuple[np.ndarray, list[np.ndarray]]) -> PackedDataset:
    nothing = np.zeros((0, 24, 48, 3), np.uint8)
    return write_dataset(tmp_path / "a földer", "autospeed-2", {"train": arrays, "evaluation": (nothing, [])})


def edit_manifest(dataset: PackedDataset, **values: object) -> None:
    path = dataset.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_reads_back_what_was_written(dataset, arrays):
    split = dataset.split("train")
    assert (len(split), split.height, split.width) == (5, 24, 48)
    assert isinstance(split.images, np.memmap)
    np.testing.assert_array_equal(split.images, arrays[0])
    for index, expected in enumerate(arrays[1]):
        np.testing.assert_array_equal(split.boxes_of(index), expected)
    dataset.verify("train")


def test_a_split_without_images_opens(dataset):
    split = dataset.split("evaluation")
    assert len(split) == 0
    assert split.images.shape == (0, 24, 48, 3)
    dataset.verify("evaluation")


def test_boxes_of_a_batch_are_padded_in_the_order_asked_for(dataset, arrays):
    indices = np.array([2, 1, 0, 2])
    boxes, mask = pad_boxes(*dataset.split("train").flat_boxes(indices), len(indices), 4)
    assert boxes.shape == (4, 4, 5) and mask.sum(1).tolist() == [3, 0, 2, 3]
    for row, index in enumerate(indices):
        np.testing.assert_array_equal(boxes[row][mask[row]], arrays[1][index])
    assert not boxes[~mask].any()


def test_a_batch_without_boxes_may_have_no_columns(dataset):
    boxes, mask = pad_boxes(*dataset.split("train").flat_boxes(np.array([1, 4])), 2, 0)
    assert boxes.shape == (2, 0, 5) and mask.shape == (2, 0)


def test_padding_never_drops_boxes(dataset):
    flat = dataset.split("train").flat_boxes(np.array([2]))
    with pytest.raises(ValueError, match="3 boxes, but only 2"):
        pad_boxes(*flat, 1, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"version": 0}, "version 0, this program reads version 1"), ({"format": "x"}, "not the manifest")],
)
def test_the_manifest_of_something_else_is_refused(dataset, values, message):
    edit_manifest(dataset, **values)
    with pytest.raises(UserError, match=message):
        PackedDataset(dataset.folder)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no manifest\.json.*autospeed_model\.prepare"):
        PackedDataset(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        PackedDataset(tmp_path / "missing")
    (tmp_path / "manifest.json").write_text('{"format": ')
    with pytest.raises(UserError, match="not readable as JSON"):
        PackedDataset(tmp_path)


def test_an_unknown_split_is_refused_with_those_there_are(dataset):
    with pytest.raises(UserError, match="no split 'test'; there are train, evaluation"):
        dataset.split("test")


@pytest.mark.parametrize("what", ["images", "boxes", "offsets"])
def test_a_truncated_array_is_refused(dataset, what):
    path = dataset.path("train", what)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=f"train.{what}.npy: truncated"):
        dataset.split("train")


def test_an_array_of_another_shape_is_refused(dataset):
    np.save(dataset.path("train", "images"), np.zeros((5, 24, 40, 3), np.uint8))
    with pytest.raises(UserError, match=r"the manifest says uint8 \(5, 24, 48, 3\)"):
        dataset.split("train")


@pytest.mark.parametrize("what", ["images", "boxes", "offsets", "names"])
def test_a_missing_file_is_named(dataset, what):
    dataset.path("train", what).unlink()
    with pytest.raises(UserError, match=f"train.{what}.*missing"):
        dataset.split("train")


@pytest.mark.parametrize("what", ["images", "boxes", "names"])
def test_a_changed_byte_is_found_on_demand(dataset, what):
    path = dataset.path("train", what)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"train.{what}.*SHA-256"):
        dataset.verify("train")


@pytest.mark.parametrize(("column", "value"), [(0, 4.0), (0, -1.0), (0, 1.5), (0, np.nan), (2, np.nan), (4, np.inf)])
def test_a_box_that_is_none_is_told_with_its_image(dataset, column, value):
    boxes = np.load(dataset.path("train", "boxes"))
    boxes[-1, column] = value
    np.save(dataset.path("train", "boxes"), boxes)
    with pytest.raises(
        UserError, match=rf"train.boxes.npy: box 5, of image train/3, is \[.*{value}.*class from 0 to 3"
    ):
        dataset.split("train")
    dataset.split("evaluation")
