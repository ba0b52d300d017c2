"""A profile's modules in a real job: Debian's lmod, and a module tree of our own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.emulator import Cluster
from tests.hpcjobs.test_modules import LMOD, WITHOUT_LMOD

pytestmark = pytest.mark.skipif(not LMOD.exists(), reason=WITHOUT_LMOD)

OBJECTIVE = """\
import os

def train(params, context):
    return float(os.environ["DEPTH_OF_THE_MODULE"])
"""


def test_workers_run_with_the_modules_of_the_profile(cluster: Cluster, tmp_path: Path) -> None:
    module = tmp_path / "modules" / "ocean" / "1.2.lua"
    module.parent.mkdir(parents=True)
    module.write_text('setenv("DEPTH_OF_THE_MODULE", "11034")\n')
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    (tmp_path / "search.yaml").write_text("objective: mine:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n")

    def submit(name: str, folder: str) -> str:
        settings = ["--set", f"modules=[{name}]", "--set", "mode={by: none}", "--workers", "1", "--trials", "2"]
        command = ["-m", "hpcjobs.submit", "--study", "search.yaml", "--cluster", "emulated", *settings, "--wait"]
        tree = str(tmp_path / "modules")
        done = cluster.run(
            sys.executable, *command, "--folder", folder, cwd=tmp_path, check=False, MODULEPATH=tree
        )  # fmt: skip
        return done.stdout + done.stderr

    out = submit("ocean/1.2", "study")
    assert "2 of 2 trials have ended" in out
    assert "11034" in (tmp_path / "study" / "results" / "summary.json").read_text()
    submit("ocean/9.9", "other")
    (errors,) = (tmp_path / "other" / "submitit").glob("*_log.err")
    assert "hpcjobs: module load ocean/9.9 failed" in errors.read_text()
