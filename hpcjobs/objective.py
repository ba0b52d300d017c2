"""The objective: named as text, ``module:function``, imported only by a worker or by the check in a process of its own.

``python -m hpcjobs.objective MODULE:FUNCTION`` prints what the function declares, as JSON. The function may carry

- ``parameters``: a mapping of each known name to ``{"default", "type", "min", "max", "choices"}``, all optional;
- ``needs_data``: true if it cannot do without ``--data``;
- ``environment``: variables that it sets itself unless they are set, for people to read in ``submit --dry-run``;
- ``value_name``: what its value is, for people to read: ``"mAP"``;
- ``memory``: what a training needs, ``{"device_fixed_gb", "device_gb_per_image", "host_gb"}``, all optional; with
  ``settings``, only for these values of parameters, such as ``{"size": "n"}``;
- ``final``: the function, ``module:function``, that trains with found parameters on all data and tests once
  (``hpcjobs.final``);
- ``imports``: modules that it imports when it runs, for a worker to import before its first trial.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hpcjobs.errors import EXIT_USER_ERROR, UserError, run_entry

IMPORT_TIMEOUT_S = 120
_ALLOWED = "module:function, importable where submit is called"
_KINDS = {"parameters": Mapping, "environment": Mapping, "memory": Mapping, "final": str, "value_name": str}
_ATTRIBUTES = frozenset({*_KINDS, "needs_data", "imports"})


@dataclass(frozen=True)
class Declaration:
    """What an objective says of itself; ``parameters`` is None if it takes any names."""

    parameters: Mapping[str, Mapping[str, Any]] | None
    needs_data: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, Any] | None = None
    final: str | None = None
    value_name: str | None = None


def resolve(text: str, declared_as: str | None = None) -> Callable[..., Any]:
    """Import the function that ``text`` (``module:function``) names.

    ``declared_as``: the attribute that names it, where it is not the objective itself.

    Raises:
        UserError: there is no such module, no such attribute in it, or it cannot be called. What the module itself
            raises while it is imported passes unchanged.
    """
    place = f"objective: found {f'{declared_as} = ' if declared_as else ''}{text!r}"
    module_name, separator, attribute = text.partition(":")
    if not separator or not module_name or not attribute:
        raise UserError(f"{place}; allowed: {_ALLOWED}; for example my_project.training:train")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"{place}, but there is no module {error.name!r}; allowed: {_ALLOWED}; "
            f"install it, or call submit in the folder that holds it (now {Path.cwd()})"
        ) from None
    for name in attribute.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            from hpcjobs.load import nearest

            near = nearest(name, (n for n in vars(target) if not n.startswith("_")))
            raise UserError(
                f"{place}, but {module_name} ({getattr(target, '__file__', None) or 'a namespace'}) "
                f"has no {name!r}; allowed: {_ALLOWED}{'; ' + near if near else ''}"
            ) from None
    if not callable(target):
        raise UserError(f"{place}, which is {type(target).__name__}; allowed: a function (params, context) -> float")
    return target  # type: ignore[no-any-return]


def _check_arguments(place: str, function: Callable[..., Any]) -> None:
    """Raises UserError if the function does not take what a worker gives it."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some that are written in C have none
        return
    try:
        signature.bind({}, None)
    except TypeError as error:
        raise UserError(
            f"{place}, which takes {signature} ({error}); allowed: a function (params, context) -> float"
        ) from None


def _check_names(text: str, function: Callable[..., Any]) -> None:
    """Raises UserError if an attribute is a misspelt one of ours: it would be passed over in silence."""
    # what classes and callable objects have beside it is their own affair
    own = vars(function) if inspect.isfunction(function) else {}
    for name in own:
        near = difflib.get_close_matches(name, _ATTRIBUTES - own.keys(), n=1, cutoff=0.8)
        if near and not name.startswith("_") and name not in _ATTRIBUTES:
            raise UserError(
                f"objective: found the attribute {text}.{name}; allowed: {', '.join(sorted(_ATTRIBUTES))}; did you "
                f"mean {near[0]!r}? An attribute of your own may begin with _"
            )


def _check_final(text: str, final: str) -> None:
    """Raises UserError if the function for the final training is not there: no trial would notice."""
    declared_as = f"{text}.final"
    try:
        function = resolve(final, declared_as)
    except UserError:
        raise
    except Exception as error:  # whatever its module raises
        raise UserError(
            f"objective: found {declared_as} = {final!r}, whose import raises {type(error).__name__}: {error}; "
            "allowed: a module that submit can import; correct it, and import what is not here inside the function"
        ) from error
    _check_arguments(f"objective: found {declared_as} = {final!r}", function)


def _check_declared(text: str, function: Callable[..., Any]) -> None:
    """Raises UserError if an attribute of the function is not of the kind that the module's text says."""
    for name, kind in _KINDS.items():
        value = getattr(function, name, None)
        if value is not None and not isinstance(value, kind):
            allowed = "a mapping" if kind is Mapping else "the text module:function" if name == "final" else "text"
            raise UserError(f"objective: found {text}.{name} = {value!r}; allowed: {allowed}")
    for name, info in (getattr(function, "parameters", None) or {}).items():
        place = f"objective: found {text}.parameters[{name!r}]"
        if not isinstance(info, Mapping):
            raise UserError(f"{place} = {info!r}; allowed: a mapping, such as {{'type': 'float', 'min': 0.0}}")
        for bound in ("min", "max"):
            if not isinstance(info.get(bound, 0), (int, float)):
                raise UserError(f"{place}[{bound!r}] = {info[bound]!r}; allowed: a number")


def describe(text: str) -> dict[str, Any]:
    """What the objective declares, as plain values. Imports it, and its ``final``, into this process.

    Raises:
        UserError: one of them is not what it must be. What the objective's module raises passes unchanged.
    """
    function = resolve(text)
    _check_arguments(f"objective: found {text!r}", function)
    _check_names(text, function)
    _check_declared(text, function)
    declared, final = getattr(function, "parameters", None), getattr(function, "final", None)
    if final is not None:
        _check_final(text, final)
    return {
        "parameters": None if declared is None else {str(name): dict(info) for name, info in declared.items()},
        "needs_data": bool(getattr(function, "needs_data", False)),
        "memory": getattr(function, "memory", None),
        "final": final,
        "value_name": getattr(function, "value_name", None),
        "environment": {str(name): str(value) for name, value in getattr(function, "environment", {}).items()},
        "module_file": getattr(sys.modules.get(function.__module__), "__file__", None),
    }


def inspect_objective(text: str, python: str | None = None) -> Declaration:
    """Import the objective in a process of its own and return what it declares.

    Raises:
        UserError: it cannot be imported; the message ends with its own last lines.
    """
    command = [python or sys.executable, "-m", "hpcjobs.objective", text]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=IMPORT_TIMEOUT_S, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"objective: importing {text!r} took more than {IMPORT_TIMEOUT_S} s; allowed: a module that imports "
            "quickly; import what is slow inside the function"
        ) from None
    except OSError as error:
        raise UserError(
            f"python: {command[0]} cannot be started ({error.strerror}); correct 'python' in the profile"
        ) from None
    errors = done.stderr.decode(errors="replace").strip()
    if done.returncode == EXIT_USER_ERROR and errors.startswith("error: "):
        raise UserError(errors.removeprefix("error: "))
    # what the module prints while it is imported comes first; our line is the last, unless the module ended the process
    answer = done.stdout.decode(errors="replace").rstrip().rpartition("\n")[2]
    if done.returncode != 0 or not answer.startswith('{"parameters": '):
        tail = "\n  ".join((errors or answer or f"nothing, exit code {done.returncode}").splitlines()[-6:])
        raise UserError(
            f"objective: {text!r} cannot be imported with {command[0]}; correct the module; it says:\n  {tail}"
        )
    found = json.loads(answer)
    return Declaration(**{field.name: found[field.name] for field in fields(Declaration)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.objective",
        description="Import an objective and print what it declares: its parameters, and whether it\nneeds data.",
        epilog="example:\n  python -m hpcjobs.objective autospeed_model.objective:train_trial",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("objective", help="module:function")
    text = parser.parse_args(arguments).objective
    print(json.dumps(describe(text)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
