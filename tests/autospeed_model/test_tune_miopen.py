import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autospeed_model import tuning
from autospeed_model.accelerator import NODE_CACHE
from autospeed_model.errors import UserError
from autospeed_model.tune_miopen import batch_sizes, main


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path) -> Iterator[None]:
    before = dict(os.environ)
    os.environ[NODE_CACHE] = str(tmp_path / "cache")
    yield
    os.environ.clear()
    os.environ.update(before)


def test_every_batch_size_is_tuned_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(tuning, "tune", lambda *arguments: tuned.append(arguments))
    assert main([str(tmp_path / "db"), "--variant", "autospeed", "--batch-sizes", "8,16"]) == 0
    assert tuned == [(640, 640, "n", 8, "bf16"), (640, 640, "n", 16, "bf16")]
    assert os.environ["MIOPEN_USER_DB_PATH"] == str(tmp_path / "db")
    assert os.environ["MIOPEN_FIND_ENFORCE"] == "search_db_update"
    assert os.environ["PYTORCH_MIOPEN_SUGGEST_NHWC"] == "1"


def test_without_rocm_there_is_nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UserError, match="is not built for ROCm"):
        main([str(tmp_path / "db")])
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize("text", ["", "8,x", "0", "-1"])
def test_batch_sizes_that_are_none_are_told(text: str) -> None:
    with pytest.raises(UserError, match="--batch-sizes is"):
        batch_sizes(text)


def test_an_unknown_variant_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--variant is 'autospeed-9'; allowed are autospeed, autospeed-2"):
        main([str(tmp_path / "db"), "--variant", "autospeed-9"])


def test_tuning_takes_a_whole_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    original = tuning.TrainingStep.update
    monkeypatch.setattr(tuning.TrainingStep, "update", lambda self, rate: (original(self, rate), updates.append(rate)))
    tuning.tune(64, 64, "n", 2, "bf16", device="cpu")
    assert len(updates) == 1
