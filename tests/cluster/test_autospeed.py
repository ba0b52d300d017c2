"""AutoSpeed itself as the objective of a study over two nodes: from rendered scenes to a training with the result.

The emulated nodes have no GPU that could compute, so the profile is told that they have none; trials train on the CPU.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.emulator import Cluster

NO_GPU = ["--set", "gpu_vendor=none", "--set", "mode={by: none}", "--set", "environment={OMP_NUM_THREADS: '1'}"]
STUDY = """\
parameters:
  max_lr: {type: loguniform, min: 1e-3, max: 1e-2}
  box: {type: uniform, min: 5.0, max: 10.0}
fixed: {batch_size: 4, update_images: 4, clip_norm: 50.0, mosaic: 0.0}
seed: 1
"""


@pytest.mark.slow
def test_best_parameters_of_a_study_over_two_nodes_train_a_network(cluster: Cluster, tmp_path: Path) -> None:
    def python(*arguments: str) -> str:
        return cluster.run(sys.executable, "-m", *arguments, cwd=tmp_path, OMP_NUM_THREADS="1").stdout

    (tmp_path / "search.yaml").write_text(STUDY)
    python("autospeed_model.render", "openlane", "--segments", "3", "--validation-segments", "1", "--frames", "4")
    python("autospeed_model.prepare", "openlane", "data", "--height", "64", "--width", "96")
    out = python(
        "hpcjobs.submit", "--study", "search.yaml", "--cluster", "emulated", "--data", "data", "--folder", "study",
        "--nodes", "2", "--workers", "1", "--trials", "4", "--epochs", "1", "--wait", *NO_GPU,
    )  # fmt: skip
    job = next(line for line in out.splitlines() if line.startswith("submitted 2 nodes as job ")).split()[-1]
    assert cluster.wait_for_job(job) == ["COMPLETED", "COMPLETED"]

    with (tmp_path / "study/results/trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    assert [row["state"] for row in trials] == ["complete"] * 4
    best = yaml.safe_load((tmp_path / "study/results/best_params.yaml").read_text())
    assert best["batch_size"] == 4 and 1e-3 <= best["max_lr"] <= 1e-2

    python(
        "autospeed_model.train", "--data", "data", "--config", "study/results/best_params.yaml", "--epochs", "1",
        "--out", "trained", "--no-tensorboard",
    )  # fmt: skip
    assert (tmp_path / "trained/best.pt").is_file()
