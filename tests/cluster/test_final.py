"""From submit to final and report on a real Slurm, without a step by hand between."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.emulator import Cluster

OBJECTIVE = """\
def train(params, context):
    context.report(1, params["x"], images_per_s=100.0)
    return params["x"]


def test_once(params, context):
    value = params["x"] + 0.001 * params["seed"]
    context.report(context.epochs, value, map=value)
    return value


train.parameters = {"x": {"type": "float", "default": 0.1}}
train.final = "mine:test_once"
"""


def test_from_submit_to_final_and_report(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    (tmp_path / "search.yaml").write_text("objective: mine:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n")
    options = ["--study", "search.yaml", "--cluster", "emulated", "--set", "mode={by: none}", "--nodes", "2"]
    more = ["--workers", "3", "--trials", "9", "--epochs", "1", "--folder", "study", "--wait"]
    cluster.run(sys.executable, "-m", "hpcjobs.submit", *options, *more, cwd=tmp_path)
    told = cluster.run(sys.executable, "-m", "hpcjobs.final", "study", "--seeds", "2", cwd=tmp_path).stdout
    cluster.run(sys.executable, "-m", "hpcjobs.report", "study", cwd=tmp_path)
    results = tmp_path / "study" / "results"
    found = json.loads((results / "final.json").read_text())["figures"]
    assert found["default"]["map"]["values"] == [0.1, 0.101]
    best = json.loads((results / "summary.json").read_text())["best"]["value"]
    assert best > 0.1
    assert found["optimised"]["map"]["mean"] == pytest.approx(best + 0.0005)
    assert "started on 2 nodes as job" in told
    page = (results / "report.html").read_text()
    assert "Final trainings" in page
    assert "GPU-hours" in page
