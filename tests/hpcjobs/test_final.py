"""After the study: both settings with several seeds, tested once, as one more study of the same kind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from rich.console import Console

from hpcjobs.budget import claim, count, finish
from hpcjobs.config import RunConfig, StudyConfig, StudyFile
from hpcjobs.errors import UserError
from hpcjobs.final_plan import BEST, DEFAULT, MAKING, FinalPlan, make_final, plan_final, read_plan
from hpcjobs.final_results import FinalResults, Spread, results_of, rows_of, table_of
from hpcjobs.load import write_study_file
from hpcjobs.owners import Owner
from hpcjobs.paths import StudyPaths
from hpcjobs.report import write_report
from hpcjobs.sampling import distribution, suggest
from hpcjobs.study import OpenStudy, create_study, extend, open_study

HERE = Path(__file__).parent


def final(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Called in another folder than the one where the objective lies."""
    command = [sys.executable, "-m", "hpcjobs.final", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=folder.parent)


def searched(studies: Any, objective: str = "with_final", **more: Any) -> Any:
    """A study of ``x`` whose objective declares the default 0.5, not yet run."""
    study = studies.create(objective, trials=3, fixed={"momentum": 0.9}, **more)
    file = study.file.model_copy(update={"defaults": {"x": 0.5, "momentum": 0.1}})
    write_study_file(study.paths, file)
    return study


def planned(defaults: dict[str, Any], best: dict[str, Any], **more: Any) -> FinalPlan:
    space = {"x": {"type": "uniform", "min": 0.0, "max": 1.0}, "kind": {"type": "categorical", "values": ["a", "b"]}}
    study = StudyConfig.model_validate({"objective": "m:f", "parameters": space, "fixed": {"size": 3}, **more})
    trial = create_trial(
        state=TrialState.COMPLETE,
        value=1.0,
        params=best,
        distributions={name: distribution(study.parameters[name]) for name in best},
    )
    file = StudyFile(name="s", study=study, run=RunConfig(), defaults=defaults)
    return plan_final(file, trial, "m:final", seeds=2, epochs=7, nodes=None, local_cores=2)


def complete_next(study: OpenStudy, value: Callable[[dict[str, Any]], float], figures: Any = None) -> None:
    """As a worker ends its trial."""
    trial_id = claim(study, Owner.of_this_process(element="e", agent="a", worker=0, token="t"))
    assert trial_id is not None
    params = suggest(optuna.Trial(study.optuna_study(), trial_id), study.file.study)
    finish(study, trial_id, "t", TrialState.COMPLETE, value=value(params), result={"figures": figures or {}})


def test_what_both_settings_share_is_fixed_and_the_rest_takes_exactly_two_values() -> None:
    plan = planned({"x": 0.5, "kind": "a", "size": 9}, {"x": 0.7, "kind": "a"})
    assert plan.file.study.fixed == {"size": 3, "kind": "a"}
    assert plan.starts == [{"x": x, "seed": seed} for seed in (0, 1) for x in (0.7, 0.5)]
    assert (plan.file.study.trials, plan.file.study.epochs, plan.file.study.pruner.name) == (4, 7, "none")
    assert [plan.setting_of(start) for start in plan.starts] == [BEST, DEFAULT, BEST, DEFAULT]
    assert plan.setting_of({"x": 0.6, "seed": 0}) is None


@pytest.mark.parametrize(("defaults", "setting"), [({}, BEST), ({"x": 0.7, "kind": "a"}, DEFAULT)])
def test_without_a_second_setting_there_is_one_training_a_seed(defaults: dict[str, Any], setting: str) -> None:
    plan = planned(defaults, {"x": 0.7, "kind": "a"})
    assert plan.starts == [{"seed": 0}, {"seed": 1}]
    assert plan.file.study.fixed == {"size": 3, "x": 0.7, "kind": "a"}
    assert plan.setting_of({"seed": 1}) == setting


def test_a_searched_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed"):
        planned({}, {"x": 0.7}, parameters={"seed": {"type": "int", "min": 0, "max": 9}, **_space()})


def _space() -> dict[str, Any]:
    return {"x": {"type": "uniform", "min": 0.0, "max": 1.0}, "kind": {"type": "categorical", "values": ["a", "b"]}}


def test_a_study_that_has_not_ended_keeps_the_evaluation_data_unseen(studies: Any) -> None:
    study = searched(studies)
    done = final(study.paths.folder)
    assert done.returncode == 2
    assert "the study has not ended (0 trials running, 3 waiting)" in done.stderr
    assert not (study.paths.folder / "final").exists()


def test_both_settings_are_trained_with_every_seed_and_compared(studies: Any) -> None:
    study = searched(studies)
    studies.worker(study).wait(120)
    shown = final(study.paths.folder, "--seeds", "2", "--dry-run")
    assert "4 trainings of 6 epochs by objectives:final_training" in shown.stdout
    shown = final(study.paths.folder, "--seeds", "2", "--epochs", "1", "--dry-run")
    assert "4 trainings of 1 epoch by" in shown.stdout
    assert not (study.paths.folder / "final").exists()
    done = final(study.paths.folder, "--seeds", "2")
    assert done.returncode == 0, done.stderr
    best = min(study.trials(), key=lambda trial: trial.value)
    found = json.loads(study.paths.final.read_text())["figures"]
    assert found[DEFAULT]["map"]["values"] == [0.5, 0.51]
    assert found[BEST]["map"]["values"] == [pytest.approx(best.params["x"]), pytest.approx(best.params["x"] + 0.01)]
    assert "50.5 ± 0.7" in done.stdout
    made = open_study(StudyPaths(study.paths.folder / "final"))
    assert count(made).completed == 4
    assert (study.paths.figures / "samples-default.png").read_text() == "0.5"
    again = final(study.paths.folder)
    assert "50.5 ± 0.7" in again.stdout
    assert count(made).budget == 4
    other = final(study.paths.folder, "--seeds", "5")
    assert other.returncode == 2
    assert "--seeds 5: the final trainings of this study began with 2" in other.stderr
    assert final(study.paths.folder, "--epochs", "7").returncode == 2
    extend(made, 1)
    assert "4 trainings of 6 epochs" in final(study.paths.folder, "--seeds", "2", "--epochs", "6", "--dry-run").stdout
    assert (count(made).waiting, len(list(made.paths.nodes.glob("*.json")))) == (1, 1), "a dry run starts nothing"
    write_report(study, with_final=True)
    page = study.paths.report.read_text()
    assert "<h2>Final trainings</h2>" in page
    assert "<td>default</td><td>50.5 ± 0.7</td>" in page


# hpcjobs.final that is killed when it comes to a function of a module
KILLED = """
import importlib, os, signal, sys
from hpcjobs import errors, final
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(importlib.import_module(sys.argv[1]), sys.argv[2], die)
sys.exit(errors.run_entry(lambda: final.main(sys.argv[3:])))
"""


@pytest.mark.parametrize("where", [("hpcjobs.study", "_enqueue"), ("hpcjobs.final_plan", "write_plan")])
def test_a_kill_while_the_final_study_is_made_stands_in_the_way_of_nothing(
    where: tuple[str, str], studies: Any
) -> None:
    study = searched(studies)
    studies.worker(study).wait(120)
    command = [sys.executable, "-c", KILLED, *where, str(study.paths.folder)]
    killed = subprocess.run(command, timeout=400, check=False, cwd=HERE)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(study.paths.folder.glob(f"{MAKING}*"))) == 1
    done = final(study.paths.folder, "--seeds", "1")
    assert done.returncode == 0, done.stderr
    assert count(open_study(StudyPaths(study.paths.folder / "final"))).completed == 2


def test_of_two_who_make_the_final_study_at_once_the_first_one_counts(tmp_path: Path) -> None:
    first, second = (planned({"x": 0.5, "kind": "a"}, {"x": x, "kind": "a"}) for x in (0.7, 0.8))
    paths = StudyPaths(tmp_path / "final")
    assert make_final(paths, first) == first
    assert make_final(paths, second) == first
    assert read_plan(paths) == first
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("held", [{}, {"final.json": "{"}, {"final.json": '{"settings": 1}'}])
def test_what_is_no_final_study_is_told_and_stays(held: dict[str, str], tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path / "final")
    make_final(paths, planned({}, {"x": 0.7, "kind": "a"}))
    (paths.folder / "final.json").unlink()
    for name, text in held.items():
        (paths.folder / name).write_text(text)
    with pytest.raises(UserError, match=r"final.*move .* away"):
        make_final(paths, planned({}, {"x": 0.8, "kind": "a"}))
    assert paths.config.exists()


def test_an_objective_without_a_final_training_says_what_to_declare(studies: Any) -> None:
    study = searched(studies, "quadratic")
    studies.worker(study).wait(120)
    done = final(study.paths.folder)
    assert done.returncode == 2
    assert "declares no function for the final training" in done.stderr


def test_a_final_training_that_is_not_there_is_told_before_anything_is_queued(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(params, context): ...\ntrain.final = 'mine:trian'\n")
    config = StudyConfig.model_validate({"objective": "mine:train", "parameters": _space(), "trials": 1})
    file = StudyFile(name="s", study=config, run=RunConfig(working_folder=tmp_path))
    study = create_study(StudyPaths(tmp_path / "study"), file, [])
    complete_next(study, lambda params: 1.0)
    done = final(study.paths.folder)
    assert done.returncode == 2
    assert "objective: found mine:train.final = 'mine:trian', but mine (" in done.stderr
    assert "did you mean 'train'?" in done.stderr
    assert not (study.paths.folder / "final").exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"failed": 0}', '{"failed": 0, "figures": {"default": {"map": {"mean": 1}}}}']
)
def test_damaged_results_are_told_with_what_to_do(text: str, tmp_path: Path) -> None:
    (tmp_path / "final.json").write_text(text)
    with pytest.raises(UserError, match=r"final\.json: found no results.*remove the file"):
        FinalResults.read(tmp_path / "final.json")


def test_trainings_that_fail_or_belong_to_no_setting_are_not_counted(studies: Any) -> None:
    study = searched(studies, "with_failing_final")
    studies.worker(study).wait(120)
    done = final(study.paths.folder, "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert "1 to 2 seeds each" in done.stdout
    told = " ".join(done.stdout.split())
    assert "1 training failed, logs:" in told and "final away and call this again" in told
    made = open_study(StudyPaths(study.paths.folder / "final"))
    extend(made, 1)
    me = Owner.of_this_process(element="e", agent="a", worker=0, token="t")
    trial_id = claim(made, me)
    assert trial_id is not None
    finish(made, trial_id, "t", TrialState.COMPLETE, value=0.0)  # without any parameters
    again = final(study.paths.folder)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("±") == done.stdout.count("±") > 0


def test_where_all_trainings_fail_what_to_do_is_told(studies: Any) -> None:
    study = searched(studies, "with_broken_final")
    studies.worker(study).wait(120)
    done = final(study.paths.folder, "--seeds", "1")
    assert done.returncode == 1
    told = " ".join(done.stdout.split())
    assert "No training has completed (2 x objective error)" in told and "final away and call this again" in told


def test_a_gain_within_the_spread_is_marked() -> None:
    figures = {
        DEFAULT: {"map": Spread.of([0.50, 0.51, 0.52]), "recall": Spread.of([0.5, 0.6])},
        BEST: {"map": Spread.of([0.56, 0.57, 0.58]), "recall": Spread.of([0.52, 0.61])},
    }
    results = FinalResults(figures, failed=0)
    assert results.beyond_spread("map")
    assert not results.beyond_spread("recall")
    console = Console(width=80, record=True)
    console.print(table_of(results))
    text = console.export_text()
    assert "51.0 ± 1.0" in text
    assert "+6.0" in text
    assert "(+1.5)" in text


@pytest.mark.parametrize(
    ("figures", "columns"),
    [
        ([{}] * 4, {"loss": "-0.25"}),
        ([{"images_per_s": 100.0}] * 4, {"loss": "-0.25"}),
        ([{"top1": 0.5, "images_per_s": 100.0}] * 4, {"loss": "-0.25", "top1": "(+0)"}),
        ([{"loss": 0.5}] * 4, {"loss": "-0.25"}),
        # the value under another name: once is enough
        ([{"map": value, "recall": 1.0} for value in (0.5, 0.75, 0.5, 0.75)], {"mAP %": "-25.0", "R %": "(+0.0)"}),
        # the same number by chance, in three of four
        ([{"top1": 0.5}, {"top1": 0.75}, {"top1": 0.5}, {"top1": 0.5}], {"loss": "-0.25", "top1": "(-0.125)"}),
    ],
)
def test_the_value_is_compared_unless_a_reported_figure_holds_it(
    figures: list[dict[str, float]], columns: dict[str, str], tmp_path: Path
) -> None:
    plan = planned({"x": 0.5, "kind": "a"}, {"x": 0.7, "kind": "a"})
    plan = FinalPlan(plan.file.model_copy(update={"value_name": "loss"}), plan.settings, plan.starts, plan.best_trial)
    paths = StudyPaths(tmp_path / "final")
    make_final(paths, plan)
    study = open_study(paths)
    for own in figures:
        complete_next(study, lambda params: 0.5 if plan.setting_of(params) == BEST else 0.75, own)
    header, default, best, gain = rows_of(results_of(study, plan))
    assert dict(zip(header[1:], gain[1:], strict=True)) == columns
    assert (default[0], best[0], gain[0]) == (DEFAULT, BEST, "gain")
