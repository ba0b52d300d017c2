"""A ROCm root made of Debian's packages, enough to compile and link HIP for gfx942 without ROCm or a GPU.

Debian 12 has clang 19, which knows gfx942, and device libraries of ROCm 5.2, which do not name it yet: those of gfx940,
its forerunner, take their place. Debian's own CMake package for the HIP language puts /usr/include in front of the C++
library's headers, so a smaller one stands in.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CLANG = shutil.which("clang++-19")
BITCODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
RUNTIME = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so")
ROCPRIM = Path("/usr/include/rocprim")
MISSING = [
    name
    for name, found in (
        ("clang-19", CLANG),
        ("clang-tools-19", shutil.which("clang-offload-bundler-19")),
        ("lld-19", shutil.which("ld.lld-19")),
        ("rocm-device-libs", BITCODE.exists()),
        ("libamdhip64-dev", RUNTIME.exists()),
        ("librocprim-dev", ROCPRIM.exists()),
    )
    if not found
]
HIP_LANGUAGE = f"""
add_library(hip-lang::amdhip64 SHARED IMPORTED)
set_target_properties(hip-lang::amdhip64 PROPERTIES IMPORTED_LOCATION {RUNTIME})
add_library(hip-lang::device INTERFACE IMPORTED)
set_target_properties(hip-lang::device PROPERTIES INTERFACE_LINK_LIBRARIES hip-lang::amdhip64)
set(_CMAKE_HIP_DEVICE_RUNTIME_TARGET "hip-lang::device")
"""


def make_root(root: Path) -> Path:
    """Lay out the root; returns it."""
    bitcode = root / "amdgcn" / "bitcode"
    if not bitcode.exists():
        shutil.copytree(BITCODE, bitcode)
        shutil.copyfile(bitcode / "oclc_isa_version_940.bc", bitcode / "oclc_isa_version_942.bc")
    package = root / "lib" / "cmake" / "hip-lang"
    package.mkdir(parents=True, exist_ok=True)
    (package / "hip-lang-config.cmake").write_text(HIP_LANGUAGE)
    return root


def cmake_options(root: Path) -> list[str]:
    """What a CMake call needs besides on Debian."""
    return [
        f"-DCMAKE_HIP_COMPILER={CLANG}",
        f"-DCMAKE_HIP_FLAGS=--rocm-device-lib-path={root / 'amdgcn' / 'bitcode'}",
        f"-DCMAKE_HIP_COMPILER_ROCM_ROOT={root}",
        "-DCMAKE_DISABLE_FIND_PACKAGE_rocprim=ON",  # the headers are found without; the package wants all of HIP's
    ]


def assembly(source: Path, architecture: str, root: Path, output: Path) -> str:
    """The device's assembly text of one .hip file. Raises CalledProcessError."""
    assert CLANG is not None
    command = [
        CLANG, "-x", "hip", f"--offload-arch={architecture}", f"--rocm-device-lib-path={root / 'amdgcn' / 'bitcode'}",
        "-std=c++17", "-O3", "--cuda-device-only", "-S", "-o", str(output), str(source),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return output.read_text()
