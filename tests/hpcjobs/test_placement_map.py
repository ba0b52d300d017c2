"""The map of a node as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from hpcjobs import placement_map
from hpcjobs.cores import Cpu, assign_cores
from hpcjobs.devices import Place
from hpcjobs.logical_gpu import LogicalGpu
from hpcjobs.placement_map import draw, read_map, write_map


def gpu(index: int) -> LogicalGpu:
    part = ("ROCR_VISIBLE_DEVICES", str(index))
    return LogicalGpu(index, index // 8, index % 8, f"0000:{index:02x}", f"GPU-{index // 8}", part, index // 32)


def picture(path: Path, states: dict[int, tuple[str, str]]) -> str:
    console = Console(width=250, record=True, file=(path.parent / "out").open("w"))
    placement = read_map(path)
    assert placement is not None
    console.print(draw(placement, states))
    return console.export_text()


@pytest.fixture
def cpx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CPX node of 63 logical GPUs and 2 x 64 CPUs."""
    cpus = [Cpu(number, (0, number), number // 64) for number in range(128)]
    monkeypatch.setattr(placement_map, "allowed_cpus", lambda: cpus)
    gpus = [gpu(index) for index in range(63)]
    shares = assign_cores([gpu.numa_node for gpu in gpus], cpus)
    places = [Place(f"GPU {gpu.index}", gpu.environment, share) for gpu, share in zip(gpus, shares, strict=True)]
    write_map(tmp_path / "placement.json", "cpx", gpus, places)
    return tmp_path / "placement.json"


def test_every_physical_gpu_is_a_row_and_the_missing_part_is_seen(cpx: Path) -> None:
    text = picture(cpx, {0: ("#", "green"), 62: (".", "cyan")})
    lines = text.splitlines()
    assert lines[0] == "63 logical GPUs, 63 workers, partition mode cpx".join([f"{placement_map.node_name()}: ", ""])
    rows = [line for line in lines if line[:1].isdigit()]
    assert len(rows) == 8
    assert rows[0].split()[:5] == ["0", "0", "#0", "cpu", "0-1"]
    assert rows[7].split()[-1] == "missing"
    assert ".62" in rows[7]


def test_every_cpu_is_one_character_by_numa_node(cpx: Path) -> None:
    lines = [line for line in picture(cpx, {}).splitlines() if line.startswith("NUMA 0") or line.startswith("NUMA 1")]
    assert [line[:7] for line in lines] == ["NUMA 0 ", "NUMA 1 "]
    assert lines[0].split()[-1].startswith("aabbccdd")
    # 126 of 128 CPUs are given away; two stay free for the agent
    assert sum(line.split()[-1].count(".") for line in lines) == 2


def test_workers_that_share_cpus_and_a_node_without_gpus_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_map, "allowed_cpus", lambda: [Cpu(0, (0, 0)), Cpu(1, (0, 1))])
    write_map(tmp_path / "m.json", None, [], [Place(cores=(0,)), Place(cores=(0, 1))])
    assert "*b" in picture(tmp_path / "m.json", {})


def test_there_is_no_map_before_the_agent_has_looked(tmp_path: Path) -> None:
    assert read_map(tmp_path / "nowhere.json") is None
