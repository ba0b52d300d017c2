"""Modes and logical GPUs through the real ``amdsmi`` package over the emulated library of tests/cluster/amdsmi."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcjobs.logical_gpu import LogicalGpu, NodeDevices
from hpcjobs.partition import restrict
from tests.cluster.amdsmi.library import EmulatedGpus, build

ROOT = Path(__file__).parents[2]
BUSY, NO_PERM = 30, 10

Entry = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("amdsmi") is None or shutil.which("gcc") is None:
        pytest.skip("needs gcc and the package amdsmi: pip install 'hpcjobs[amd]'")
    folder = tmp_path_factory.mktemp("rocm")
    return build(folder, folder / "state")


@pytest.fixture
def gpus(rocm: Path) -> EmulatedGpus:
    gpus = EmulatedGpus(rocm / "state", "local")
    gpus.reset()
    return gpus


@pytest.fixture
def entry(rocm: Path, gpus: EmulatedGpus) -> Entry:
    """``python -m hpcjobs.partition ...`` in a process of its own, since amdsmi binds to one library per process."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "ROCM_PATH": str(rocm), **environ}
        command = [sys.executable, "-m", "hpcjobs.partition", *arguments]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.parametrize(
    ("mode", "count", "memory"), [("spx", 8, 192), ("dpx", 16, 96), ("qpx", 32, 48), ("cpx", 64, 24)]
)
def test_a_mode_is_set_on_every_gpu_and_shown(
    entry: Entry, gpus: EmulatedGpus, mode: str, count: int, memory: int
) -> None:
    done = entry("set", mode.upper() if mode == "dpx" else mode)
    assert (done.returncode, gpus.modes()) == (0, {mode.upper()}), done.stderr
    shown = json.loads(entry("show", "--json").stdout)
    assert (shown["mode"], shown["memory_mode"], shown["missing"]) == (mode, "nps1", 0)
    logical = shown["gpus"]
    assert [gpu["index"] for gpu in logical] == list(range(count))
    assert [gpu["gpu"] for gpu in logical] == [index * 8 // count for index in range(count)]
    assert [gpu["partition_id"] for gpu in logical] == [index % (count // 8) for index in range(count)]
    assert [gpu["numa_node"] for gpu in logical] == [0] * (count // 2) + [1] * (count // 2)
    assert {gpu["memory_gib"] for gpu in logical} == {memory}
    assert [gpu["visible_by"] for gpu in logical] == [["ROCR_VISIBLE_DEVICES", str(i)] for i in range(count)]
    assert len({(gpu["uuid"], gpu["partition_id"]) for gpu in logical}) == count


def test_gpus_that_are_in_the_mode_are_left_alone(entry: Entry, gpus: EmulatedGpus) -> None:
    gpus.inject(gpu2="CPX", gpu5="CPX")
    assert entry("set", "cpx").returncode == 0
    assert [call.gpu for call in gpus.log()] == [0, 1, 3, 4, 6, 7]


def test_busy_is_borne_for_a_while(entry: Entry, gpus: EmulatedGpus) -> None:
    gpus.inject(busy=3)
    done = entry("set", "cpx")
    assert (done.returncode, gpus.modes()) == (0, {"CPX"}), done.stderr
    assert [call.answer for call in gpus.log()] == [BUSY] * 3 + [0] * 8
    pauses = [after.time_s - before.time_s for before, after in zip(gpus.log()[:3], gpus.log()[1:4], strict=True)]
    assert pauses[0] >= 0.25 and pauses[1] >= 0.5 and pauses[2] >= 1.0


def test_busy_for_ever_ends_within_the_patience(entry: Entry, gpus: EmulatedGpus) -> None:
    gpus.inject(busy=1000)
    done = entry("set", "cpx", "--patience=1")
    assert done.returncode == 1
    assert "GPU 0000:05:00 stays busy: a process uses it" in done.stderr
    assert 1 <= len(gpus.log()) <= 3, "at once, after a quarter and after three quarters of a second"


def test_no_permission_is_told_at_once(entry: Entry, gpus: EmulatedGpus) -> None:
    gpus.inject(no_perm=1)
    done = entry("set", "cpx")
    assert done.returncode == 1
    assert "GPU 0000:05:00 refuses cpx: no permission (NO_PERM); it takes root on bare metal" in done.stderr
    assert "Traceback" not in done.stderr
    assert [call.answer for call in gpus.log()] == [NO_PERM]


def test_a_switch_that_changes_nothing_is_found_out(entry: Entry, gpus: EmulatedGpus) -> None:
    gpus.inject(stuck=1)
    done = entry("set", "dpx")
    assert done.returncode == 1
    assert "GPU 0000:05:00 reports success for dpx and stays in spx" in done.stderr
    assert len(gpus.log()) == 3


def test_a_mode_that_the_gpu_lacks_is_told(entry: Entry) -> None:
    done = entry("set", "tpx")
    assert done.returncode == 1
    assert "refuses tpx: not available with its present memory mode, or not at all (SETTING_UNAVAILABLE)" in done.stderr


def test_an_unknown_mode_is_a_users_mistake(entry: Entry, gpus: EmulatedGpus) -> None:
    done = entry("set", "CPX;rm")
    assert done.returncode == 2
    assert done.stderr == "error: MODE: found 'CPX;rm'; allowed: spx, dpx, tpx, qpx, cpx\n"
    assert gpus.log() == []


def test_sixty_three_of_sixty_four_are_used_and_the_missing_one_is_named(entry: Entry, gpus: EmulatedGpus) -> None:
    gpus.inject(hide_last=1)
    assert entry("set", "cpx").returncode == 0
    shown = json.loads(entry("show", "--json").stdout)
    assert (len(shown["gpus"]), shown["missing"], shown["mode"]) == (63, 1, "cpx")
    assert [gpu["index"] for gpu in shown["gpus"]] == list(range(63))
    assert "warning: 1 logical GPU of this mode missing" in entry("show").stdout


def test_gpus_in_different_modes_have_no_common_mode(entry: Entry, gpus: EmulatedGpus) -> None:
    gpus.inject(gpu3="CPX")
    shown = json.loads(entry("show", "--json").stdout)
    assert (shown["mode"], len(shown["gpus"])) == (None, 15)
    assert shown["modes"] == ["spx"] * 3 + ["cpx"] + ["spx"] * 4


def test_without_a_library_it_says_what_to_install(entry: Entry, tmp_path: Path) -> None:
    done = entry("show", ROCM_PATH=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.startswith("no GPU found. AMD: amdsmi finds no libamd_smi.so of its own version; set ROCM_PATH")
    done = entry("set", "cpx", ROCM_PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: amdsmi finds no libamd_smi.so")


def test_a_library_of_another_version_is_told_apart_from_a_bug(entry: Entry, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    empty = tmp_path / "empty.c"
    empty.touch()
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "lib" / "libamd_smi.so", empty], check=True)
    done = entry("set", "cpx", ROCM_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "(AttributeError: " in done.stderr and "Traceback" not in done.stderr


def test_the_plan_names_the_cores_of_each_worker(entry: Entry) -> None:
    done = entry("plan", "--reserved", "9999")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4 + 8
    for wrong in ("a", "7-0", "0-99999999999"):
        told = f"error: --reserved: found '{wrong}'; allowed: CPU numbers such as 0,8-15\n"
        assert entry("plan", "--reserved", wrong, ROCM_PATH="/nowhere").stderr == told


def test_discovery_imports_no_torch() -> None:
    code = (
        "import sys, hpcjobs.partition, hpcjobs.mode_hook; sys.exit('torch' in sys.modules or 'optuna' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def node_of(count: int, each: int) -> NodeDevices:
    gpus = tuple(
        LogicalGpu(i, i // each, i % each, "", f"GPU-{i // each}", ("ROCR_VISIBLE_DEVICES", str(i)))
        for i in range(count * each)
    )
    return NodeDevices("amd", gpus, modes=("spx",) * count)


@pytest.mark.parametrize(
    ("allocated", "expected"),
    [
        ("0,1,2,3,4,5,6,7", 64),
        ("2,3", 16),
        ("0-3", 32),
        ("", 64),
        ("all", 64),
    ],
)
def test_a_job_with_a_part_of_the_node_uses_the_partitions_of_its_gpus_only(allocated: str, expected: int) -> None:
    found = restrict(node_of(8, 8), {"SLURM_JOB_GPUS": allocated}).gpus
    assert len(found) == expected


def test_where_a_cgroup_hides_gpus_the_visible_ones_are_the_jobs() -> None:
    assert len(restrict(node_of(2, 1), {"SLURM_JOB_GPUS": "4,5"}).gpus) == 2
