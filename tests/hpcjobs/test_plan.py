"""The plan is a pure value: what a submission will run where."""

from __future__ import annotations

from typing import Any

import pytest

from hpcjobs.config import ClusterConfig, ModeSelection, RunConfig, StudyConfig, StudyFile, Uniform
from hpcjobs.errors import UserError
from hpcjobs.plan import Plan, make_plan, split

STUDY = StudyConfig(parameters={"x": Uniform(type="uniform", min=0, max=1)})
SWITCHABLE = ModeSelection(by="constraint", modes=("spx", "dpx", "qpx", "cpx"), default="spx")


def plan(cluster: dict[str, Any] | None, cores: int = 2, **run: Any) -> Plan:
    site = None if cluster is None else ClusterConfig(name="site", **{"cores_per_node": 96, **cluster})
    return make_plan(StudyFile(name="s", study=STUDY, run=RunConfig(**run), cluster=site), local_cores=cores)


@pytest.mark.parametrize(("mode", "workers"), [("spx", 8), ("dpx", 16), ("qpx", 32), ("cpx", 64), (None, 8)])
def test_a_node_is_expected_to_run_one_worker_per_logical_gpu(mode: str | None, workers: int) -> None:
    made = plan({"mode": SWITCHABLE}, nodes=4, mode=mode)
    assert made.mode == (mode or "spx")
    assert (made.workers_per_node, made.workers, made.workers_by_devices) == (workers, 4 * workers, True)
    assert made.cores_per_worker == max(1, 96 // workers)


def test_the_command_line_wins_over_the_profile_and_both_over_the_devices() -> None:
    assert plan({}).workers_by_devices
    assert plan({"workers_per_node": 4}).workers_per_node == 4
    made = plan({"workers_per_node": 4}, workers_per_node=3)
    assert (made.workers_per_node, made.workers_by_devices, made.cores_per_worker) == (3, False, 32)


def test_memory_is_shared_out_only_where_the_site_meters_it() -> None:
    assert plan({"mem_gb_per_node": 480}).mem_gb_per_worker == 60
    assert plan({}).mem_gb_per_worker is None


def test_a_node_without_gpus_runs_one_worker() -> None:
    assert plan({"gpu_vendor": "none", "gpus_per_node": 0}).workers_per_node == 1


@pytest.mark.parametrize(
    ("own", "by", "constraint", "comment"),
    [
        (None, "constraint", "cpx", None),
        ("mi300x", "constraint", "mi300x&cpx", None),
        ("a|b", "constraint", "(a|b)&cpx", None),
        ("mi300x", "comment", "mi300x", "cpx"),
        (None, "comment", None, "cpx"),
    ],
)
def test_a_mode_is_asked_for_beside_the_profiles_own_constraint(
    own: str | None, by: Any, constraint: str | None, comment: str | None
) -> None:
    made = plan({"constraint": own, "mode": ModeSelection(by=by, modes=("spx", "cpx"))}, mode="cpx")
    assert (made.constraint, made.comment) == (constraint, comment)


def test_without_a_mode_the_profiles_constraint_stays() -> None:
    made = plan({"constraint": "mi250"})
    assert (made.mode, made.constraint, made.comment) == (None, "mi250", None)


def test_a_mode_that_the_cluster_does_not_offer_is_refused() -> None:
    with pytest.raises(UserError, match="--mode: found 'cpx'; allowed on cluster site: spx, dpx"):
        plan({"mode": ModeSelection(by="constraint", modes=("spx", "dpx"))}, mode="cpx")
    with pytest.raises(UserError, match="its jobs cannot choose a partition mode; leave --mode out"):
        plan({}, mode="cpx")


def test_arrays_longer_than_the_site_allows_are_split_evenly() -> None:
    assert plan({"max_array_size": 1000}, nodes=2500).arrays == (834, 833, 833)
    assert plan({}, nodes=1).arrays == (1,)


@pytest.mark.parametrize(("nodes", "largest"), [(1, 1), (7, 3), (1000, 1000), (1001, 1000), (5, 1)])
def test_no_part_of_a_split_is_empty_or_too_long(nodes: int, largest: int) -> None:
    parts = split(nodes, largest)
    assert sum(parts) == nodes
    assert len(parts) == -(-nodes // largest)
    assert all(1 <= part <= largest for part in parts)


def test_a_short_job_is_told_of_its_end_in_its_last_quarter() -> None:
    assert plan({"timeout_min": 60, "signal_delay_s": 120}).signal_delay_s == 120
    assert plan({"timeout_min": 1, "signal_delay_s": 120}).signal_delay_s == 15


def test_the_profiles_environment_is_the_workers() -> None:
    assert plan({"environment": {"OMP_NUM_THREADS": "3", "A": "b"}}).environment == {"OMP_NUM_THREADS": "3", "A": "b"}


def test_this_machine_gets_two_cores_a_worker_unless_told() -> None:
    assert plan(None, cores=16).workers_per_node == 8
    assert plan(None, cores=1).workers_per_node == 1
    made = plan(None, cores=16, workers_per_node=3)
    assert (made.workers_per_node, made.cores_per_worker, made.workers_by_devices) == (3, 5, False)
    assert made.cluster is None
    assert made.timeout_min is None


def test_this_machine_is_one_node_in_the_mode_that_it_has() -> None:
    with pytest.raises(UserError, match="--nodes: found 2; allowed: 1 without --cluster"):
        plan(None, nodes=2)
    with pytest.raises(UserError, match="--mode: found 'cpx'; allowed: no mode without --cluster"):
        plan(None, mode="cpx")


def test_several_workers_on_each_logical_gpu_are_planned_for_those_that_are_there() -> None:
    made = plan({"mode": SWITCHABLE, "workers_per_node": 4}, mode="cpx", workers_per_gpu=2)
    assert (made.workers_per_node, made.workers_by_devices, made.workers_per_gpu) == (128, True, 2)


@pytest.mark.parametrize(
    ("cluster", "cores", "run", "found", "most"),
    [
        (None, 2, {"workers_per_node": 999_999}, "--workers: found 999999 workers for this machine", 64),
        (None, 32, {"workers_per_gpu": 513}, "--workers-per-gpu: found 513 workers for this machine", 512),
        ({}, 1, {"workers_per_node": 1537}, "--workers: found 1537 workers for a node of cluster site", 1536),
        ({"workers_per_node": 1537}, 1, {}, "the profile: found 1537 workers for a node of cluster site", 1536),
        ({"cores_per_node": 1}, 1, {"workers_per_gpu": 9}, "--workers-per-gpu: found 72 workers", 64),
    ],
)
def test_more_workers_than_a_node_can_hold_are_refused(
    cluster: dict[str, Any] | None, cores: int, run: dict[str, int], found: str, most: int
) -> None:
    with pytest.raises(UserError, match=f"^{found}.*; allowed: at most {most}, 16 for each of its .*; start fewer"):
        plan(cluster, cores, **run)


def test_eight_workers_on_each_of_the_most_logical_gpus_are_allowed() -> None:
    assert plan({"mode": SWITCHABLE, "cores_per_node": 32}, mode="cpx", workers_per_gpu=8).workers == 512
    assert plan(None, cores=1, workers_per_node=64).workers == 64
