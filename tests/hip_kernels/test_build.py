from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from hip_kernels import build
from tests.hip_kernels import debian_rocm

ROOT = Path(__file__).parents[2]
# kept between runs, so that only the first one compiles
CACHE = ROOT / "build" / "hip_kernels-tests"


@pytest.fixture(scope="module")
def cpu_library() -> Path:
    """The folder of the compiled CPU operations."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "lock"):
        assert build.build(CACHE / "cpu", CACHE / "cpu-objects", backend="cpu", jobs=1) == "cpu"
    return CACHE / "cpu"


@pytest.mark.slow
def test_the_compiled_cpu_operations_pass_the_tests_of_the_operations(cpu_library: Path) -> None:
    names = ("deformable_aggregation", "voxelize", "mosaic_augment", "batched_nms", "registration")
    files = [f"tests/hip_kernels/test_{name}.py" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "HIP_KERNELS_LIBRARY": str(cpu_library), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "the messages come from the compiled operations" not in done.stdout  # nothing was left out for lack of them


def test_a_backend_that_was_asked_for_is_never_replaced() -> None:
    assert [build.choose_backend(name) for name in build.BACKENDS] == list(build.BACKENDS)
    with pytest.raises(ValueError, match="backend is 'rocm'; allowed are auto, cpu, cuda, hip"):
        build.choose_backend("rocm")


def test_auto_is_what_pytorch_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for hip, cuda, expected in ((None, None, "cpu"), (None, "13.0", "cuda"), ("7.0", None, "hip")):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert build.choose_backend("auto") == expected


def test_a_backend_without_its_compiler_fails_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no nvcc
    monkeypatch.setenv("CUDACXX", str(tmp_path / "no-nvcc"))
    assert (
        build.main(["--backend", "cuda", "--destination", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 1
    )
    assert "hip_kernels was not built for cuda" in capfd.readouterr().err
    assert not list((tmp_path / "out").glob("*.so"))


def test_what_is_missing_or_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert build.main(["--backend", "cpu", "--work", str(tmp_path / "file" / "work")]) == 1
    assert f"not built for cpu: [Errno 20] Not a directory: '{tmp_path / 'file'}" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    places = ["--destination", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert build.main(["--backend", "cpu", *places]) == 1
    assert "'cmake'; install it, by `pip install cmake ninja`" in capsys.readouterr().err


def test_a_library_that_does_not_load_is_an_error_and_not_the_reference(tmp_path: Path) -> None:
    (tmp_path / "_hip_kernels.so").write_text("not a library")
    done = subprocess.run(
        [sys.executable, "-c", "import hip_kernels"],
        cwd=ROOT,
        env={**os.environ, "HIP_KERNELS_LIBRARY": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "OSError" in done.stderr


@pytest.mark.skipif(bool(debian_rocm.MISSING), reason=f"not installed: {', '.join(debian_rocm.MISSING)}")
def test_a_build_for_amd_that_names_no_architecture_is_for_those_of_the_sites(tmp_path: Path) -> None:
    work = tmp_path / "work"
    options = debian_rocm.cmake_options(debian_rocm.make_root(tmp_path / "root"))
    call = ["cmake", "-S", str(build.PACKAGE), "-B", str(work), "-G", "Unix Makefiles", "-DHIP_KERNELS_BACKEND=hip"]
    subprocess.run([*call, *options], check=True)
    flags = (work / "CMakeFiles" / "hip_kernels.dir" / "flags.make").read_text()
    assert "--offload-arch=gfx942" in flags
    assert "--offload-arch=gfx90a" in flags
