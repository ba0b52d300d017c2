"""A search space against what its objective declares."""

from __future__ import annotations

from pathlib import Path

import pytest

from autospeed_model.hyperparameters import PARAMETERS, Hyperparameters
from hpcjobs.config import StudyConfig
from hpcjobs.errors import UserError
from hpcjobs.load import load_study
from hpcjobs.objective import Declaration
from hpcjobs.search_space import check_search_space

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "cases" / "search_space"
KNOWN = {
    "lr": {"type": "float", "min": 0.0, "max": 1.0},
    "layers": {"type": "int", "min": 1},
    "size": {"type": "str", "choices": ["n", "s", "m"]},
    "bias": {"type": "bool"},
    "title": {"type": "str"},
    "anything": {},
}


def check(folder: Path, text: str, known: dict[str, dict[str, object]] | None = None) -> None:
    path = folder / "study.yaml"
    path.write_text(f"ok: {{type: uniform, min: 0, max: 1}}\n{text}\n")
    study, document = load_study(path)
    known = {**KNOWN, "ok": {}} if known is None else known
    check_search_space(study, Declaration(known, needs_data=False), document)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lrr: {type: uniform, min: 0, max: 1}", "line 2, lrr: found no such parameter; allowed: the parameters of"),
        ("lrr: 0.5", "did you mean 'lr'?"),
        ("lr: {type: uniform, min: -1, max: 1}", "line 2, lr.min: found -1.0; allowed: 0 to 1"),
        ("lr: {type: uniform, min: 0, max: 1.5}", "line 2, lr.max: found 1.5; allowed: 0 to 1"),
        ("lr: {type: categorical, values: [0.1, 2]}", "line 2, lr.values[1]: found 2; allowed: 0 to 1"),
        ("lr: {type: categorical, values: [0.1, a]}", "lr.values[1]: found 'a'; allowed: a number"),
        ("lr: 2", "line 2, lr: found 2; allowed: 0 to 1"),
        ("lr: true", "lr: found true; allowed: a number"),
        ("layers: {type: uniform, min: 1, max: 4}", "layers.type: found 'uniform'; allowed: int, categorical"),
        ("layers: {type: int, min: 0, max: 4}", "layers.min: found 0; allowed: at least 1"),
        ("layers: 1.5", "layers: found 1.5; allowed: a whole number"),
        (
            "size: {type: uniform, min: 0, max: 1}",
            "size.type: found 'uniform'; allowed: categorical; size takes one of n",
        ),
        ("size: {type: categorical, values: [n, x]}", "size.values[1]: found 'x'; allowed: n, s, m"),
        ("bias: {type: int, min: 0, max: 1}", "bias.type: found 'int'; allowed: categorical; bias takes true or false"),
        ("bias: 1", "bias: found 1; allowed: true or false"),
        ("title: 1", "title: found 1; allowed: text"),
    ],
)
def test_a_value_that_the_objective_does_not_take_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        check(tmp_path, text)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "lr: {type: loguniform, min: 1e-6, max: 1}",
        "lr: 1",
        "layers: {type: int, min: 1, max: 100}",
        "size: {type: categorical, values: [n, m]}",
        "bias: {type: categorical, values: [true, false]}",
        "anything: text",
    ],
)
def test_a_value_that_the_objective_takes_is_accepted(tmp_path: Path, text: str) -> None:
    check(tmp_path, text)


def test_all_mistakes_against_the_declaration_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2 mistakes\n  line 2, .*\n  line 3, "):
        check(tmp_path, "lr: 2\nsise: n")


def test_the_names_are_listed_once_and_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        check(tmp_path, "lrr: 0.5\nsise: {type: categorical, values: [n, m]}")
    first, second = str(error.value).splitlines()[1:]
    listed = ": anything, bias, layers, lr, ok, size, title; did you mean 'lr'?"
    assert (
        f"{StudyConfig.model_fields['objective'].default} (no objective: is given, so AutoSpeed's is taken){listed}"
        in first
    )
    assert second.endswith("train_trial, listed above; did you mean 'size'?")
    path = tmp_path / "full.yaml"
    path.write_text("objective: mine:train\nparameters:\n  y: {type: uniform, min: 0, max: 1}\n")
    study, document = load_study(path)
    with pytest.raises(UserError, match=r"allowed: the parameters of mine:train: ok$"):
        check_search_space(study, Declaration({"ok": {}}, needs_data=False), document)


def test_an_objective_without_a_declaration_takes_any_name() -> None:
    study, document = load_study(CASES / "unknown_parameter.yaml")
    check_search_space(study, Declaration(None, needs_data=False), document)


def test_a_misspelt_parameter_of_the_detector_is_refused_with_the_nearest_name() -> None:
    study, document = load_study(CASES / "unknown_parameter.yaml")
    with pytest.raises(UserError, match=r"line 1, max_lrr: found no such parameter; .*; did you mean 'max_lr'\?"):
        check_search_space(study, Declaration(PARAMETERS, needs_data=True), document)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_study_that_comes_along_fits_the_detector(path: Path) -> None:
    study, document = load_study(path)
    check_search_space(study, Declaration(PARAMETERS, needs_data=True), document)


def test_the_study_of_all_parameters_names_all_of_them() -> None:
    study, _ = load_study(ROOT / "configs" / "studies" / "all-parameters.yaml")
    assert study.parameters.keys() | study.fixed.keys() == Hyperparameters().to_mapping().keys()
