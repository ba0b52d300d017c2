"""The benchmark of status runs to its end and tells what it measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "status.py"


def test_the_benchmark_measures_the_first_picture_and_the_rest() -> None:
    command = [sys.executable, str(BENCHMARK), "--trials", "80", "--seconds", "1", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    for wanted in ("import optuna", "stock Optuna reads all trials", "status, first picture", "% of a core"):
        assert wanted in done.stdout
