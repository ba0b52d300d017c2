"""Just enough of Spack's package API (v2) to load the recipes: directives are recorded, unknown names are errors.

Spack is not on PyPI, so the recipes cannot be concretised in these tests. What can be checked: syntax, imports, the
names of directives, specs that parse, and what `cmake_args` answers.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

DIRECTIVES = ("version", "variant", "depends_on", "conflicts", "requires", "extends", "license", "maintainers", "patch")
recorded: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
contexts: list[str] = []


def _directive(name: str) -> Callable[..., None]:
    def record(*arguments: Any, **named: Any) -> None:
        if contexts:
            named["when"] = " ".join([*contexts, named.get("when", "")]).strip()
        recorded.append((name, arguments, named))

    return record


@contextmanager
def when(condition: str) -> Iterator[None]:
    contexts.append(condition)
    yield
    contexts.pop()


@contextmanager
def default_args(**_: Any) -> Iterator[None]:
    yield


def run_after(_phase: str, **_named: Any) -> Callable[[Any], Any]:
    return lambda function: function


class PackageBase:
    spec: Any

    def define(self, name: str, value: Any) -> str:
        if isinstance(value, bool):
            return f"-D{name}:BOOL={'ON' if value else 'OFF'}"
        return f"-D{name}:STRING={';'.join(value) if isinstance(value, (list, tuple)) else value}"

    def define_from_variant(self, name: str, variant: str) -> str:
        return self.define(name, self.spec.satisfies(f"+{variant}"))


class CMakePackage(PackageBase):
    pass


class PythonPackage(PackageBase):
    pass


class CMakeBuilder:
    @staticmethod
    def define_hip_architectures(package: PackageBase) -> str:
        return package.define("CMAKE_HIP_ARCHITECTURES", package.spec.targets)

    @staticmethod
    def define_cuda_architectures(package: PackageBase) -> str:
        return package.define("CMAKE_CUDA_ARCHITECTURES", package.spec.targets)


class CudaPackage(PackageBase):
    cuda_arch_values = ("80", "90")


class ROCmPackage(PackageBase):
    amdgpu_targets = ("gfx90a", "gfx942")


class Spec:
    """A concrete spec: the variants that are on, external prefixes, GPU architectures."""

    def __init__(self, on: set[str], targets: list[str], prefixes: dict[str, str]) -> None:
        self.on, self.targets, self.prefixes = on, targets, prefixes

    def satisfies(self, condition: str) -> bool:
        sign, name = re.fullmatch(r"([+~])(\w+)", condition).groups()  # type: ignore[union-attr]
        return (name in self.on) == (sign == "+")

    def __getitem__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(prefix=self.prefixes[name])


def load(recipe: Path) -> tuple[ModuleType, list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """The recipe's module and the directives that it gave. Raises what the recipe raises."""
    api: dict[str, Any] = {name: _directive(name) for name in DIRECTIVES}
    api |= {"when": when, "default_args": default_args, "run_after": run_after, "PackageBase": PackageBase}
    api |= {"join_path": lambda *parts: "/".join(parts), "remove_linked_tree": lambda path: None}
    api |= {"python": SimpleNamespace(path=sys.executable), "python_platlib": "/prefix/lib/python/site-packages"}
    systems = {
        "cmake": {"CMakePackage": CMakePackage, "CMakeBuilder": CMakeBuilder},
        "cuda": {"CudaPackage": CudaPackage},
        "rocm": {"ROCmPackage": ROCmPackage},
        "python": {"PythonPackage": PythonPackage},
    }
    modules = {"spack": {}, "spack.package": api, "spack_repo": {}, "spack_repo.builtin": {}}
    modules["spack_repo.builtin.build_systems"] = {}
    modules |= {f"spack_repo.builtin.build_systems.{name}": content for name, content in systems.items()}
    before = {name: sys.modules.get(name) for name in modules}
    try:
        for name, content in modules.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            sys.modules[name] = module
        recorded.clear()
        spec = importlib.util.spec_from_file_location(f"recipe_{recipe.parent.name}", recipe)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded, list(recorded)
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
