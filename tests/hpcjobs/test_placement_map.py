"""The map of a node as text."""

from __future__ import annotations

import io
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


def picture(path: Path, states: dict[int, tuple[str, str]], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    placement = read_map(path)
    assert placement is not None
    console.print(draw(placement, states))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[LogicalGpu], cpus: list[Cpu], each: int) -> Path:
    """The map of a node with so many workers on each logical GPU."""
    monkeypatch.setattr(placement_map, "allowed_cpus", lambda: cpus)
    own = gpus * each
    shares = assign_cores([gpu.numa_node for gpu in own], cpus)
    places = [Place(f"GPU {gpu.index}", gpu.environment, share) for gpu, share in zip(own, shares, strict=True)]
    write_map(folder / "placement.json", "cpx", gpus, places)
    return folder / "placement.json"


@pytest.fixture
def cpx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CPX node of 63 logical GPUs and 2 x 64 CPUs."""
    cpus = [Cpu(number, (0, number), number // 64) for number in range(128)]
    return written(tmp_path, monkeypatch, [gpu(index) for index in range(63)], cpus, each=1)


def test_every_physical_gpu_is_a_row_and_the_missing_part_is_seen(cpx: Path) -> None:
    text = picture(cpx, {0: ("#", "green"), 62: (".", "cyan")})
    lines = text.splitlines()
    assert lines[0] == "63 logical GPUs, 63 workers, partition mode cpx".join([f"{placement_map.node_name()}: ", ""])
    rows = [line for line in lines if line[:1].isdigit()]
    assert len(rows) == 8
    assert rows[0].split()[:4] == ["0", "0", "#0", "?1"]
    assert rows[7].split()[-1] == "missing"
    assert rows[7].split()[-2] == ".62"


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("parts", [8, 1])
def test_64_workers_and_256_cpus_are_drawn_unbroken(
    parts: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As eight GPUs of eight parts, and as eight whole ones with eight workers each."""
    cpus = [Cpu(number, (0, number % 128), number % 128 // 64) for number in range(256)]
    gpus = [gpu(index) for index in range(64) if index % 8 < parts]
    path = written(tmp_path, monkeypatch, gpus, cpus, each=8 // parts)
    lines = picture(path, dict.fromkeys(range(64), ("#", "green")), width).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [len(row) for row in rows] == [2 + 8] * 8
    assert sorted(worker for row in rows for worker in row[2:]) == sorted(f"#{number}" for number in range(64))
    numa = [line.split() for line in lines if line.startswith("NUMA")]
    assert [len(row[-1]) for row in numa] == [64] * 4
    assert len(set("".join(row[-1] for row in numa))) == 64, "a letter for each worker"
    assert "#63 / 126-127,254-255" in "\n".join(lines)


def test_every_cpu_is_one_character_by_numa_node(cpx: Path) -> None:
    lines = [line for line in picture(cpx, {}).splitlines() if line.startswith("NUMA")]
    assert [line[:7] for line in lines] == ["NUMA 0 ", "NUMA 1 "]
    assert lines[0].split()[-1].startswith("aabbccdd")
    # 126 of 128 CPUs are given away; two stay free for the agent
    assert sum(line.split()[-1].count(".") for line in lines) == 2


def test_workers_that_share_cpus_and_a_node_without_gpus_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_map, "allowed_cpus", lambda: [Cpu(0, (0, 0)), Cpu(1, (0, 1))])
    write_map(tmp_path / "m.json", None, [], [Place(cores=(0,)), Place(cores=(0, 1))])
    text = picture(tmp_path / "m.json", {1: ("#", "green")})
    assert "*b" in text
    assert text.split()[-6:] == ["?0", "a", "0", "#1", "b", "0-1"]


def test_there_is_no_map_before_the_agent_has_looked(tmp_path: Path) -> None:
    assert read_map(tmp_path / "nowhere.json") is None
