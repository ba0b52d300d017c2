"""A worker that is not where it should be says why, before it takes a trial."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.failures import EXIT_UNUSABLE
from hpcjobs.heartbeat import read_status
from hpcjobs.logical_gpu import LogicalGpu
from hpcjobs.owners import process_start
from hpcjobs.placement import DeviceList, PlacementError, check_place, kfd_gpus, take_place
from hpcjobs.spec import WorkerSpec

ROCR = "ROCR_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that another test has imported here would be asked for its devices."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def gpu(index: int) -> LogicalGpu:
    bdf = f"0000:{5 + index // 8:02x}:00.{index % 8}"
    return LogicalGpu(index, index // 8, index % 8, bdf, f"GPU-{index // 8}", (ROCR, str(index)))


def cpx_node(folder: Path, gpus: int = 64, kfd: int | None = None) -> None:
    dataclasses.replace(DeviceList.of([gpu(index) for index in range(gpus)]), kfd=kfd).write(folder)


def spec(folder: Path, worker: int = 0, device: int | None = None, **more: Any) -> WorkerSpec:
    number = worker if device is None else device
    return WorkerSpec(
        **{
            "folder": folder, "element": "1_0", "worker": worker, "token": "t", "agent": "a", "agent_pid": os.getpid(),
            "agent_start": process_start(os.getpid()) or "", "status": folder / "status", "control": folder / "control",
            "device": f"GPU {number}", "has_gpu": True, "environment": {ROCR: str(number)}, **more,
        }
    )  # fmt: skip


def test_workers_with_a_device_each_pass(tmp_path: Path) -> None:
    cpx_node(tmp_path)
    for worker in range(64):
        check_place(spec(tmp_path, worker), tmp_path, {ROCR: str(worker)})
    assert len(list(tmp_path.glob("claim_*"))) == 64


def test_a_second_worker_on_a_device_is_refused_and_told_whose_it_is(tmp_path: Path) -> None:
    cpx_node(tmp_path)
    check_place(spec(tmp_path, 3), tmp_path, {ROCR: "3"})
    with pytest.raises(PlacementError, match=rf"belongs to worker 3 \(process {os.getpid()}\)"):
        check_place(spec(tmp_path, 4, device=3), tmp_path, {ROCR: "3"})


def test_workers_share_a_device_only_as_often_as_was_planned(tmp_path: Path) -> None:
    cpx_node(tmp_path)
    for worker in (0, 1):
        check_place(spec(tmp_path, worker, device=5, share=2), tmp_path, {ROCR: "5"})
    with pytest.raises(PlacementError, match=r"worker 0 .* and worker 1"):
        check_place(spec(tmp_path, 2, device=5, share=2), tmp_path, {ROCR: "5"})


def test_a_restarted_worker_takes_its_own_claim_and_that_of_a_dead_process_again(tmp_path: Path) -> None:
    cpx_node(tmp_path)
    check_place(spec(tmp_path, 7), tmp_path, {ROCR: "7"})
    check_place(spec(tmp_path, 7), tmp_path, {ROCR: "7"})
    (claim,) = tmp_path.glob("claim_*")
    claim.write_text(json.dumps({"worker": 9, "pid": 2**22 + 1, "start": "long ago"}))
    check_place(spec(tmp_path, 7), tmp_path, {ROCR: "7"})
    assert json.loads(claim.read_text())["worker"] == 7


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({ROCR: "2", "HIP_VISIBLE_DEVICES": "0"}, "found ROCR_VISIBLE_DEVICES=2 and HIP_VISIBLE_DEVICES=0"),
        ({}, "found none of them"),
        ({ROCR: "0"}, "changed the visible device from ROCR_VISIBLE_DEVICES=2 to ROCR_VISIBLE_DEVICES=0"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "changed the visible device"),
    ],
)
def test_exactly_the_variable_that_was_given_must_be_in_effect(
    tmp_path: Path, environ: dict[str, str], message: str
) -> None:
    cpx_node(tmp_path)
    with pytest.raises(PlacementError, match=message):
        check_place(spec(tmp_path, 2), tmp_path, environ)


def test_device_63_of_a_node_that_shows_63_is_not_there(tmp_path: Path) -> None:
    cpx_node(tmp_path, gpus=63)
    with pytest.raises(PlacementError, match=r"=63 shows 0 of the 63 logical GPUs that this node has \(0 to 62\)"):
        check_place(spec(tmp_path, 63), tmp_path, {ROCR: "63"})


def test_slurms_list_of_eight_is_not_one_device(tmp_path: Path) -> None:
    cpx_node(tmp_path)
    eight = {ROCR: "0,1,2,3,4,5,6,7"}
    with pytest.raises(PlacementError, match="shows 8 of the 64"):
        check_place(spec(tmp_path, environment=eight), tmp_path, eight)


def test_a_mode_that_changes_under_the_job_is_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    cpx_node(tmp_path, kfd=64)
    monkeypatch.setattr("hpcjobs.placement.kfd_gpus", lambda: 8)
    with pytest.raises(PlacementError, match="shows 8 logical GPUs, and showed 64"):
        check_place(spec(tmp_path, 2), tmp_path, {ROCR: "2"})


def test_a_runtime_that_shows_another_number_of_devices_is_believed(tmp_path: Path, monkeypatch: Any) -> None:
    cpx_node(tmp_path)
    monkeypatch.setattr("hpcjobs.placement.runtime_devices", lambda: 0)
    with pytest.raises(PlacementError, match=r"shows 0 devices .* is this a PyTorch build for the GPUs"):
        check_place(spec(tmp_path, 2), tmp_path, {ROCR: "2"})


def test_gpus_are_counted_by_the_drivers_nodes_and_cpus_left_out(tmp_path: Path) -> None:
    for number, gpu_id in enumerate(["0", "0", "51410", "2002"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert kfd_gpus(tmp_path) == 2
    assert kfd_gpus(tmp_path / "no driver") is None


def test_a_cpuset_smaller_than_the_workers_cores_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {cores[0]})
    with pytest.raises(PlacementError, match=f"may use {cores[0]} alone; its step has fewer CPUs"):
        take_place(spec(tmp_path, cores=(cores[0], cores[0] + 1), environment={}))


# ---- with real worker processes: no trial is begun ----


def refused(studies: Any, study: Any, number: int = 0, **told: Any) -> str:
    """Start a worker; returns what it says when it will not work."""
    process = studies.worker(study, number, **told)
    process.wait(timeout=300)
    log = (process.folder / "log").read_text()
    assert process.returncode == EXIT_UNUSABLE, log
    assert {trial.state.name for trial in study.trials()} == {"WAITING"}
    status = read_status(process.folder / f"status_{number:03d}.json")
    assert status is not None and status.message in log
    return status.message


def test_a_worker_whose_objective_shrinks_its_cpu_mask_takes_no_trial(studies: Any) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2:
        pytest.skip("one CPU cannot be made fewer")
    study = studies.create("objective_that_shrinks_the_mask:train")
    assert "importing the objective changed the CPUs of this process" in refused(studies, study, cores=cores)


def test_a_worker_with_two_variables_set_takes_no_trial(studies: Any) -> None:
    environment = {ROCR: "0", "HIP_VISIBLE_DEVICES": "0"}
    study = studies.create("quadratic")
    message = refused(studies, study, has_gpu=True, environment=environment, prepare=cpx_node)
    assert "found ROCR_VISIBLE_DEVICES=0 and HIP_VISIBLE_DEVICES=0" in message


def test_a_worker_for_a_device_that_is_missing_takes_no_trial(studies: Any) -> None:
    def prepare(folder: Path) -> None:
        cpx_node(folder, gpus=63)

    study = studies.create("quadratic")
    message = refused(studies, study, 63, has_gpu=True, environment={ROCR: "63"}, prepare=prepare)
    assert "shows 0 of the 63 logical GPUs" in message


def test_the_second_of_two_workers_on_one_device_takes_no_trial(studies: Any) -> None:
    def prepare(folder: Path) -> None:
        cpx_node(folder)
        check_place(spec(folder, 5, device=0), folder, {ROCR: "0"})

    study = studies.create("quadratic")
    message = refused(studies, study, has_gpu=True, environment={ROCR: "0"}, prepare=prepare)
    assert f"belongs to worker 5 (process {os.getpid()})" in message
