"""The doctor in a job of two nodes: a step on the other node tries the lock that this one holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.cluster.emulator import Cluster


def test_the_doctor_tries_a_lock_from_a_second_node(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("version: 1\n")
    doctor = f"{sys.executable} -m hpcjobs.doctor '{tmp_path}' --json"
    job = cluster.run(
        "sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--exclusive", "-o", f"{tmp_path}/found.json",
        "--wrap", f"srun -N1 -n1 --overlap {doctor}",
    ).stdout.strip()  # fmt: skip
    assert cluster.wait_for_job(job) == ["COMPLETED"], (tmp_path / "found.json").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    # the emulated nodes share one kernel: what is seen is that the step ran on another node, not what a site's does
    assert (found["flock_between_nodes"], found["lock"]) == (True, "kernel")
    assert job in found["reason"]
    kept = json.loads((tmp_path / "journal.locking").read_text())
    assert (kept["lock"], kept["reason"]) == ("kernel", found["reason"])
    steps = {record["JobID"]: record["NodeList"] for record in cluster.sacct(job, "JobID", "NodeList")}
    assert {steps[f"{job}.0"], steps[f"{job}.1"]} == {"gpu1", "gpu2"}
