"""Every script of benchmarks/ that is called by its path works in any folder, without an installation."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OURS = ("hpcjobs", "autospeed_model", "hip_kernels", "benchmarks", "tests")
# the two that their own help calls with -m
MODULES = ("cluster_start.py", "kernels.py")
SCRIPTS = [
    path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text() and path.name not in MODULES
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_project_is_on_the_path_before_anything_of_it_is_imported(path: Path) -> None:
    added = False
    for statement in ast.parse(path.read_text()).body:
        added = added or ast.unparse(statement).startswith("sys.path.insert(0, str(")
        named = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
        named += [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        assert added or not [name for name in named if name.split(".")[0] in OURS], ast.unparse(statement)


def test_a_script_runs_elsewhere_without_an_installation(tmp_path: Path) -> None:
    packages = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    done = subprocess.run(  # -S: no editable installation either
        [sys.executable, "-S", str(BENCHMARKS / "choose_workers.py"), "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "--out" in done.stdout, done.stderr
