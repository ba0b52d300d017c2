from pathlib import Path

import cv2
import numpy as np
import pytest

from autospeed_model.contact_sheet import COLOURS, main, sheet
from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.packed import PackedDataset, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    images = np.full((3, 64, 128, 3), 20, np.uint8)
    boxes = [np.array([[number, 30, 10, 80, 50]], np.float32) for number in (1, 2, 3)]
    nothing = np.zeros((0, 64, 128, 3), np.uint8), []
    folder: Path = tmp_path_factory.mktemp("data") / "packed"
    return write_dataset(folder, "autospeed-2", {"train": (images, boxes), "evaluation": nothing})


@pytest.mark.parametrize("host", [False, True])
def test_shows_the_boxes_in_the_colour_of_their_class(dataset, host):
    still = Hyperparameters(mosaic=0, translate=0, scale=0, flip_lr=0, hsv_h=0, hsv_s=0, hsv_v=0)
    split = dataset.split("train")
    picture = sheet(split, still, rows=1, columns=3, seed=0, host=host)
    assert picture.shape == (64, 384, 3)
    shown = {tuple(picture[40, 30 + 128 * column]) for column in range(3)}
    assert shown == set(COLOURS.values())


def test_writes_the_picture(dataset, tmp_path, capsys):
    out = tmp_path / "new folder" / "sheet.png"
    assert main(["--data", str(dataset.folder), "--out", str(out), "--rows", "2", "--set", "mix_up=1"]) == 0
    assert cv2.imread(str(out)).shape == (128, 256, 3)
    assert "4 samples, 256 x 128 pixels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.gif"], r"must end with \.png or \.jpg"),
        (["--out", "x.png", "--rows", "0"], "must be at least 1"),
        (["--out", "x.png", "--rows", "100", "--columns", "100"], "allowed are 1000 samples at most"),
        (["--out", "x.png", "--seed", "-1"], "--seed -1: must be at least 0"),
        (["--out", "x.png", "--set", "mixup=1"], "did you mean 'mix_up'"),
        (["--out", "x.png", "--set", "mosaic"], "write it as NAME=VALUE"),
        (["--out", "x.png", "--set", "momentum=0.5"], "unknown parameter 'momentum'; known are: hsv_h"),
        (["--out", "x.png", "--split", "evaluation"], "split evaluation has no images"),
    ],
)
def test_mistakes_are_refused(dataset, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main(["--data", str(dataset.folder), *arguments])
    assert not list(tmp_path.iterdir())
