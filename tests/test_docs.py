"""What the pages under docs/ tell people to write works as it stands there."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_example_of_an_own_objective_runs_and_its_trials_learn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    page = (DOCS / "objective.md").read_text(encoding="utf-8")
    for language, name in (("python", "my_training.py"), ("yaml", "my_study.yaml")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block, encoding="utf-8")
    command = ["-m", "hpcjobs.submit", "--study", "my_study.yaml", "--workers", "1", "--folder", "study"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = list(csv.DictReader((tmp_path / "study/results/trials.csv").open(encoding="utf-8")))
    assert [trial["state"] for trial in trials] == ["complete"] * 8
    curve = list(csv.DictReader((tmp_path / "study/trials/00000/curve.csv").open(encoding="utf-8")))
    assert float(curve[-1]["value"]) < float(curve[0]["value"])
