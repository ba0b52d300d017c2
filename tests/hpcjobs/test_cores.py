"""Sharing cores among workers, with topologies written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjobs.cores import Cpu, assign_cores, describe_cpus, format_cpu_list, parse_cpu_list


def machine(cores: int, *, threads: int = 1, numa_nodes: int = 1) -> list[Cpu]:
    """Threads numbered as Linux does: all first threads, then all second ones."""
    return [
        Cpu(thread * cores + core, (0, core), core * numa_nodes // cores)
        for thread in range(threads)
        for core in range(cores)
    ]


def test_cores_come_from_the_numa_node_of_the_gpu() -> None:
    shares = assign_cores([1, 1, 0, 0], machine(8, numa_nodes=2))
    assert shares == [(4, 5), (6, 7), (0, 1), (2, 3)]


def test_both_threads_of_a_core_go_to_one_worker() -> None:
    assert assign_cores([None, None], machine(4, threads=2)) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_mask_with_gaps_is_no_obstacle() -> None:
    cpus = [cpu for cpu in machine(16, numa_nodes=2) if cpu.number % 8 not in (0, 3)]
    shares = assign_cores([0, 0, 0, 1, 1, 1], cpus)
    assert shares == [(1, 2), (4, 5), (6, 7), (9, 10), (12, 13), (14, 15)]


def test_reserved_cpus_take_their_whole_core_out() -> None:
    assert assign_cores([None] * 3, machine(4, threads=2), reserved={4}) == [(1, 5), (2, 6), (3, 7)]


def test_a_worker_whose_numa_node_is_full_gets_cores_from_elsewhere() -> None:
    shares = assign_cores([0, 0, 0, 1], machine(8, numa_nodes=2))
    assert shares == [(0, 1), (2, 3), (6, 7), (4, 5)]


def test_fewer_cores_than_workers_are_shared_within_the_numa_node() -> None:
    shares = assign_cores([0, 0, 0, 1, 1, 1, None], machine(4, numa_nodes=2))
    assert shares == [(0, 1)] * 3 + [(2, 3)] * 3 + [(0, 1, 2, 3)]


def test_a_node_like_lumis_gives_each_worker_seven_whole_cores_of_its_numa_node() -> None:
    cpus = machine(64, threads=2, numa_nodes=4)
    reserved = set(range(0, 64, 8))
    shares = assign_cores([3, 3, 1, 1, 0, 0, 2, 2], cpus, reserved)
    assert [len(share) for share in shares] == [14] * 8
    assert shares[0] == (*range(49, 56), *range(113, 120))


def test_without_a_core_left_nothing_is_bound() -> None:
    assert assign_cores([None, None], machine(1), reserved={0}) == [(), ()]
    assert assign_cores([], machine(4)) == []


@given(
    numa_nodes=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=70),
    numbers=st.sets(st.integers(0, 127)),
    reserved=st.sets(st.integers(0, 127), max_size=10),
)
def test_shares_are_allowed_equal_and_disjoint_when_cores_suffice(
    numa_nodes: list[int | None], numbers: set[int], reserved: set[int]
) -> None:
    cpus = [cpu for cpu in machine(64, threads=2, numa_nodes=4) if cpu.number in numbers]
    shares = assign_cores(numa_nodes, cpus, reserved)
    used = [number for share in shares for number in share]
    assert len(shares) == len(numa_nodes)
    assert set(used) <= numbers - reserved
    core_of = {cpu.number: cpu.core for cpu in cpus}
    free = {cpu.core for cpu in cpus} - {core_of[number] for number in reserved & numbers}
    if len(free) >= len(shares):
        assert len(used) == len(set(used))
        assert {len({core_of[number] for number in share}) for share in shares} == {len(free) // len(shares)}
    elif free:
        assert all(shares)


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_are_written_as_the_kernel_does(numbers: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(numbers)) == sorted(numbers)


def test_cpu_lists_of_the_kernel() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert format_cpu_list([11, 0, 1, 2, 3, 8, 10]) == "0-3,8,10-11"


@pytest.mark.parametrize("text", ["0-3;rm", "3-0", "0-99999999999", "-1", "a", "1,,2"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpu_list(text)


def test_cores_and_numa_nodes_are_read_from_the_kernels_description(tmp_path: Path) -> None:
    for node, cpulist in enumerate(["0,2", "1,3"]):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpulist + "\n")
    for number in range(3):
        folder = tmp_path / "cpu" / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{number % 2}\n")
    cpus = describe_cpus([3, 0, 1, 2], tmp_path)
    assert cpus == [Cpu(0, (0, 0), 0), Cpu(1, (0, 1), 1), Cpu(2, (0, 0), 0), Cpu(3, (-1, 3), 1)]
