"""The training on all training data, tested once on images that nothing else has seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autospeed_model.errors import UserError
from autospeed_model.final import _report
from autospeed_model.joined import join
from autospeed_model.objective import train_final, train_trial
from autospeed_model.packed import PackedDataset, write_dataset

SMALL = {"batch_size": 4, "warmup_epochs": 0, "size": "n"}


class Interrupted(BaseException):
    pass


class FakeContext:
    """Keeps reports; asks for a stop after so many polls."""

    device = "cpu"

    def __init__(self, folder: Path, data: Path, polls: int | None = None) -> None:
        self.checkpoint, self.data, self.epochs, self.polls = folder / "checkpoint.pt", data, 2, polls
        self.reports: dict[int, tuple[float, dict[str, float]]] = {}

    @property
    def stop_requested(self) -> bool:
        if self.polls is not None:
            self.polls -= 1
        return self.polls is not None and self.polls < 0

    def hand_back(self) -> None:
        raise Interrupted

    def report(self, epoch: int, value: float, **figures: float) -> None:
        self.reports[epoch] = value, figures


def images(count: int, shade: int) -> tuple[np.ndarray, list[np.ndarray]]:
    pictures = np.full((count, 64, 64, 3), shade, np.uint8)
    boxes = [np.array([[1, 8, 8, 40 + index, 40]], np.float32) for index in range(count)]
    for picture in pictures:
        picture[8:40, 8:40] = 255 - shade
    return pictures, boxes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("final") / "data"
    write_dataset(folder, "autospeed", {"train": images(5, 10), "tune_val": images(3, 90), "evaluation": images(4, 50)})
    yield folder


def test_what_an_epoch_reports_is_its_loss_without_gains_and_more_is_better(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(history=[{"plain_loss": 6.0, "images_per_s": 9.0}], finished=False, epoch=1)
    context = FakeContext(tmp_path, tmp_path)
    _report(context, trainer)
    assert context.reports == {1: (-6.0, {"images_per_s": 9.0})}
    trainer.finished = True  # its last report is the value on what no trial has seen
    trainer.epoch = 2
    _report(context, trainer)
    assert list(context.reports) == [1]


def test_joined_splits_are_one_array_without_a_copy(data: Path) -> None:
    dataset = PackedDataset(data)
    parts = [dataset.split("train"), dataset.split("tune_val")]
    joined = join(parts)
    whole = np.concatenate([np.asarray(part.images) for part in parts])
    assert (len(joined), joined.height, joined.width, joined.images.nbytes) == (8, 64, 64, whole.nbytes)
    for index in (0, 4, 5, 7, -1):
        assert np.array_equal(joined.images[index], whole[index])
    assert np.array_equal(joined.images[6, 3:9, 2:5], whole[6, 3:9, 2:5])
    for piece in (slice(0, 3), slice(3, 7), slice(6, None), slice(2, 8, 3), slice(8, 9)):
        assert np.array_equal(joined.images[piece], whole[piece])
    assert np.shares_memory(joined.images[1:4], parts[0].images)
    for index in range(8):
        own = parts[0].boxes_of(index) if index < 5 else parts[1].boxes_of(index - 5)
        assert np.array_equal(joined.boxes_of(index), own)
    with pytest.raises(IndexError):
        joined.images[8]


def test_splits_of_different_sizes_are_not_joined(data: Path, tmp_path: Path) -> None:
    other = np.zeros((2, 32, 64, 3), np.uint8), [np.zeros((0, 5), np.float32)] * 2
    small = write_dataset(tmp_path / "other", "autospeed", {"train": other})
    with pytest.raises(UserError, match="different image sizes"):
        join([PackedDataset(data).split("train"), small.split("train")])


def test_the_objective_declares_its_final_training() -> None:
    declared: Any = train_trial
    final: Any = train_final
    assert declared.final == f"{train_final.__module__}:{train_final.__name__}"
    assert final.parameters == declared.parameters


def test_trained_on_all_training_images_tested_once_and_left_with_pictures(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    split = PackedDataset.split
    monkeypatch.setattr(PackedDataset, "split", lambda self, name: opened.append(name) or split(self, name))
    context = FakeContext(tmp_path, data)
    value = train_final(SMALL, context)
    assert sorted(opened) == ["evaluation", "train", "tune_val"]
    assert list(context.reports) == [1, 2]
    assert context.reports[1][0] < 0
    figures = context.reports[2][1]
    assert context.reports[2][0] == value == figures["map"]
    told = json.loads((tmp_path / "evaluation.json").read_text())
    assert told["images"] == 4
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "map" not in rows[0].split(",")


def test_it_goes_on_after_a_stop_and_ends_the_same(data: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()
    whole = train_final(SMALL, FakeContext(folders[0], data))
    with pytest.raises(Interrupted):
        train_final(SMALL, FakeContext(folders[1], data, polls=1))
    again = FakeContext(folders[1], data)
    assert train_final(SMALL, again) == whole
    losses = [(folder / "metrics.csv").read_text().splitlines()[-1].split(",")[:5] for folder in folders]
    assert losses[0] == losses[1]


def test_it_begins_anew_where_its_checkpoint_is_damaged(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = FakeContext(tmp_path, data)
    context.checkpoint.write_bytes(b"half a file")
    train_final(SMALL, context)
    assert f"the training begins anew: {context.checkpoint}: " in caplog.text
    assert list(context.reports) == [1, 2]
