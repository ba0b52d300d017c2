import os
import pickle
from pathlib import Path

import pytest
import torch

from autospeed_model import checkpoint
from autospeed_model.errors import UserError
from autospeed_model.network import AutoSpeed


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("executed",)


def test_weights_come_back_as_the_network_they_belong_to(tmp_path: Path) -> None:
    network = AutoSpeed(64, 96, "n").eval()
    path = tmp_path / "été 'x'" / "best.pt"
    checkpoint.save_weights(path, network, {"map": 0.5})
    loaded = checkpoint.load_network(path)
    image = torch.rand(1, 3, 64, 96)
    assert not loaded.training
    assert torch.equal(loaded(image), network(image))


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, checkpoint.WEIGHTS, {"value": 1})
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save(path, checkpoint.WEIGHTS, {"value": lambda: None})
    assert checkpoint.load(path, checkpoint.WEIGHTS)["value"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_told_with_the_file_that_had_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: bool
) -> None:
    temporary = tmp_path / "temporary"
    temporary.touch()
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(checkpoint.tempfile, "mkstemp", lambda **_: (full, str(temporary)))
    if not buffered:  # else the error of closing the file hides that of PyTorch's archive
        monkeypatch.setattr(checkpoint.os, "fdopen", lambda handle, mode: open(handle, mode, buffering=0))  # noqa: PTH123, SIM115
    with pytest.raises(OSError, match=r"No space left on device: .*last\.pt"):
        checkpoint.save(tmp_path / "last.pt", checkpoint.WEIGHTS, {"value": torch.zeros(1_000_000)})
    assert not list(tmp_path.iterdir())


def test_reading_never_runs_code_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"format": checkpoint.WEIGHTS, "evil": Evil()}, "evil.pt")
    with pytest.raises(UserError, match="not a checkpoint"):
        checkpoint.load(Path("evil.pt"), checkpoint.WEIGHTS)
    assert not Path("executed").exists()


def test_a_file_of_another_kind_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    checkpoint.save(path, checkpoint.WEIGHTS, {})
    with pytest.raises(UserError, match="its format is 'autospeed-weights'; needed is autospeed-training"):
        checkpoint.load(path, checkpoint.TRAINING)
    torch.save({"format": checkpoint.WEIGHTS, "version": 99}, path)
    with pytest.raises(UserError, match="version 99, this program reads version 1"):
        checkpoint.load(path, checkpoint.WEIGHTS)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="its format is None"):
        checkpoint.load(path, checkpoint.WEIGHTS)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 truncated"])
def test_a_damaged_file_is_told_as_such(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged\.pt: not a checkpoint"):
        checkpoint.load(path, checkpoint.TRAINING)


def test_a_truncated_checkpoint_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    checkpoint.save(path, checkpoint.TRAINING, {"weights": torch.zeros(10_000)})
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(UserError, match=r"cut\.pt: not a checkpoint"):
        checkpoint.load(path, checkpoint.TRAINING)


def test_a_changed_byte_is_told_or_does_no_harm(tmp_path: Path) -> None:
    """PyTorch itself reads weights whose checksum is wrong."""
    path = tmp_path / "changed.pt"
    checkpoint.save(path, checkpoint.TRAINING, {"weights": torch.zeros(20)})
    whole = path.read_bytes()
    told = 0
    for place in range(0, len(whole), 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x86]) + whole[place + 1 :])
        try:
            assert checkpoint.load(path, checkpoint.TRAINING)["weights"].eq(0).all()
        except UserError:
            told += 1
    assert told >= 80 // 11, "at least those in the weights"


def test_a_missing_file_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.pt: no such file"):
        checkpoint.load(tmp_path / "none.pt", checkpoint.TRAINING)
