"""The printed tables and charts, and what they say about cells without a speed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpcjobs.errors import UserError
from hpcjobs.throughput_report import findings, html_page, markdown, write_report
from hpcjobs.throughput_table import ThroughputTable, make_row
from tests.hpcjobs.published import published_table


def test_the_published_figures_print_as_they_were_published() -> None:
    text = markdown(published_table())
    compute_only, end_to_end = re.split("## End to end", text)
    assert "| CPX (63) | 7,332 | 8,778 | 10,136 | 12,249 | 13,982 | OOM |  |  |" in compute_only
    assert "| SPX (8) | 1,543 | 2,648 | 4,528 | 6,255 | 7,089 | 6,852 | 5,901 | 4,866 |" in end_to_end
    assert "| QPX (32) | 4,980 | 7,621 | 7,570 | 7,036 | 7,192 | 6,861 | OOM |  |" in end_to_end


def test_the_best_mode_of_each_batch_size_is_said() -> None:
    found = findings(published_table())
    assert found[0] == "Batch size 8: CPX (63), 6,944 images/s, 1.39 times QPX (32)."
    assert found[7] == "Batch size 1024: SPX (8), 4,866 images/s."


def test_the_precision_is_said_where_there_are_several() -> None:
    table = published_table()
    slower = [replace(row, precision="fp32", end_to_end=1.0) for row in table.rows if row.end_to_end]
    found = findings(replace(table, rows=[*table.rows, *slower]))
    assert found[7] == "Batch size 1024: SPX (8) in auto, 4,866 images/s."


def test_a_report_has_both_charts_and_one_page_that_needs_no_other_file(tmp_path: Path) -> None:
    written = {path.name for path in write_report(tmp_path, published_table())}
    assert written == {
        "throughput.json", "throughput.md", "throughput.html", "all_figures.csv",
        "end_to_end.csv", "compute_only.csv", "end_to_end.png", "compute_only.png",
    }  # fmt: skip
    page = (tmp_path / "throughput.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert (tmp_path / "end_to_end.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "compute_only.csv").read_text().splitlines()[1] == (
        "SPX (8),1628,2982,4820,6676,8630,10190,10744,10713"
    )


def test_a_table_comes_back_from_its_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "throughput.json"
    path.write_text(published_table().to_json())
    assert ThroughputTable.read(path) == published_table()


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{}]}'])
def test_another_file_is_refused_as_a_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match="found no table of an experiment"):
        ThroughputTable.read(tmp_path / "t.json")


def test_names_from_outside_cannot_break_the_page() -> None:
    table = published_table()
    evil = ThroughputTable(**{**vars(table), "name": "<script>alert(1)</script>"})
    assert "<script>" not in html_page(evil, {})


def worker(status: str = "ok", speed: float = 100.0) -> dict[str, object]:
    window = {"images": 1, "seconds": 2.0, "images_per_s": speed, "cpu_s": 3.0, "late_s": 0.0}
    windows = {"end_to_end": window, "compute_only": {**window, "images_per_s": 2 * speed}}
    return {"status": status, "windows": windows, "figures": {"memory_gb": speed / 10}, "host_memory_gb": 1.5}


def cell(status: str, *results: dict[str, object]) -> dict[str, object]:
    return {
        "setup": {"mode": "cpx", "per_gpu": 1},
        "cell": {"batch_size": 8, "precision": "bf16"},
        "status": status,
        "workers": len(results),
        "gpus": 2,
        "pressure": {"0": {"device_busy": 0.5, "limit": "CPUs: 100% of 2 busy"}},
        "results": results,
    }


def test_a_cell_sums_its_workers_and_tells_their_spread() -> None:
    row = make_row(cell("ok", worker(speed=90), worker(speed=110)))
    assert (row.end_to_end, row.compute_only, row.spread) == (200, 400, 0.1)
    assert (row.memory_gb, row.host_memory_gb, row.cores_busy) == (11, 1.5, 3)
    assert (row.device_busy, row.host_limit) == (0.5, "CPUs: 100% of 2 busy")


def test_a_cell_in_which_one_worker_ran_out_of_memory_has_no_speed() -> None:
    row = make_row(cell("oom", worker(), {"status": "oom", "message": "OutOfMemoryError: 99 GiB"}))
    assert (row.status, row.end_to_end, row.message) == ("oom", None, "OutOfMemoryError: 99 GiB")
