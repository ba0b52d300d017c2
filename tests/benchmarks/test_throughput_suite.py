"""The order of the sections of benchmarks/throughput_suite.sh, with a stand-in for Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Rendering and building each wait until the other has begun.
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS/all"
touch "$CALLS/$2"
case $2 in
  hip_kernels.build) until [ -e "$CALLS/autospeed_model.render" ]; do sleep 0.05; done; exit 1 ;;
  autospeed_model.render) until [ -e "$CALLS/hip_kernels.build" ]; do sleep 0.05; done ;;
  autospeed_model.prepare) mkdir -p "$4" ;;
esac
"""


def test_data_and_kernels_come_first_and_side_by_side_and_a_failure_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    variables = {
        "PYTHON": str(python),
        "CALLS": str(tmp_path),
        "WORK": str(tmp_path / "work"),
        "BATCH_SIZES": "8",
        "LIMIT_S": "300",
        "THROUGHPUT_OPTIONS": "--setting max_lr=0.01 --precisions fp32",
    }
    done = subprocess.run(
        [ROOT / "benchmarks" / "throughput_suite.sh", tmp_path / "out", "data", "kernels", "warm", "k2"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.endswith("failed or was cut")]
    assert told == ["section kernels failed or was cut"]
    calls = [line.split() for line in (tmp_path / "all").read_text().splitlines()]
    names = [call[1] if call[0] == "-m" else call[0] for call in calls]
    assert sorted(names[:3]) == ["autospeed_model.prepare", "autospeed_model.render", "hip_kernels.build"]
    assert names[3:] == ["benchmarks/training_speed.py", "hpcjobs.throughput"]
    # what the user says comes later and counts
    default = calls[-1].index("max_lr=0.001")
    assert default < calls[-1].index("max_lr=0.01")
    assert "fp32" in calls[-1]
