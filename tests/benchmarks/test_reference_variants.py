"""The usual training that ours is compared with: it trains on a CPU, and ends where it would wait for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autospeed_model.errors import UserError
from autospeed_model.prepare import main as prepare
from autospeed_model.render import main as render
from benchmarks.reference_variants import VARIANTS, main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Rendered frames and the dataset made from them."""
    folder = tmp_path_factory.mktemp("comparison")
    source, data = folder / "rendered", folder / "prepared"
    render([str(source), "--segments", "2", "--validation-segments", "0", "--frames", "3", "--jobs", "1"])
    prepare([str(source), str(data), "--height", "64", "--width", "128", "--jobs", "1"])
    return source, data


# "compiled" and "all" compile for the machine, which takes minutes here
@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"compiled", "all"}))
def test_every_variant_trains(variant: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, data = folders
    result = tmp_path / "result.json"
    given = [variant, "--data", str(data), "--source", str(source), "--batch-size", "2", "--seconds", "0.1"]
    assert main([*given, "--device", "cpu", "--json", str(result)]) == 0
    found = json.loads(result.read_text())
    assert found["compute_only"] >= found["end_to_end"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch-size", "4"], "--batch-size is 4; allowed are 1 to 3, the images to train on"),
        (["--batch-size", "0"], "--batch-size is 0; allowed are 1 to 3"),
        (["--seconds", "0"], "--seconds is 0; allowed is any number above 0"),
        (["--batch-size", "2", "--source", "/nowhere"], "no such file; --source must be the OpenLane folder"),
        (["--device", "tpu"], "device is 'tpu'; allowed are cpu, cuda"),
    ],
)
def test_mistakes_are_told(more: list[str], message: str, folders: tuple[Path, Path]) -> None:
    source, data = folders
    with pytest.raises(UserError, match=message):
        main(["original", "--data", str(data), "--source", str(source), "--device", "cpu", *more])
