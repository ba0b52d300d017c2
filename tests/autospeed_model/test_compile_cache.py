import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from autospeed_model import compile_cache
from autospeed_model.accelerator import NODE_CACHE, SHARED_CACHE
from autospeed_model.compile_cache import cache_key, first_compilation

# Says when it enters and leaves; the first to enter takes a while.
WORKER = """
import sys, time
from autospeed_model.compile_cache import first_compilation
with first_compilation("key"):
    print("enter", time.time(), flush=True)
    time.sleep(float(sys.argv[1]))
    print("leave", time.time(), flush=True)
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_CACHE, str(tmp_path / "node"))


def start(seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", WORKER, str(seconds)], stdout=subprocess.PIPE, text=True)


def times(process: "subprocess.Popen[str]") -> list[float]:
    output = process.communicate(timeout=60)[0]
    return [float(line.split()[1]) for line in output.splitlines()]


def test_one_process_compiles_and_the_others_go_on_together_when_it_is_done() -> None:
    workers = [start(1.0) for _ in range(3)]
    first, *others = sorted(times(worker) for worker in workers)
    assert all(enter >= first[1] for enter, _ in others)
    latest_enter, earliest_leave = max(enter for enter, _ in others), min(leave for _, leave in others)
    assert latest_enter < earliest_leave


def test_a_process_that_dies_while_compiling_lets_the_next_one_compile() -> None:
    dying = start(60.0)
    assert dying.stdout is not None and dying.stdout.readline().startswith("enter")
    following = start(0.0)
    time.sleep(0.5)
    dying.kill()
    dying.wait()
    assert len(times(following)) == 2


def test_an_error_while_compiling_leaves_no_mark() -> None:
    with pytest.raises(RuntimeError), first_compilation("key"):
        raise RuntimeError
    assert not list(compile_cache.node_cache().glob("*.done"))


def test_a_fresh_node_fills_its_cache_from_the_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_CACHE, str(tmp_path / "shared"))
    loaded = []
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"code", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    with first_compilation("key"):
        pass
    assert [(file.name, file.read_bytes()) for file in (tmp_path / "shared").iterdir()] == [("key.bin", b"code")]
    assert loaded == []
    monkeypatch.setenv(NODE_CACHE, str(tmp_path / "other node"))
    with first_compilation("key"):
        pass
    assert loaded == [b"code"]


def test_the_key_follows_shapes_and_our_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_key(32, "n") == cache_key(32, "n") != cache_key(8, "n")
    before = cache_key(32, "n")
    for name in compile_cache.SOURCES:
        (tmp_path / f"{name}.py").write_text("changed")
    monkeypatch.setattr(compile_cache, "__file__", str(tmp_path / "compile_cache.py"))
    assert cache_key(32, "n") != before
