"""Imports go one way (read from the syntax tree, so that an import inside a function counts too)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "hip_kernels": {"hpcjobs", "autospeed_model", "tests", "benchmarks"},
    "autospeed_model": {"hpcjobs", "tests", "benchmarks"},
    "hpcjobs": {"hip_kernels", "autospeed_model", "torch", "tests", "benchmarks"},
}
ENTRIES = {"submit", "status", "collect", "throughput", "doctor", "final", "cancel", "report", "node", "worker"}


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if "build" not in path.parts]
    assert files
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported_modules(path)
        if name.split(".")[0] in FORBIDDEN[package]
    }
    assert not wrong


@pytest.mark.parametrize("module", ["hpcjobs.submit", "hpcjobs.status", "hpcjobs.collect", "hpcjobs.worker"])
def test_a_login_node_without_torch_can_run_the_launcher(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_the_checkout_in_the_current_folder_hides_nothing(tmp_path: Path) -> None:
    """A clone named as the package, in the home folder say, is a folder of that name without ``__init__.py``."""
    (tmp_path / "hpcjobs").symlink_to(ROOT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import hpcjobs.slurm; print(hpcjobs.slurm.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "hpcjobs" / "slurm.py"), done.stderr
