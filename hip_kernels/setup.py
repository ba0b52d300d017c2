"""Builds the wheel `hip-kernels`: the Python files of this folder and the two compiled libraries.

HIP_KERNELS_BACKEND (auto, cpu, cuda, hip) and HIP_KERNELS_ARCHITECTURES (such as "gfx942;gfx90a") choose what is built;
HIP_KERNELS_CMAKE_OPTIONS goes to CMake as it is.
"""

import importlib.util
import os
import shlex
from pathlib import Path

from setuptools import Extension, setup  # type: ignore[import-untyped]
from setuptools.command.build_ext import build_ext  # type: ignore[import-untyped]

HERE = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Hands the one extension to CMake."""

    def build_extension(self, ext: Extension) -> None:
        spec = importlib.util.spec_from_file_location("hip_kernels_build", HERE / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        module.build(
            destination=target,
            work=Path(self.build_temp).resolve(),
            backend=os.environ.get("HIP_KERNELS_BACKEND", "auto"),
            architectures=os.environ.get("HIP_KERNELS_ARCHITECTURES", ""),
            options=shlex.split(os.environ.get("HIP_KERNELS_CMAKE_OPTIONS", "")),
        )


setup(
    packages=["hip_kernels"],
    package_dir={"hip_kernels": "."},
    package_data={"hip_kernels": ["py.typed", "csrc/schemas.inc"]},
    ext_modules=[Extension("hip_kernels._hip_kernels", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
