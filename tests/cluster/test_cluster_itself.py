"""What the other cluster tests rely on."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import submitit

from tests.cluster.daemons import end_abandoned, wait_until
from tests.cluster.emulator import EXAMPLE, Cluster
from tests.test_docs import run

ROOT = Path(__file__).parents[2]


def test_four_nodes_of_eight_gpus_accept_every_mode_as_constraint(cluster: Cluster) -> None:
    text = cluster.run("sinfo", "--noheader", "--Node", "-p", "gpu", "-o", "%N %T %c %G %f").stdout
    expected = [f"gpu{n} idle 64 gpu:mi300x:8 mi300x,spx,dpx,qpx,cpx" for n in range(1, 5)]
    assert [line.strip() for line in text.splitlines()] == expected


def test_a_step_knows_its_node_and_gets_the_gpus_as_rocr_variable_only(cluster: Cluster) -> None:
    text = cluster.run("srun", "-N4", "--exclusive", "--gres=gpu:8", "env").stdout.splitlines()
    assert {line for line in text if line.startswith("SLURMD_NODENAME=")} == {
        f"SLURMD_NODENAME=gpu{n}" for n in range(1, 5)
    }
    assert text.count("ROCR_VISIBLE_DEVICES=0,1,2,3,4,5,6,7") == 4
    assert not [line for line in text if line.startswith(("CUDA_VISIBLE", "HIP_VISIBLE"))]


def test_every_node_has_a_host_name_of_its_own(cluster: Cluster) -> None:
    text = cluster.run("srun", "-N4", "--exclusive", "hostname").stdout
    assert sorted(text.split()) == ["gpu1", "gpu2", "gpu3", "gpu4"]


def test_accounting_shows_jobs_and_steps(cluster: Cluster) -> None:
    job = cluster.run("sbatch", "--parsable", "--wrap", "srun true; srun true").stdout.strip()
    assert cluster.wait_for_job(job) == ["COMPLETED"]
    steps = {record["JobID"]: record["State"] for record in cluster.sacct(job, "JobID", "State")}
    assert steps == {job: "COMPLETED", f"{job}.batch": "COMPLETED", f"{job}.0": "COMPLETED", f"{job}.1": "COMPLETED"}


def start_steps() -> list[str]:
    steps = [
        subprocess.Popen(
            ["srun", "--ntasks=1", "--overlap", "printenv", "SLURMD_NODENAME"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    return [step.communicate()[0].strip() for step in steps]


def test_a_submitit_array_runs_eight_steps_on_each_of_four_nodes(cluster: Cluster, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    executor = submitit.SlurmExecutor(folder=tmp_path)
    executor.update_parameters(time=5, exclusive=True, gres="gpu:8", nodes=1, use_srun=False)
    jobs = executor.map_array(_run_in_job, range(4))
    nodes = [job.result() for job in jobs]
    assert sorted(nodes) == [[f"gpu{n}"] * 8 for n in range(1, 5)]


def _run_in_job(_: int) -> list[str]:
    return start_steps()


def start_job(cluster: Cluster, folder: Path, *options: str) -> str:
    """A job that has begun (Slurm calls it running before slurmd has been told). It ends once ``go`` is there."""
    script = f"touch {folder}/begun; until test -e {folder}/go; do sleep 0.2; done"
    job = cluster.run("sbatch", "--parsable", *options, "--wrap", script).stdout.strip()
    wait_until((folder / "begun").exists, "the job to begin")
    return job


def test_a_killed_slurmd_comes_back_and_its_steps_go_on(cluster: Cluster, tmp_path: Path) -> None:
    job = start_job(cluster, tmp_path, "-w", "gpu2")
    cluster.kill_slurmd("gpu2")
    cluster.start_slurmd("gpu2")
    (tmp_path / "go").touch()
    assert cluster.wait_for_job(job) == ["COMPLETED"]


def test_a_restarted_slurmctld_knows_its_jobs(cluster: Cluster, tmp_path: Path) -> None:
    job = start_job(cluster, tmp_path)
    cluster.restart_slurmctld()
    (tmp_path / "go").touch()
    assert cluster.wait_for_job(job) == ["COMPLETED"]


def test_a_requeued_array_element_runs_again(cluster: Cluster, tmp_path: Path) -> None:
    begun = f"touch {tmp_path}/begun-$SLURM_ARRAY_TASK_ID"
    script = f'test "${{SLURM_RESTART_COUNT:-0}}" = 1 || {{ {begun}; sleep 600; }}'
    job = cluster.run("sbatch", "--parsable", "--requeue", "--array=0-1", "--wrap", script).stdout.strip()
    wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, "both elements to begin")
    for element in (0, 1):
        cluster.run("scontrol", "requeue", f"{job}_{element}")
    wait_until(lambda: not cluster.run("squeue", "-h").stdout, "the second runs to end")
    assert sorted(cluster.wait_for_job(job)) == ["COMPLETED"] * 2 + ["REQUEUED"] * 2


def _links_into(folder: Path, link: Path) -> bool:
    try:
        return folder in link.readlink().parents
    except OSError:
        return False


def test_the_next_cluster_ends_one_whose_owner_was_killed(tmp_path: Path, cluster: Cluster) -> None:
    """The cluster of this session, whose owner lives, is left alone."""
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.emulator", "--nodes=1", f"--folder={tmp_path}"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    wait_until(lambda: "Ctrl-C" in owner.stdout.readline(), "the second cluster to start")
    env = {**os.environ, "SLURM_CONF": str(tmp_path / "etc" / "slurm.conf")}
    subprocess.run(["sbatch", "--wrap", "srun sleep 600"], env=env, check=True, capture_output=True, cwd=tmp_path)
    wait_until(
        lambda: b"R" in subprocess.run(["squeue", "-h", "-o", "%t"], env=env, capture_output=True).stdout, "its job"
    )
    time.sleep(0.5)  # the step starts after the batch script
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    end_abandoned()
    # a cluster that another test process starts just now may be the one that ends it
    wait_until(
        lambda: not [link for link in Path("/proc").glob("[0-9]*/fd/*") if _links_into(tmp_path, link)],
        "the end of the abandoned cluster",
    )
    assert cluster.state_of("gpu1") == "idle"


def test_the_study_that_it_prints_trains_on_the_cpus(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    run(f"set -e\n{EXAMPLE}", tmp_path, **{name: cluster.env[name] for name in ("SLURM_CONF", "ROCM_PATH")})
    table = tmp_path / "runs" / "emulated" / "study" / "results" / "trials.csv"
    assert [trial["state"] for trial in csv.DictReader(table.open(encoding="utf-8"))] == ["complete"] * 4
