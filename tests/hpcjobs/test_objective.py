"""An objective is named as text, checked in a process of its own, imported only by workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcjobs import objective
from hpcjobs.errors import UserError
from hpcjobs.objective import Declaration, inspect_objective, resolve

MODULE = """\
print("a module may print")
def train(params, context):
    return 0.0
train.parameters = {"lr": {"type": "float", "min": 0.0, "max": 1.0, "default": 0.1}}
train.needs_data = True
train.environment = {"MY_SWITCH": 1}
train.value_name = "loss"
def free(params, context):
    return 0.0
class Nested:
    @staticmethod
    def train(params, context):
        return 1.0
number = 3
"""


WRONG = """\
def listed(params, context): ...
listed.parameters = ["x"]
def plain(params, context): ...
plain.parameters = {"x": 5}
def bounded(params, context): ...
bounded.parameters = {"x": {"min": "a"}}
def named(params, context): ...
named.value_name = 5
def remembering(params, context): ...
remembering.memory = "lots"
def alone(params): ...
def many(params, context, size): ...
def misspelt(params, context): ...
misspelt.paramters = {}
def own(params, context): ...
own.memory = {}
own.memory_gb = 5
own._final = 5
own.notes = "anything"
def lost(params, context): ...
lost.final = "wrong:remembring"
def away(params, context): ...
away.final = "nowhere:train"
def direct(params, context): ...
direct.final = lost
def narrow(params, context): ...
narrow.final = "wrong:alone"
def heavy(params, context): ...
heavy.final = "raising:train"
def heavier(params, context): ...
heavier.final = "broken:train"
def whole(params, context): ...
whole.final = "wrong:lost"
class Callable:
    finale = 5
    def __call__(self, params, context): ...
instance = Callable()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_tuning.py").write_text(MODULE)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "raising.py").write_text("raise RuntimeError('no licence found')\n")
    (tmp_path / "leaving.py").write_text("import sys\nprint('bye')\nsys.exit(0)\n")
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("project")
def test_what_an_objective_declares_is_found_without_importing_it_here() -> None:
    known = {"lr": {"type": "float", "min": 0.0, "max": 1.0, "default": 0.1}}
    assert inspect_objective("my_tuning:train") == Declaration(known, True, {"MY_SWITCH": "1"}, value_name="loss")
    assert inspect_objective("my_tuning:free") == Declaration(None, needs_data=False)
    assert inspect_objective("my_tuning:Nested.train") == Declaration(None, needs_data=False)
    assert "my_tuning" not in sys.modules


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "my_tunning:train",
            "but there is no module 'my_tunning'; allowed: module:function, importable where submit is",
        ),
        ("my_tuning.deep:train", "there is no module 'my_tuning.deep'"),
        (
            "my_tuning:trian",
            "has no 'trian'; allowed: module:function, importable where submit is called; did you mean 'train'",
        ),
        ("wrong:listed", "found wrong:listed.parameters = ['x']; allowed: a mapping"),
        ("wrong:plain", "found wrong:plain.parameters['x'] = 5; allowed: a mapping, such as {'type': 'float'"),
        ("wrong:bounded", "found wrong:bounded.parameters['x']['min'] = 'a'; allowed: a number"),
        ("wrong:named", "found wrong:named.value_name = 5; allowed: text"),
        ("wrong:remembering", "found wrong:remembering.memory = 'lots'; allowed: a mapping"),
        (
            "wrong:alone",
            "found 'wrong:alone', which takes (params) (too many positional arguments); allowed: a function",
        ),
        (
            "wrong:many",
            "which takes (params, context, size) (missing a required argument: 'size'); allowed: a function",
        ),
        (
            "wrong:misspelt",
            "found the attribute wrong:misspelt.paramters; allowed: environment, final, imports, memory",
        ),
        ("wrong:misspelt", "did you mean 'parameters'? An attribute of your own may begin with _"),
        ("wrong:lost", "found wrong:lost.final = 'wrong:remembring', but wrong ("),
        (
            "wrong:lost",
            "has no 'remembring'; allowed: module:function, importable where submit is called; did you mean",
        ),
        ("wrong:away", "found wrong:away.final = 'nowhere:train', but there is no module 'nowhere'; allowed: module:"),
        ("wrong:direct", "; allowed: the text module:function"),
        ("wrong:narrow", "found wrong:narrow.final = 'wrong:alone', which takes (params) (too many positional"),
        (
            "wrong:heavy",
            "wrong:heavy.final = 'raising:train', whose import raises RuntimeError: no licence found; allowed",
        ),
        ("wrong:heavier", "whose import raises ModuleNotFoundError: No module named 'not_installed_anywhere'; allowed"),
        ("my_tuning:number", "found 'my_tuning:number', which is int; allowed: a function (params, context) -> float"),
        ("my_tuning", "found 'my_tuning'; allowed: module:function"),
        ("broken:train", "No module named 'not_installed_anywhere'"),
        ("raising:train", "no licence found"),
        ("leaving:train", "'leaving:train' cannot be imported with"),
    ],
)
def test_an_objective_that_cannot_be_imported_is_refused_with_its_reason(text: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        inspect_objective(text)
    assert str(error.value).startswith("objective: ")
    assert expected in str(error.value)


@pytest.mark.usefixtures("project")
def test_what_is_the_users_own_or_has_no_signature_is_accepted() -> None:
    assert inspect_objective("wrong:own").memory == {}
    assert inspect_objective("wrong:whole").final == "wrong:lost"
    assert inspect_objective("wrong:instance") == Declaration(None, needs_data=False)
    assert inspect_objective("builtins:min") == Declaration(None, needs_data=False)


@pytest.mark.usefixtures("project")
def test_a_module_that_takes_for_ever_to_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "IMPORT_TIMEOUT_S", 1)
    with pytest.raises(UserError, match="took more than 1 s; allowed: a module that imports quickly"):
        inspect_objective("sleeping:train")


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(
        UserError, match=r"python: /nowhere/python cannot be started .*; correct 'python' in the profile"
    ):
        inspect_objective("json:dumps", python="/nowhere/python")


def test_a_function_is_resolved_by_its_name() -> None:
    assert resolve("json:dumps") is json.dumps
    assert resolve("json:decoder.JSONDecoder") is json.JSONDecoder


def test_the_command_prints_json_and_ends_with_2_for_a_mistake(project: Path) -> None:
    command = [sys.executable, "-m", "hpcjobs.objective"]
    done = subprocess.run([*command, "my_tuning:train"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["needs_data"] is True
    assert found["module_file"] == str(project / "my_tuning.py")
    done = subprocess.run([*command, "my_tuning:nothing"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (2, "a module may print")
    assert "Traceback" not in done.stderr
