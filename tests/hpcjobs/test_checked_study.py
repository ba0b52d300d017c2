"""What the agent hands to its workers in place of study.yaml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcjobs.checked_study import read_checked, write_checked
from hpcjobs.config import StudyFile
from hpcjobs.sampling import distribution

PARAMETERS = {
    "a": {"type": "uniform", "min": 0.5, "max": 1.0},
    "b": {"type": "loguniform", "min": 1e-6, "max": 1e-4},
    "c": {"type": "int", "min": 2, "max": 10, "step": 4},
    "d": {"type": "int", "min": 1, "max": 64, "log": True},
    "e": {"type": "categorical", "values": [2, 0.5, "été", True, None]},
}


def study(**run: Any) -> StudyFile:
    searched = {"parameters": PARAMETERS, "fixed": {"batch_size": 8}, "halve_on_gpu_memory": ["batch_size"]}
    named = {"sampler": {"name": "tpe", "options": {"n_startup_trials": 3}}, "seed": 7, "retries": 1}
    return StudyFile.model_validate({"name": "s", "study": {**searched, **named}, "run": run, "defaults": {"lr": 1e-3}})


def test_workers_read_what_was_written(tmp_path: Path) -> None:
    file = study(data=Path("/données"), working_folder=Path("/w"), nodes=3)
    write_checked(file, tmp_path)
    found = read_checked(tmp_path)
    assert vars(found.run) == dict(file.run)
    assert (found.name, found.defaults, found.cluster) == (file.name, file.defaults, None)
    lists = {"parameters", "sampler", "pruner", "halve_on_gpu_memory"}
    assert {k: v for k, v in vars(found.study).items() if k not in lists} == {
        k: v for k, v in dict(file.study).items() if k not in lists
    }
    assert list(found.study.halve_on_gpu_memory) == ["batch_size"]
    assert vars(found.study.sampler) == dict(file.study.sampler)
    assert vars(found.study.pruner) == dict(file.study.pruner)


def test_workers_search_what_the_study_says(tmp_path: Path) -> None:
    file = study()
    write_checked(file, tmp_path)
    searched = read_checked(tmp_path).study.parameters
    assert list(searched) == list(file.study.parameters)
    for name, space in file.study.parameters.items():
        assert distribution(searched[name]) == distribution(space)


def test_a_worker_imports_nothing_that_only_submitting_needs() -> None:
    code = (
        "import sys, hpcjobs.worker; "
        "print(*{'pydantic', 'yaml', 'rich', 'submitit', 'torch', 'scipy', 'pandas', 'sqlalchemy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == []
