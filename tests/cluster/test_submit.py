"""What submit writes, read by the real sbatch and srun: paths of the nasty kind, and a study queued by hand."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from hpcjobs.budget import count
from hpcjobs.paths import StudyPaths
from hpcjobs.study import open_study
from tests.cluster.emulator import Cluster

ROOT = Path(__file__).parents[2]
NASTY = 'it\'s a "study" é $HOME `id` *?[x]; a&b|c #1 ~'
OBJECTIVE = """\
def train(params, context):
    context.report(0, params["x"])
    return params["x"]
train.parameters = {"x": {"type": "float"}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / NASTY
    folder.mkdir()
    (folder / "my_objective.py").write_text(OBJECTIVE)
    (folder / "search.yaml").write_text(
        "objective: my_objective:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n"
    )
    return folder


def submit(cluster: Cluster, project: Path, *more: str) -> str:
    # the nodes as they are: partition modes have tests of their own
    command = ["-m", "hpcjobs.submit", "--study", "search.yaml", "--cluster", "emulated", "--set", "mode={by: none}"]
    done = cluster.run(sys.executable, *command, "--epochs", "1", "--folder", "my study", *more, cwd=project)
    return done.stdout


def completed(folder: Path) -> int:
    return count(open_study(StudyPaths(folder))).completed


def test_a_study_in_a_folder_with_every_awkward_character_runs_to_its_end(cluster: Cluster, project: Path) -> None:
    out = submit(cluster, project, "--nodes", "2", "--workers", "2", "--trials", "6", "--name", NASTY, "--wait")
    job = next(line for line in out.splitlines() if line.startswith("submitted 2 nodes as job ")).split()[-1]
    assert cluster.wait_for_job(job) == ["COMPLETED", "COMPLETED"]
    folder = project / "my study"
    assert (folder / "results" / "best_params.yaml").is_file()
    assert completed(folder) == 6
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"{job}_0", f"{job}_1"]
    assert f"python -m hpcjobs.status {shlex.quote(str(folder))}" in out


def test_a_prepared_study_runs_from_the_plain_sbatch_file(cluster: Cluster, project: Path) -> None:
    submit(cluster, project, "--workers", "1", "--trials", "2", "--prepare")
    options = ["--parsable", "--gres=gpu:mi300x:8", "--cpus-per-task=64", str(ROOT / "slurm" / "study.sbatch")]
    job = cluster.run("sbatch", *options, "my study", cwd=project, PYTHON=sys.executable).stdout.strip()
    assert cluster.wait_for_job(job) == ["COMPLETED"]
    assert completed(project / "my study") == 2


def test_a_study_that_is_held_in_the_queue_says_so(cluster: Cluster, project: Path) -> None:
    submit(cluster, project, "--nodes", "2", "--workers", "1", "--trials", "2", "--set", "sbatch.hold=true")
    out = cluster.run(sys.executable, "-m", "hpcjobs.status", "my study", "--once", cwd=project).stdout
    assert "2 nodes in Slurm's queue: JobHeldUser" in out


def test_who_waits_for_a_job_whose_setup_fails_is_shown_its_output(cluster: Cluster, project: Path) -> None:
    command = ["-m", "hpcjobs.submit", "--study", "search.yaml", "--cluster", "emulated", "--folder", "my study"]
    setup = ["--set", "mode={by: none}", "--set", "setup=[echo no such module, exit 3]"]
    more = ["--workers", "1", "--trials", "2", "--epochs", "1", "--wait"]
    done = cluster.run(sys.executable, *command, *setup, *more, cwd=project, check=False)
    assert done.returncode == 1
    (output,) = (project / "my study" / "submitit").glob("*_log.out")
    assert f"its output, {output}, ends with: no such module" in done.stdout
