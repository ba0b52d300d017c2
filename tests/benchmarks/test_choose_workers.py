"""The check of --mode auto's choice against measurements, on rows written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import choose_workers
from hpcjobs.mode_choice import Choice
from hpcjobs.throughput_table import Row, ThroughputTable


def table(folder: Path, workers: int, speeds: dict[int, float | None], gpu: str = "H200") -> str:
    rows = tuple(
        Row(None, workers, batch, "auto", "ok" if speed else "oom", workers, 1, end_to_end=speed)
        for batch, speed in speeds.items()
    )
    path = folder / f"k{workers}.json"
    path.write_text(ThroughputTable("t", None, "m", "o", {}, {"gpu": gpu}, 4.0, rows).to_json())
    return str(path)


def test_tables_are_joined_and_the_choice_is_among_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [table(tmp_path, 1, {8: 500.0, 128: 900.0}), table(tmp_path, 8, {8: 1900.0, 128: None})]
    assert choose_workers.main([*given, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "batch    8, 8 a GPU:   1900.0 images/s end to end  <- chosen" in out
    assert "batch  128, 1 a GPU:    900.0 images/s end to end  <- chosen" in out
    assert "batch  128, 8 a GPU:      oom" in out
    assert "most: 1900 images/s, 2.22 times the reference's 854" in out
    assert len(ThroughputTable.read(tmp_path / "out" / "throughput.json").rows) == 4


def test_a_choice_that_loses_more_than_a_twentieth_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [table(tmp_path, 1, {8: 94.0}), table(tmp_path, 2, {8: 100.0})]
    out = ["--out", str(tmp_path)]
    monkeypatch.setattr(choose_workers, "choose", lambda need, cluster, t: Choice(t.setups[0], 1, "the fewest"))
    assert choose_workers.main([*given, *out]) == 1
    assert choose_workers.main([table(tmp_path, 1, {8: 95.0}), given[1], *out]) == 0


def test_tables_of_two_machines_are_not_joined(tmp_path: Path) -> None:
    given = [table(tmp_path, 1, {8: 94.0}), table(tmp_path, 2, {8: 100.0}, gpu="MI300X")]
    with pytest.raises(choose_workers.UserError, match="join those of one machine"):
        choose_workers.main([*given, "--out", str(tmp_path)])
