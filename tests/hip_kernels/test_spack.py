"""The Spack recipes and environments, as far as they can be checked without Spack; see spack_stub.py."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from . import debian_rocm, spack_stub

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "spack" / "spack_repo" / "hpcjobs"
RECIPES = sorted((REPOSITORY / "packages").glob("*/package.py"))
ENVIRONMENTS = sorted((ROOT / "spack" / "environments").glob("*/spack.yaml"))
SPEC = re.compile(r"[a-z0-9-]+(@[\w.:,=-]+)?(\s*[+~][\w]+|\s+\w+=[\w.:-]+)*")


def class_name(folder: str) -> str:
    return "".join(part.capitalize() for part in folder.split("_"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_loads_and_its_directives_make_sense(recipe: Path) -> None:
    module, directives = spack_stub.load(recipe)
    assert hasattr(module, class_name(recipe.parent.name))
    given = {name for name, _, _ in directives}
    assert {"version", "license", "depends_on"} <= given
    variants = {arguments[0] for name, arguments, _ in directives if name == "variant"} | {"rocm", "cuda"}
    for name, arguments, named in directives:
        if name in ("depends_on", "extends"):
            assert SPEC.fullmatch(arguments[0]), arguments[0]
        for used in re.findall(r"(?<![\w-])[+~](\w+)", named.get("when", "")):
            assert used in variants, f"{name}{arguments} is for the unknown variant {used}"


def test_the_launchers_dependencies_are_those_of_the_project() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    _, directives = spack_stub.load(REPOSITORY / "packages" / "py_hpcjobs" / "package.py")
    needed = {arguments[0] for name, arguments, _ in directives if name == "depends_on"}
    for line in setup["options"]["install_requires"].strip().splitlines():
        if line.startswith("#"):
            continue
        name, version = re.fullmatch(r"([\w-]+) >= ([\d.]+)", line).groups()  # type: ignore[union-attr]
        found = [spec for spec in needed if spec.startswith(f"py-{name}@")]
        assert found, f"{name} is missing from the recipe"
        wanted = found[0].split("@")[1].rstrip(":")
        assert version.startswith(wanted) or f"{wanted}.0" == version, (
            f"{name}: {wanted} in the recipe, {version} in setup.cfg"
        )


def test_the_repository_names_itself_as_its_folder() -> None:
    assert yaml.safe_load((REPOSITORY / "repo.yaml").read_text()) == {"repo": {"namespace": "hpcjobs", "api": "v2.0"}}


@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.parent.name)
def test_an_environment_has_one_rocm_version_and_paths_that_exist(path: Path) -> None:
    environment = yaml.safe_load(path.read_text())["spack"]
    assert (path.parent / environment["repos"]["hpcjobs"] / "repo.yaml").exists()
    for developed in environment["develop"].values():
        assert (path.parent / developed["path"] / "setup.cfg").exists()
    names = {recipe.parent.name.replace("_", "-") for recipe in RECIPES}
    assert {spec.split()[0] for spec in environment["specs"]} <= names
    externals = [package for package in environment["packages"].values() if "externals" in package]
    versions = {
        external["spec"].split("@")[1].split("+")[0] for package in externals for external in package["externals"]
    }
    assert len(versions) == (0 if path.parent.name == "generic" else 1)
    assert all(package["buildable"] is False for package in externals)
    assert all(versions.copy().pop() in e["prefix"] for package in externals for e in package["externals"])


def cmake_call(variants: set[str], targets: list[str], prefixes: dict[str, str]) -> list[str]:
    module, _ = spack_stub.load(REPOSITORY / "packages" / "hip_kernels" / "package.py")
    package: Any = module.HipKernels()
    package.spec = spack_stub.Spec(variants, targets, prefixes)
    arguments: list[str] = package.cmake_args()
    assert (ROOT / package.root_cmakelists_dir / "CMakeLists.txt").exists()
    return arguments


def test_the_recipe_asks_cmake_for_the_backend_of_its_variants() -> None:
    assert "-DHIP_KERNELS_BACKEND:STRING=cpu" in cmake_call(set(), [], {})
    cuda = cmake_call({"cuda", "openmp"}, ["90"], {})
    assert {"-DHIP_KERNELS_BACKEND:STRING=cuda", "-DCMAKE_CUDA_ARCHITECTURES:STRING=90"} <= set(cuda)
    torch = cmake_call({"torch"}, [], {})
    assert "-DHIP_KERNELS_TORCH_DESTINATION:STRING=/prefix/lib/python/site-packages/hip_kernels" in torch


@pytest.mark.slow
@pytest.mark.skipif(bool(debian_rocm.MISSING), reason=f"not installed: {', '.join(debian_rocm.MISSING)}")
def test_the_recipes_own_cmake_call_builds_and_installs_for_amd_gpus(tmp_path: Path) -> None:
    root = debian_rocm.make_root(tmp_path / "rocm")
    call = cmake_call({"rocm", "openmp"}, ["gfx942", "gfx90a"], {"hip": str(root)})
    options = [*call, *debian_rocm.cmake_options(root), f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'installed'}"]
    source, work = str(ROOT / "hip_kernels"), str(tmp_path / "work")
    subprocess.run(["cmake", "-S", source, "-B", work, *options], check=True, capture_output=True)
    subprocess.run(
        ["cmake", "--build", work, "--target", "install", "--parallel", "2"], check=True, capture_output=True
    )
    library = tmp_path / "installed" / "lib" / "libhip_kernels.so"
    text = library.read_bytes()
    assert all(f"hipv4-amdgcn-amd-amdhsa--{target}".encode() in text for target in ("gfx942", "gfx90a"))

    # another project finds the package and links with it
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "main.cpp").write_text(
        "#include <kernels.h>\n"
        "int main() { hip_kernels::BatchedNms nothing{}; hip_kernels::cpu::batched_nms(nothing); return 0; }\n"
    )
    (tmp_path / "user" / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(user CXX)\nfind_package(hip_kernels 0.1 REQUIRED)\n"
        "add_executable(user main.cpp)\ntarget_link_libraries(user hip_kernels::hip_kernels)\n"
    )
    build = tmp_path / "user-build"
    prefix = f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}"
    subprocess.run(["cmake", "-S", str(tmp_path / "user"), "-B", str(build), prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build)], check=True, capture_output=True)
    subprocess.run([str(build / "user")], check=True)
