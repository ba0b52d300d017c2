"""The doctor's profile of the emulated cluster submits a study unedited."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.emulator import Cluster

OBJECTIVE = "def train(params, context):\n    return params['x']\n"


def test_the_doctors_profile_submits_a_study_unedited(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "easy.py").write_text(OBJECTIVE)
    (tmp_path / "search.yaml").write_text("objective: easy:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n")
    told = cluster.run(sys.executable, "-m", "hpcjobs.doctor", "--profile", "mine.yaml", cwd=tmp_path).stdout
    assert "wrong" not in told
    assert "jobs can ask for spx, dpx, qpx, cpx" in " ".join(told.split())
    options = ["--study", "search.yaml", "--cluster", "mine.yaml", "--trials", "3", "--epochs", "1"]
    out = cluster.run(
        sys.executable, "-m", "hpcjobs.submit", *options, "--workers", "2", "--folder", "study", "--wait", cwd=tmp_path
    ).stdout
    assert "3 of 3 trials have ended" in out
    assert (tmp_path / "study" / "results" / "best_params.yaml").is_file()
