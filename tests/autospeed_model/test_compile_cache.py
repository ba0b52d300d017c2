import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from autospeed_model import compile_cache
from autospeed_model.accelerator import NODE_CACHE, SHARED_CACHE
from autospeed_model.compile_cache import cache_key, compiled, first_compilation
from tests.cluster.daemons import wait_until

# Says that it is there and that it has entered; begins and leaves when it is told to.
WORKER = """
import sys, time
from pathlib import Path
from autospeed_model.compile_cache import first_compilation
folder, name = Path(sys.argv[1]), sys.argv[2]
def wait_for(file):
    while not (folder / file).exists():
        time.sleep(0.02)
(folder / f"ready {name}").touch()
wait_for("begin")
with first_compilation("key"):
    (folder / f"entered {name}").touch()
    wait_for(f"leave {name}")
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_CACHE, str(tmp_path / "node"))
    monkeypatch.setattr(compile_cache, "_made", {})


class Counting(nn.Module):
    """Has a weight and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return (x * self.weight).sin()


def apply(module: Counting, x: torch.Tensor) -> torch.Tensor:
    return module(x).sum()  # type: ignore[no-any-return]


def use(key: str = "key") -> None:
    """Compiled or loaded, values, gradients and changed buffers are right, in and after the context."""
    compile_cache._made.clear()  # as in a new process
    module, x = Counting(), torch.linspace(0, 1, 7)
    with compiled(apply, (module, x), key) as code:
        found = code(module, x)
        found.backward()
    assert module.weight.grad is not None
    torch.testing.assert_close(found, (3 * x).sin().sum())
    torch.testing.assert_close(module.weight.grad, (x * (3 * x).cos()).sum())
    with compiled(apply, (module, x), key) as code:
        torch.testing.assert_close(code(module, 2 * x), (6 * x).sin().sum())
    assert module.calls == 2


def refuse_to_compile(*_: object, **__: object) -> None:
    pytest.fail("compiled again")


def test_what_was_compiled_is_loaded_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    use()
    monkeypatch.setattr(torch, "compile", refuse_to_compile)
    use()


def test_code_that_cannot_be_loaded_is_compiled_anew(caplog: pytest.LogCaptureFixture) -> None:
    use()
    (file,) = compile_cache.node_cache().glob("*.code")
    file.write_bytes(b"damaged")
    use()
    assert f"{file}: cannot be loaded, so it is compiled anew" in caplog.text
    assert file.stat().st_size > 100


def test_a_fresh_node_loads_what_another_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_CACHE, str(tmp_path / "shared"))
    use()
    monkeypatch.setenv(NODE_CACHE, str(tmp_path / "other node"))
    monkeypatch.setattr(torch, "compile", refuse_to_compile)
    use()
    assert [file.name for file in (tmp_path / "other node").glob("*/*.code")] == ["key.code"]


def test_code_that_cannot_be_kept_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shared").touch()
    monkeypatch.setenv(SHARED_CACHE, str(tmp_path / "shared"))
    use()
    assert f"{tmp_path / 'shared'}: of no use for compiled code" in caplog.text


class Written:
    """Stands for compiled code."""

    def save_compiled_function(self, path: str) -> None:
        Path(path).write_text("whole")

    def __call__(self) -> str:
        return "called"


def use_written() -> None:
    compile_cache._made.clear()  # as in a new process
    with compiled(apply, (), "key") as code:
        assert code() == "called"


NEW, OLD = "0" * 20, "1" * 20


def code_of(release: str, key: str, age_s: float = 0.0, size: int = 1) -> Path:
    """A file of compiled code on the node, last used so long ago."""
    file = compile_cache.node_cache().parent / release / f"{key}.code"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"x" * size)
    used = time.time() - age_s
    os.utime(file, (used, used))
    return file


@pytest.mark.parametrize("source", ["compiled", "shared"])
def test_new_code_takes_the_place_of_what_was_long_unused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())
    if source == "shared":
        monkeypatch.setenv(SHARED_CACHE, str(tmp_path / "shared"))
        compile_cache._ahead_of_time(apply, (), NEW)
        (compile_cache.node_cache() / f"{NEW}.code").unlink()
        monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda stream: stream.read)
    long = compile_cache.UNUSED_SECONDS + 60
    gone = [code_of(release, OLD, long) for release in ("torch-2.0", compile_cache.node_cache().name)]
    kept = [code_of("torch-2.0", "2" * 20, long - 120), code_of("torch-2.0", "not ours", long)]
    assert compile_cache._ahead_of_time(apply, (), NEW) is not None
    assert not [file for file in gone if file.exists()]
    assert all(file.exists() for file in (*kept, compile_cache.node_cache() / f"{NEW}.code"))


def test_the_longest_unused_code_goes_when_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 250)
    files = [code_of("torch-2.0", str(number) * 20, age_s=100.0 * number, size=100) for number in (3, 1, 2)]
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda stream: stream.read)
    used = code_of(compile_cache.node_cache().name, "4" * 20, age_s=1000.0, size=100)
    assert compile_cache._ahead_of_time(apply, (), "4" * 20) is not None, "loaded, so used now"
    assert all(file.exists() for file in files), "nothing new was written"
    assert compile_cache._ahead_of_time(apply, (), NEW) is not None
    assert [file.exists() for file in (*files, used)] == [False, True, False, True]


def shared_file(folder: Path, name: str, age_s: float = 0.0) -> Path:
    """A file of 100 bytes in the shared folder, last used so long ago."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / name
    file.write_bytes(b"x" * 100)
    used = time.time() - age_s
    os.utime(file, (used, used))
    return file


@pytest.mark.parametrize("kind", ["code", "bin"])
def test_the_shared_folder_is_bounded_by_disuse_as_the_node_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"x" * 100, None))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda stream: stream.read)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: content)
    shared, long = tmp_path / "shared", compile_cache.UNUSED_SECONDS + 60
    monkeypatch.setenv(SHARED_CACHE, str(shared))
    gone = [shared_file(shared, f"{OLD}.{one}", long) for one in ("code", "bin")]
    kept = [shared_file(shared, name, long) for name in ("results.code", f"{OLD}.csv", f"{OLD}0.bin")]
    kept += [shared_file(shared, f"{'2' * 20}.code", long - 120)]
    used = shared_file(shared, f"{'3' * 20}.{kind}", long)

    def need(key: str) -> None:
        """On a node that has nothing yet."""
        monkeypatch.setenv(NODE_CACHE, str(tmp_path / f"node {key}"))
        if kind == "code":
            assert compile_cache._ahead_of_time(apply, (), key) is not None
        else:
            with first_compilation(key):
                pass

    need("3" * 20)
    assert all(file.exists() for file in (*gone, *kept, used)), "nothing new was written there"
    need(NEW)
    new = shared / f"{NEW}.{kind}"
    assert not [file for file in gone if file.exists()]
    assert all(file.exists() for file in (*kept, used, new)), "what a node has just taken is in use"

    counted = [kept[3], used, new, new]  # the next one is as large
    monkeypatch.setattr(compile_cache, "MOST_BYTES", sum(file.stat().st_size for file in counted) - 1)
    need("4" * 20)
    assert [file.exists() for file in (*kept[:3], used, new, kept[3])] == [True] * 5 + [False]


def test_shared_code_that_another_node_removes_while_it_is_read_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = shared_file(tmp_path / "shared", f"{NEW}.code")
    monkeypatch.setenv(SHARED_CACHE, str(shared.parent))
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())

    def gone(stream: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # what NFS says of a file that another node has removed

    monkeypatch.setattr(torch.compiler, "load_compiled_function", gone)
    code = compile_cache._ahead_of_time(apply, (), NEW)
    assert code is not None and code() == "called"
    assert f"{shared}: cannot be loaded, so it is compiled anew" in caplog.text
    assert shared.read_text() == "whole"


def test_old_code_that_cannot_be_removed_or_is_being_loaded_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())
    loading = code_of("torch-2.0", OLD, compile_cache.UNUSED_SECONDS + 60, size=7)
    with loading.open("rb") as stream:
        assert compile_cache._ahead_of_time(apply, (), NEW) is not None
        assert not loading.exists()
        assert stream.read() == b"x" * 7
    folder = code_of("torch-2.0", "not ours").with_name(f"{OLD}.code")
    folder.mkdir()
    os.utime(folder, (0, 0))
    assert compile_cache._ahead_of_time(apply, (), "2" * 20) is not None
    assert "old compiled code cannot be removed" in caplog.text


def test_a_shared_file_that_cannot_be_read_or_replaced_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())
    monkeypatch.setenv(SHARED_CACHE, str(tmp_path / "shared"))
    for kind in ("code", "bin"):
        (tmp_path / "shared" / f"key.{kind}").mkdir(parents=True, mode=0o700)
    (tmp_path / "shared").chmod(0o700)
    use_written()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"code", None))
    with first_compilation("key"):
        pass
    for kind in ("code", "bin"):
        assert f"key.{kind}: of no use for compiled code" in caplog.text
    assert sorted(file.name for file in (tmp_path / "shared").iterdir()) == ["key.bin", "key.code"]


def test_what_killed_processes_left_of_a_file_is_removed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())
    file = compile_cache.node_cache() / "key.code"
    killed = compile_cache._new(file)
    killed.__enter__().write_text("half")
    (left,) = file.parent.glob(".key.code.*/*")
    use_written()
    assert not left.parent.exists() and file.read_text() == "whole"


def test_a_cache_that_is_emptied_while_something_compiles_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_slowly(*_: object) -> Written:
        shutil.rmtree(compile_cache.node_cache())
        return Written()

    monkeypatch.setattr(compile_cache, "_compile", compile_slowly)
    use_written()
    with first_compilation("key"):
        shutil.rmtree(compile_cache.node_cache())
    for kind in ("code", "done"):
        assert f"key.{kind}: of no use for compiled code" in caplog.text


def test_code_that_cannot_be_written_to_a_file_is_used_and_others_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unwritten(Written):
        def save_compiled_function(self, path: str) -> None:
            raise TypeError(f"cannot pickle for {path}")

    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Unwritten())
    use_written()
    assert "cannot pickle" in caplog.text
    assert compile_cache._ahead_of_time(apply, (), "key") is None


def test_a_refusal_is_asked_about_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: Written())
    mark = compile_cache.node_cache() / "key.refused"
    mark.touch()
    assert compile_cache._ahead_of_time(apply, (), "key") is None
    past = mark.stat().st_mtime - compile_cache.REFUSAL_SECONDS - 1
    os.utime(mark, (past, past))
    use_written()


@pytest.mark.parametrize("reason", ["refused", "absent"])
def test_where_nothing_compiles_ahead_of_time_each_process_traces(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("a PyTorch that cannot")

    if reason == "refused":
        monkeypatch.setattr(compile_cache, "_compile", refuse)
    else:
        monkeypatch.setattr(compile_cache, "_can_compile_ahead_of_time", lambda: False)
    use()
    use()  # asks PyTorch no second time
    assert caplog.text.count("a PyTorch that cannot") == (1 if reason == "refused" else 0)
    assert [file.suffix for file in compile_cache.node_cache().glob("key.*")].count(".done") == 1
    assert not list(compile_cache.node_cache().glob("*.code"))


def start(folder: Path, names: str) -> "list[subprocess.Popen[bytes]]":
    """One process for each letter; all are there when this returns."""
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(folder), name]) for name in names]
    wait_until(lambda: all((folder / f"ready {name}").exists() for name in names), f"{names} to be ready")
    return workers


def entered(folder: Path) -> set[str]:
    return {file.name.removeprefix("entered ") for file in folder.glob("entered *")}


def test_one_process_compiles_and_the_others_go_on_together_when_it_is_done(tmp_path: Path) -> None:
    workers = start(tmp_path, "abc")
    (tmp_path / "begin").touch()
    wait_until(lambda: bool(entered(tmp_path)), "the first to enter")
    time.sleep(0.5)
    (first,) = entered(tmp_path)
    (tmp_path / f"leave {first}").touch()
    wait_until(lambda: entered(tmp_path) == set("abc"), "the others to enter, none of which has left")
    for name in "abc":
        (tmp_path / f"leave {name}").touch()
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0, 0]


def test_a_process_that_dies_while_compiling_lets_the_next_one_compile(tmp_path: Path) -> None:
    (tmp_path / "begin").touch()
    (dying,) = start(tmp_path, "d")
    wait_until(lambda: entered(tmp_path) == {"d"}, "the first to enter")
    (following,) = start(tmp_path, "f")
    (tmp_path / "leave f").touch()
    time.sleep(0.5)
    assert entered(tmp_path) == {"d"}
    dying.kill()
    dying.wait()
    assert following.wait(timeout=300) == 0
    assert entered(tmp_path) == set("df")


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
