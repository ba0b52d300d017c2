"""Build the compiled operations: ``python -m hip_kernels.build``.

CMake does the work (see ``CMakeLists.txt``); this module chooses the backend and puts the two shared libraries beside
the package, where :mod:`hip_kernels` looks for them. ``setup.py`` calls the same function.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BACKENDS = ("cpu", "cuda", "hip")
PACKAGE = Path(__file__).resolve().parent


def choose_backend(asked: str = "auto") -> str:
    """The backend to build: the one asked for, or that of the installed PyTorch.

    Raises ``ValueError`` for an unknown name. A backend that was asked for is never replaced by another one: when its
    compiler is missing, CMake fails.
    """
    if asked in BACKENDS:
        return asked
    if asked != "auto":
        raise ValueError(f"backend is {asked!r}; allowed are auto, {', '.join(BACKENDS)}")
    import torch

    return "hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def build(
    destination: Path,
    work: Path,
    backend: str = "auto",
    architectures: str = "",
    jobs: int = 0,
    options: Sequence[str] = (),
) -> str:
    """Configure, compile and copy ``_hip_kernels.so`` and its kernel library to ``destination``. Returns the backend.

    ``architectures`` is CMake's list (``gfx942;gfx90a``, ``90``), ``work`` keeps the object files between builds.
    Raises ``subprocess.CalledProcessError`` when a step fails.
    """
    backend = choose_backend(backend)
    work.mkdir(parents=True, exist_ok=True)
    destination.mkdir(parents=True, exist_ok=True)
    configure = [
        "cmake", "-S", str(PACKAGE), "-B", str(work),
        f"-DHIP_KERNELS_BACKEND={backend}",
        "-DHIP_KERNELS_TORCH=ON",
        f"-DHIP_KERNELS_TORCH_DESTINATION={destination}",
        f"-DPython3_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    if shutil.which("ninja") and not (work / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    if architectures and backend != "cpu":
        configure.append(f"-DCMAKE_{backend.upper()}_ARCHITECTURES={architectures}")
    subprocess.run([*configure, *options], check=True)
    # on a machine shared with others every core is rarely ours
    count = jobs or int(os.environ.get("MAX_JOBS", "0")) or min(len(os.sched_getaffinity(0)), 8)
    subprocess.run(["cmake", "--build", str(work), "--parallel", str(count)], check=True)
    for library in ("_hip_kernels.so", "libhip_kernels.so.0"):
        partial = destination / f"{library}.partial"
        shutil.copyfile((work / library).resolve(), partial)
        partial.replace(destination / library)
    return backend


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hip_kernels.build",
        description="Compile the operations of hip_kernels for the installed PyTorch, or for the\nbackend named.",
        epilog="examples:\n  python -m hip_kernels.build\n"
        "  python -m hip_kernels.build --backend hip --architectures 'gfx942;gfx90a'   (on a login node without a GPU)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend", choices=("auto", *BACKENDS), default="auto", help="default: what PyTorch is built for"
    )
    parser.add_argument("--architectures", default="", help="GPU architectures, separated by semicolons")
    parser.add_argument(
        "--destination", type=Path, default=PACKAGE, help="folder of the libraries (default: the package)"
    )
    parser.add_argument(
        "--work", type=Path, default=None, help="folder of the object files (default: build/hip_kernels-BACKEND)"
    )
    parser.add_argument("--jobs", type=int, default=0, help="compilations side by side (default: MAX_JOBS, or up to 8)")
    parser.add_argument("options", nargs="*", help="further options for cmake, after --")
    chosen = parser.parse_args(arguments)
    backend = choose_backend(chosen.backend)
    work = chosen.work or Path("build") / f"hip_kernels-{backend}"
    try:
        build(chosen.destination.resolve(), work, backend, chosen.architectures, chosen.jobs, chosen.options)
    except (subprocess.CalledProcessError, OSError) as error:
        missing = isinstance(error, FileNotFoundError) and error.filename == "cmake"
        remedy = "; install it, by `pip install cmake ninja` say" if missing else ""
        print(f"hip_kernels was not built for {backend}: {error}{remedy}", file=sys.stderr)
        return 1
    print(f"hip_kernels is built for {backend} in {chosen.destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
