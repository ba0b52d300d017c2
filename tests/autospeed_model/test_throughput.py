"""What one worker of a throughput experiment does: real training, counted by a clock that the test plays."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autospeed_model import throughput
from autospeed_model.errors import UserError
from autospeed_model.throughput import measure


class CountedWindow:
    """Over after so many calls of ``add``."""

    def __init__(self, adds: int) -> None:
        self.images: list[int] = []
        self.closed = False
        self._adds = adds

    @property
    def over(self) -> bool:
        return len(self.images) >= self._adds

    def add(self, images: int) -> None:
        self.images.append(images)

    def close(self) -> None:
        self.closed = True


@dataclass
class Experiment:
    data: Path | None
    batch_size: int = 8
    precision: str = "fp32"
    settings: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    window_s: float = 1.0
    windows: dict[str, CountedWindow] = field(default_factory=dict)

    def window(self, name: str) -> CountedWindow:
        return self.windows.setdefault(name, CountedWindow(3))


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "WARM_UP_UPDATES", 1)


def test_all_images_of_whole_updates_are_counted_over_epochs(squares_folder: Path) -> None:
    experiment = Experiment(squares_folder)
    figures = measure(experiment)
    assert list(experiment.windows) == ["end_to_end", "compute_only"]
    assert all(window.closed for window in experiment.windows.values())
    counted = experiment.windows["end_to_end"].images
    # an update takes 8 steps of 8 images, or what an epoch has left
    assert len(counted) == 3 and all(images % 8 == 0 and 0 < images <= 64 for images in counted)
    assert experiment.windows["compute_only"].images == [8, 8, 8]
    assert figures["objective"] == "autospeed_model.objective:train_trial"
    assert figures["step_s"] > 0 and figures["memory_gb"] is None


def test_memory_that_runs_out_passes_to_the_experiment(squares_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise throughput.torch.OutOfMemoryError("HIP out of memory")

    monkeypatch.setattr(throughput, "_train", exhausted)
    with pytest.raises(throughput.torch.OutOfMemoryError):
        measure(Experiment(squares_folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4096}, "fewer than a batch of 4096"),
        ({"settings": {"sise": "n"}}, "did you mean 'size'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"data": None}, "needs a dataset"),
    ],
)
def test_a_cell_that_cannot_be_measured_says_why(squares_folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        measure(Experiment(**{"data": squares_folder, **change}))
