"""A profile's modules, loaded for real: Debian's lmod and a module tree of our own, as a job's text loads them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpcjobs.config import ClusterConfig, RunConfig, StudyConfig, StudyFile
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import make_plan
from hpcjobs.site import look
from hpcjobs.slurm import job_script

LMOD = Path("/usr/share/lmod/lmod/init/bash")
WITHOUT_LMOD = "needs Debian's lmod: sudo tests/cluster/install-packages.sh"
pytestmark = pytest.mark.skipif(not LMOD.exists(), reason=WITHOUT_LMOD)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules rocm/6.4.1 and, below it as Spack's views are, py-torch/2.9, which needs the first."""
    folder = tmp_path / "modules"
    for name, text in {
        "rocm/6.4.1": 'setenv("ROCM_PATH", "/opt/rocm-6.4.1")\nprepend_path("PATH", "/opt/rocm-6.4.1/bin")\n',
        "py-torch/2.9": 'prereq("rocm")\nprepend_path("PYTHONPATH", "/spack/view/lib/python3/site-packages")\n',
    }.items():
        path = folder / f"{name}.lua"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setenv("MODULEPATH", str(folder))
    monkeypatch.setenv("BASH_ENV", str(LMOD))
    return folder


def setup_lines(modules: tuple[str, ...], folder: Path) -> list[str]:
    """The lines of a job's text that load modules."""
    study = StudyConfig.model_validate({"parameters": {"x": {"type": "uniform", "min": 0, "max": 1}}})
    cluster = ClusterConfig(name="c", cores_per_node=8, modules=modules)
    plan = make_plan(StudyFile(name="s", study=study, run=RunConfig(), cluster=cluster))
    text = job_script(plan, StudyPaths(folder / "study"), 1, folder)
    return [line for line in text.splitlines() if re.match(r"module\b", line)]


def run(lines: list[str], then: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *lines, then])], capture_output=True, text=True, env=os.environ, check=False
    )


def test_a_jobs_text_loads_the_modules_in_their_order(tree: Path, tmp_path: Path) -> None:
    lines = setup_lines(("rocm/6.4.1", "py-torch/2.9"), tmp_path)
    assert lines
    done = run(lines, 'echo "$ROCM_PATH $PYTHONPATH"')
    assert done.stdout.split() == ["/opt/rocm-6.4.1", "/spack/view/lib/python3/site-packages"], done.stderr


def test_a_module_that_is_missing_ends_the_job_with_lmods_own_words(tree: Path, tmp_path: Path) -> None:
    done = run(setup_lines(("rocm/9.9",), tmp_path), "echo never")
    assert "never" not in done.stdout
    assert "rocm/9.9" in done.stderr


def test_the_doctor_names_modules_of_interest(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "profile"
    profile.write_text(f". {LMOD}\nexport MODULEPATH={tree}\n")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bash_profile").write_text(f". {profile}\n")
    monkeypatch.setenv("HOME", str(home))
    found = look()
    assert found.modules
    assert "rocm/6.4.1" in found.gpu_modules
