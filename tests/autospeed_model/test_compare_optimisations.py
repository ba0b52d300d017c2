import csv
from pathlib import Path

import pytest

from autospeed_model import compare_optimisations
from autospeed_model.compare_optimisations import ROWS, Measured, Row, main, measure, write
from autospeed_model.errors import UserError


def test_every_row_names_a_script_that_is_there() -> None:
    assert {"original", "vectorised", "preprocessed", "compiled", "all", "ours"} <= set(ROWS)
    for row in ROWS.values():
        assert (compare_optimisations.ROOT / "benchmarks" / row.command[0]).is_file()


def test_the_table_is_written_in_order(tmp_path: Path) -> None:
    write([Measured("original", 317.04, 202.0), Measured("ours", 1950.7, 1693.3)], tmp_path)
    with (tmp_path / "comparison.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["variant", "compute_only_images_per_s", "end_to_end_images_per_s"],
        ["original", "317.0", "202.0"],
        ["ours", "1950.7", "1693.3"],
    ]


def test_a_row_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    row = Row("broken", ("training_speed.py",))
    arguments = ["--data", str(tmp_path / "none"), "--source", str(tmp_path), "--device", "cpu"]
    with pytest.raises(UserError, match=r"'broken' failed with code 2:\n.*no such folder"):
        measure(row, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "fastest"], "--rows: 'fastest'; allowed are original"),
        (["--data", "x"], "give both --data and"),
        (["--batch-size", "0"], "found --batch-size 0 --seconds 10; allowed are"),
        (["--seconds", "-1"], "found --batch-size 32 --seconds -1; allowed are"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["--out", str(tmp_path), *arguments])
