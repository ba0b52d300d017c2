"""The result files of a study."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.trial import TrialState
from rich.console import Console

from hpcjobs.budget import claim, finish
from hpcjobs.collect import main, show
from hpcjobs.errors import UserError
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.load import write_study_file
from hpcjobs.owners import Owner
from hpcjobs.study import open_study
from hpcjobs.text import number_text
from hpcjobs.trial_files import append_to_curves
from tests.hpcjobs.night import make_night


def collect(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcjobs.collect", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_best_parameters_are_a_complete_configuration(studies: Any) -> None:
    study = studies.create("quadratic", trials=4, fixed={"momentum": 0.9})
    file = study.file.model_copy(update={"defaults": {"x": 0.0, "momentum": 0.5, "name": "no", "warmup": 1e-06}})
    write_study_file(study.paths, file)
    studies.worker(study).wait(120)
    done = collect(study.paths.folder)
    assert done.returncode == 0, done.stderr
    best = min(study.trials(), key=lambda trial: trial.value)
    found = yaml.safe_load(study.paths.best_params.read_text())
    assert found == {"x": best.params["x"], "momentum": 0.9, "name": "no", "warmup": 1e-06}
    assert isinstance(found["warmup"], float)
    summary = json.loads(study.paths.summary.read_text())
    assert summary["best"]["number"] == best.number
    assert (summary["budget"], summary["finished"]) == (4, True)


def test_a_name_that_no_file_can_hold_spoils_no_table(studies: Any) -> None:
    study = studies.create("quadratic", trials=1)
    trial_id = claim(study, Owner.of_this_process(element="e", agent="a", worker=0, token="mine"))
    append_to_curves(study.paths.worker_curves("e", 0), 0, 1, 0.5, {"\udc80": 3.0})
    finish(study, trial_id, "mine", TrialState.COMPLETE, value=0.5, result={"figures": {"\udc80": 3.0}})
    done = collect(study.paths.folder)
    assert done.returncode == 0, done.stderr
    assert study.paths.curves_csv.read_text() == "trial,step,value,\\udc80\n0,1,0.5,3.0\n"
    assert "figure_\\udc80" in study.paths.trials_csv.read_text().partition("\n")[0].split(",")


def test_all_trials_are_in_the_table_with_why_they_failed(studies: Any) -> None:
    study = studies.create("out_of_gpu_memory", trials=4)
    studies.worker(study).wait(120)
    collect(study.paths.folder)
    with study.paths.trials_csv.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["fail", "complete", "fail", "complete"]
    assert [row["failure"] for row in rows] == ["out of GPU memory", "", "out of GPU memory", ""]
    assert float(rows[1]["param_x"]) == study.trials()[1].params["x"]
    assert rows[1]["element"] == "here_1"


def test_maximising_takes_the_largest_value(studies: Any) -> None:
    study = studies.create("quadratic", trials=2, direction="maximize")
    for value in (1.0, 3.0):
        trial_id = claim(study, Owner.of_this_process(element="e", agent="a", worker=0, token="t"))
        finish(study, trial_id, "t", study.trials()[0].state.COMPLETE, value=value)
    collect(study.paths.folder)
    assert json.loads(study.paths.summary.read_text())["best"]["value"] == 3.0


def test_a_study_without_a_completed_trial_says_so(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    trial_id = claim(study, Owner.of_this_process(element="e", agent="a", worker=0, token="t"))
    failure = Failure(FailureClass.OBJECTIVE, "ValueError: no")
    finish(study, trial_id, "t", study.trials()[0].state.FAIL, failure=failure)
    done = collect(study.paths.folder)
    assert done.returncode == 1
    assert "No trial has completed yet (0 running, 1 waiting, 1 failed)" in " ".join(done.stdout.split())
    assert "1 x objective error: trial 0: ValueError: no\n" in done.stdout
    assert f"tracebacks are in {study.paths.logs}\n" in done.stdout
    assert not study.paths.best_params.exists()
    assert open_study(study.paths).paths.trials_csv.exists()


def test_who_may_only_read_sees_the_table_and_why_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = make_night(tmp_path / "night", trials=4)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="you cannot write there"):
        main([str(paths.folder)])
    assert "trials have ended" in capsys.readouterr().out
    assert not paths.results.exists()


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        done = collect(folder)
        assert done.returncode == 2
        assert str(folder) in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("width", "hidden"), [(80, 2), (140, 0), (40, 6)])
def test_the_table_fits_the_terminal_and_says_what_it_leaves_out(width: int, hidden: int, tmp_path: Path) -> None:
    paths = make_night(tmp_path / "night", trials=40)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(open_study(paths), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert len(rows) == 15
    assert {len(row) for row in rows} == {3 + 7 - hidden}
    assert [float(row[1]) for row in rows] == sorted((float(row[1]) for row in rows), reverse=True)
    assert (f"and {hidden} more parameters of each in trials.csv" in " ".join(" ".join(lines).split())) == bool(hidden)


@pytest.mark.parametrize(
    ("value", "text"), [(4.64213e-06, "4.642e-06"), (0.5, "0.5"), (12345.6, "12346"), (32, "32"), (None, "")]
)
def test_numbers_have_four_significant_digits(value: object, text: str) -> None:
    assert number_text(value) == text
