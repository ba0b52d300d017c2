"""The prolog and epilog of slurm/ as slurmd runs them, on emulated MI300X under the real amdsmi package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.configuration import Layout, partition_mode_conf
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import SITE_FILES, Cluster

WHOLE_NODE = ("-N1", "--exclusive", "--gres=gpu:8", "-w", "gpu1")
SHOW = (sys.executable, "-m", "hpcjobs.partition", "show")
BUSY = 30


def wait_for_epilog(cluster: Cluster, node: str = "gpu1") -> None:
    wait_until(lambda: cluster.state_of(node) == "idle", f"the epilog on {node}")


def sets(cluster: Cluster, node: str = "gpu1") -> list[tuple[str, str]]:
    """Job and mode of each successful switch, without repetition over the eight GPUs."""
    return list(dict.fromkeys((call.job, call.asked) for call in cluster.gpus(node).log() if call.answer == 0))


@pytest.mark.parametrize(("mode", "count"), [("spx", 8), ("dpx", 16), ("qpx", 32), ("cpx", 64)])
def test_the_mode_asked_by_constraint_is_set_and_spx_restored(cluster: Cluster, mode: str, count: int) -> None:
    shown = cluster.run("srun", *WHOLE_NODE, f"--constraint={mode}", *SHOW).stdout
    assert shown.splitlines()[0] == f"8 x AMD Instinct MI300X (emulated), {count} logical GPUs"
    wait_for_epilog(cluster)
    assert cluster.gpus("gpu1").modes() == {"SPX"}
    assert [asked for _, asked in sets(cluster)] == ([] if mode == "spx" else [mode.upper(), "SPX"])


def test_the_mode_asked_by_comment_is_set(cluster: Cluster) -> None:
    shown = cluster.run("srun", *WHOLE_NODE, "--comment=qpx", *SHOW).stdout
    assert "partition mode qpx" in shown


def test_every_node_of_a_job_is_switched_before_its_first_step(cluster: Cluster) -> None:
    job = cluster.run(
        "sbatch", "--parsable", "-N4", "--exclusive", "--gres=gpu:8", "-C", "cpx", "-o", f"{cluster.at.folder}/all.out",
        "--wrap", f"srun -l {' '.join(SHOW)} --json",
    ).stdout.strip()  # fmt: skip
    assert cluster.wait_for_job(job) == ["COMPLETED"]
    assert (cluster.at.folder / "all.out").read_text().count('"mode": "cpx"') == 4
    assert all((job, "CPX") in sets(cluster, node) for node in cluster.nodes)


@pytest.mark.parametrize(
    "options",
    [
        ["--comment=cpx;touch /tmp/partition-mode-injected"],
        ["--comment=$(touch /tmp/partition-mode-injected)"],
        ["--comment=cpx\n--default dpx"],
        ["--comment=" + "cpx" * 300],
        ["--constraint=cpx|dpx"],
        ["--comment=tpx"],
    ],
)
def test_what_is_not_allowed_leaves_the_default_mode_and_the_node_in_service(
    cluster: Cluster, options: list[str]
) -> None:
    shown = cluster.run("srun", *WHOLE_NODE, *options, *SHOW).stdout
    assert "partition mode spx" in shown
    assert "no allowed mode in the job's constraint or comment" in cluster.at.mode_log.read_text()
    assert not Path("/tmp/partition-mode-injected").exists()
    wait_for_epilog(cluster)


def test_a_mode_left_behind_does_not_reach_a_job_that_asks_for_none(cluster: Cluster) -> None:
    cluster.gpus("gpu1").inject(**{f"gpu{gpu}": "CPX" for gpu in range(8)})
    assert "partition mode spx" in cluster.run("srun", *WHOLE_NODE, *SHOW).stdout


def test_a_job_with_a_part_of_the_node_switches_nothing(cluster: Cluster) -> None:
    cluster.run("srun", "-w", "gpu1", "--gres=gpu:4", "--constraint=cpx", "true")
    wait_for_epilog(cluster)
    assert cluster.gpus("gpu1").log() == []
    assert cluster.at.mode_log.read_text().count("does not hold all 8 GPUs: the mode stays") == 2


def test_busy_gpus_are_waited_for(cluster: Cluster) -> None:
    cluster.gpus("gpu1").inject(busy=3)
    assert "partition mode cpx" in cluster.run("srun", *WHOLE_NODE, "--constraint=cpx", *SHOW).stdout
    assert [call.answer for call in cluster.gpus("gpu1").log()[:4]] == [BUSY] * 3 + [0]


def test_the_missing_64th_device_is_logged_and_the_rest_is_used(cluster: Cluster) -> None:
    cluster.gpus("gpu1").inject(hide_last=1)
    assert "63 logical GPUs" in cluster.run("srun", *WHOLE_NODE, "--constraint=cpx", *SHOW).stdout
    assert "WARNING 1 logical GPU missing" in cluster.at.mode_log.read_text()


def test_nodes_that_cannot_switch_are_drained_and_the_jobs_run_elsewhere(cluster: Cluster) -> None:
    cluster.gpus("gpu1").inject(no_perm=1)
    cluster.gpus("gpu2").inject(stuck=1)
    options = ["--requeue", "--array=0-1", "--exclusive", "--gres=gpu:8", "-C", "cpx", "-o", "/dev/null"]
    job = cluster.run("sbatch", "--parsable", *options, "--wrap", "sleep 1").stdout.strip()
    wait_until(
        lambda: all("drain" in cluster.state_of(node) for node in ("gpu1", "gpu2")), "gpu1 and gpu2 to be drained"
    )
    log = cluster.at.mode_log.read_text()
    assert "refuses cpx: no permission (NO_PERM)" in log
    assert "reports success for cpx and stays in spx" in log
    assert "JobHeld" not in cluster.run("squeue", "-h", "-o", "%r").stdout
    cluster.wait_for_job(job)
    # one after the other on the same node, where the second was refused late
    runs = [r for r in cluster.sacct(job, "JobID", "NodeList", "State") if r["State"] == "COMPLETED"]
    assert {r["JobID"] for r in runs if r["NodeList"] in ("gpu3", "gpu4")} >= {f"{job}_0", f"{job}_1"}


def test_a_job_without_gpus_switches_nothing_whatever_it_asks_for(cluster: Cluster) -> None:
    cluster.run("srun", "-w", "gpu1", "-n1", "--constraint=cpx", "true")
    wait_for_epilog(cluster)
    assert cluster.gpus("gpu1").log() == []
    assert cluster.at.mode_log.read_text().count("does not hold all 8 GPUs: the mode stays") == 2


def test_a_job_with_the_node_to_itself_holds_its_gpus_without_asking_for_them(cluster: Cluster) -> None:
    cluster.run("srun", "-w", "gpu1", "-N1", "--exclusive", "--constraint=cpx", "true")
    wait_for_epilog(cluster)
    assert [asked for _, asked in sets(cluster)] == ["CPX", "SPX"]


def test_jobs_that_share_a_node_never_switch_it_under_each_other(cluster: Cluster) -> None:
    """The first holds half of the GPUs while the second comes and goes."""
    half = ["-w", "gpu1", "-n1", "-c1", "--gres=gpu:4"]
    first = cluster.run("sbatch", "--parsable", *half, "-C", "spx", "-o", "/dev/null", "--wrap", "sleep 20").stdout
    wait_until(lambda: cluster.run("squeue", "-h", "-t", "R", "-o", "%i").stdout == first, "the first job to run")
    assert "partition mode spx" in cluster.run("srun", *half, "-C", "cpx", *SHOW).stdout
    assert cluster.run("squeue", "-h", "-t", "R", "-o", "%i").stdout == first, "the first was there all the time"
    assert cluster.gpus("gpu1").log() == []


def test_each_part_of_a_heterogeneous_job_gets_its_own_mode(cluster: Cluster) -> None:
    part = ["-N1", "--exclusive", "--gres=gpu:8"]
    out = cluster.run(
        "srun", *part, "-w", "gpu1", "-C", "cpx", *SHOW, ":", *part, "-w", "gpu2", "-C", "qpx", *SHOW
    ).stdout
    assert sorted(line.split(",")[0] for line in out.splitlines() if line.startswith("partition mode")) == [
        "partition mode cpx", "partition mode qpx",
    ]  # fmt: skip
    for node in ("gpu1", "gpu2"):
        wait_for_epilog(cluster, node)
        assert cluster.gpus(node).modes() == {"SPX"}


def test_a_node_whose_epilog_cannot_restore_the_default_is_drained(cluster: Cluster) -> None:
    """As where a process of the job outlives it, or the driver is stuck: nobody gets the node in the wrong mode."""
    stuck = f"printf 'no_perm 1\\n' >> {cluster.at.gpus}/gpu1.state"
    cluster.run("srun", *WHOLE_NODE, "--constraint=cpx", "bash", "-c", stuck)
    wait_until(lambda: "drain" in cluster.state_of("gpu1"), "gpu1 to be drained")
    assert "epilog: ERROR GPU 0000:05:00 refuses spx: no permission (NO_PERM)" in cluster.at.mode_log.read_text()


def test_a_hanging_switch_is_ended(tmp_path: Path, cluster: Cluster) -> None:
    """slurm/partition-mode.sh by itself, with a limit of 1 s against a switch of an hour."""
    at = Layout(tmp_path, "host", 1, 1, 2, 3)
    configuration = partition_mode_conf(at, sys.executable).replace(str(at.rocm), str(cluster.at.rocm))
    script = tmp_path / "partition-mode.sh"
    script.write_bytes((SITE_FILES / "partition-mode.sh").read_bytes())
    script.chmod(0o755)
    (tmp_path / "partition-mode.conf").write_text(configuration.replace("limit_s=240", "limit_s=1"))
    at.logs.mkdir()
    cluster.gpus("gpu1").inject(delay_ms=3_600_000)
    environ = {"SLURMD_NODENAME": "gpu1", "SLURM_JOB_GPUS": "0-7", "SLURM_JOB_CONSTRAINTS": "cpx"}
    done = subprocess.run([script, "prolog"], env=environ, capture_output=True, timeout=600)
    assert done.returncode == 124
    assert "gpu1 job  prolog: ERROR ended after limit_s=1 s" in at.mode_log.read_text()
