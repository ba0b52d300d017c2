"""The pieces of benchmarks/tuning_suite.sh, on images that hold one box each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import record_curves, tuning_report
from hpcjobs.final_results import FinalResults, Spread
from hpcjobs.load import load_study
from hpcjobs.objective import describe, inspect_objective
from hpcjobs.search_space import check_search_space

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "benchmarks" / "rendered.yaml"
ROWS: list[dict[str, Any]] = [
    {"number": 0, "params": {}, "map": [0.1, 0.2], "pass_s": 1.0, "eval_s": 0.5},
    {"number": 1, "params": {"cls": 1.0}, "map": [0.2, 0.4], "pass_s": 1.1, "eval_s": 0.5},
    {"number": 2, "params": {"cls": 2.0}, "map": [0.3], "pass_s": 1.2, "eval_s": 0.7, "failure": "diverged"},
    {"number": 3, "params": {"cls": 3.0}, "map": [0.0, 0.1], "pass_s": 1.3, "eval_s": 0.5},
    {"number": 4, "params": {"cls": 4.0}, "map": [0.0, 0.1], "pass_s": 1.4, "eval_s": 0.5},
]


def images(count: int, shade: int) -> tuple[np.ndarray, list[np.ndarray]]:
    pictures = np.full((count, 64, 64, 3), shade, np.uint8)
    pictures[:, 8:40, 8:40] = 255 - shade
    return pictures, [np.array([[1, 8, 8, 40, 40]], np.float32)] * count


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from autospeed_model.packed import write_dataset

    folder = tmp_path_factory.mktemp("tuning") / "data"
    splits = {"train": images(5, 10), "tune_val": images(3, 90), "evaluation": images(4, 50)}
    write_dataset(folder, "autospeed", splits)
    return folder


def test_a_study_file_is_read_in_both_forms() -> None:
    space, fixed = record_curves.read_study(STUDY)
    plain, nothing = record_curves.read_study(ROOT / "configs" / "studies" / "experiment1.yaml")
    assert space == plain and space["min_lr"]["min"] == 1e-6
    assert fixed["batch_size"] == 16 and nothing == {}


def test_the_study_is_one_that_submit_takes() -> None:
    study, document = load_study(STUDY)
    check_search_space(study, inspect_objective(study.objective), document)
    assert describe(describe(study.objective)["final"])["needs_data"]


def test_a_line_that_was_cut_short_costs_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    record_curves.append(path, {"number": 0})
    record_curves.end_last_line(path)
    path.write_text(path.read_text() + '{"number": 1, "map": [0.')
    record_curves.end_last_line(path)
    record_curves.append(path, {"number": 2})
    assert [row["number"] for row in record_curves.read_rows(path)] == [0, 2]
    assert len(path.read_text().splitlines()) == 3
    assert record_curves.read_rows(tmp_path / "none") == []


def test_a_recording_goes_on_where_it_was_cut_off(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "curves.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "record_curves.py"), "--data", str(data), "--out", str(out)]
    command += ["--study", str(STUDY), "--passes", "2", "--processes", "2"]
    for count in (1, 4):
        subprocess.run([*command, "--count", str(count)], check=True, timeout=400)
    rows = {row["number"]: row for row in record_curves.read_rows(out)}
    assert sorted(rows) == [0, 1, 2, 3] and len(record_curves.read_rows(out)) == 4
    assert rows[0]["params"] == {} and len(rows[0]["map"]) == 2
    assert all(rows[3][name] > 0 for name in ("pass_s", "first_pass_s", "setup_s", "eval_s"))


def test_processes_that_die_are_replaced_only_so_often(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "record_curves.py"), "--data", str(tmp_path / "none")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "curves.jsonl")], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 1
    assert done.stdout.count("another one takes its place") == record_curves.REPLACEMENTS


def test_equal_values_share_a_rank() -> None:
    assert list(tuning_report.ranks([3.0, 1.0, 3.0])) == [1.5, 0.0, 1.5]
    assert tuning_report.spearman([1, 2, 3, 4], [10, 20, 30, 99]) == 1.0
    assert tuning_report.spearman([1, 2, 3], [5, 5, 5]) is None


def test_curves_are_summed_up_without_what_diverged() -> None:
    summary = tuning_report.of_curves(ROWS)
    assert (summary["trainings"], summary["ended"], summary["diverged"], summary["above_default"]) == (5, 4, 1, 1)
    assert summary["default"] == [0.1, 0.2] and summary["best"]["number"] == 1
    assert summary["pass_s_with"] == {"cls": 1.0}
    assert summary["map_percentiles"]["100"] == 0.4
    assert tuning_report.of_curves([])["ended"] == 0


def test_the_report_holds_the_gain_as_a_table() -> None:
    values = {"optimised": [0.4, 0.41], "default": [0.2, 0.21]}
    final = FinalResults({setting: {"map": Spread.of(own)} for setting, own in values.items()}, 0).as_dict()
    text = tuning_report.markdown({"final": json.loads(json.dumps(final))})
    assert "| gain | +20.0 |" in text and "| default | 20.5 ± 0.7 |" in text


def test_the_suite_goes_on_after_what_fails_and_reports_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "curves.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    environment = {"DEVICE": "cpu", "LIMIT": "0", "TUNING_WORK": str(tmp_path / "work"), "PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "benchmarks" / "tuning_suite.sh", tmp_path / "out", "gain", "report"],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    log = (tmp_path / "out" / "tuning.log").read_text()
    assert "section gain failed" in log and "report: done" in log
    assert json.loads((tmp_path / "out" / "tuning.json").read_text())["curves"]["trainings"] == 5


def test_the_suite_records_what_nothing_was_recorded_of_and_ends_trainings_whose_time_is_over(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$*" >>"$CALLS"\n[ "$2" != hpcjobs.final ] || exec sleep 600\n')
    python.chmod(0o755)
    environment = {"DEVICE": "cpu", "TUNING_WORK": str(tmp_path / "work"), "PYTHON": str(python), "GAIN_S": "1"}
    calls = tmp_path / "calls"
    done = subprocess.run(
        [ROOT / "benchmarks" / "tuning_suite.sh", tmp_path / "out", "more", "gain"],
        env={**os.environ, **environment, "CALLS": str(calls)}, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    record, final, cancel = calls.read_text().splitlines()
    assert record.startswith("benchmarks/record_curves.py") and final.startswith("-m hpcjobs.final")
    assert cancel == f"-m hpcjobs.cancel {tmp_path}/work/study/final --wait 25"
