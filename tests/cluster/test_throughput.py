"""The throughput experiment over the four modes on the emulated cluster.

Its images are invented by the measuring function of tests/hpcjobs/fake_measuring.py; modes, jobs, steps, devices and
cores are those of Slurm and of the emulated GPUs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hpcjobs.throughput_table import ThroughputTable
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import Cluster

FAKES = Path(__file__).parents[1] / "hpcjobs"
MODES = ("spx", "dpx", "qpx", "cpx")


def experiment(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "hpcjobs.throughput", *arguments]
    return cluster.run(*command, cwd=FAKES, timeout_s=1200).stdout


@pytest.mark.slow
def test_four_modes_are_measured_with_fake_images_and_auto_uses_the_table(cluster: Cluster, tmp_path: Path) -> None:
    for node in cluster.nodes:
        cluster.gpus(node).inject(hide_last=1)  # in CPX such nodes show 63
    folder = tmp_path / "an experiment"
    fake = ["--measure", "fake_measuring:measure_fake_images", "--setting", "largest=16"]
    cells = ["--batch-sizes", "8,16,32", "--window-s", "0.5"]
    out = experiment(cluster, "--cluster", "emulated", *fake, *cells, "--folder", str(folder), "--wait")

    table = ThroughputTable.read(folder / "results" / "throughput.json")
    assert {row.setup.mode: row.workers for row in table.rows} == {"spx": 8, "dpx": 16, "qpx": 32, "cpx": 63}
    assert {row.batch_size: row.status for row in table.rows} == {8: "ok", 16: "ok", 32: "oom"}
    for mode in MODES:
        cell = json.loads((folder / "cells" / mode / "auto-00016.json").read_bytes())
        devices = [result["figures"]["device"] for result in cell["results"]]
        assert devices == [str(number) for number in range(cell["workers"])]
    assert re.search(r"│ CPX \(63\) +│", out)
    assert (folder / "results" / "end_to_end.png").exists() and (folder / "results" / "throughput.html").exists()

    # nothing is submitted again for cells that are done
    assert (
        "job" not in experiment(cluster, "--resume", str(folder), "--wait", "--no-charts").split("written")[0].lower()
    )

    study = tmp_path / "study.yaml"
    study.write_text("objective: fake_measuring:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n")
    submit = [sys.executable, "-m", "hpcjobs.submit", "--study", str(study), "--cluster", "emulated", "--mode", "auto"]
    given = ["--throughput-table", str(folder / "results" / "throughput.json"), "--trials", "1000", "--dry-run"]
    shown = cluster.run(*submit, *given, cwd=FAKES).stdout
    assert "mode auto: measured (table emulated): at batch size 8" in " ".join(shown.split())
    assert re.search(r"--constraint=(spx|dpx|qpx|cpx)", shown)


def test_an_experiment_whose_job_is_about_to_end_is_queued_again_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """As before a time limit: Slurm tells the steps alone. What they were measuring then is measured anew."""
    folder = tmp_path / "experiment"
    fake = ["--measure", "fake_measuring:measure_fake_images", "--per-gpu", "1", "--modes", "spx"]
    cells = ["--batch-sizes", "8,16,32", "--window-s", "4"]
    out = experiment(cluster, "--cluster", "emulated", *fake, *cells, "--folder", str(folder))
    job = re.search(r"mode spx: job (\d+)", out)
    assert job is not None
    done = folder / "cells" / "spx"
    wait_until((done / "auto-00008.json").exists, "the first cell", 300)
    cluster.run("scancel", "--signal=USR2", job[1])
    wait_until((done / "auto-00032.json").exists, "the last cell", 300)
    assert [json.loads(path.read_bytes())["status"] for path in sorted(done.iterdir())] == ["ok"] * 3
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job[1]).stdout
