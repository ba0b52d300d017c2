"""From YAML files to the classes of :mod:`hpcjobs.config`, with every mistake of a file told at once, by line."""

from __future__ import annotations

import copy
import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hpcjobs.config import ClusterConfig, StudyConfig, StudyFile
from hpcjobs.errors import UserError
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.yaml_file import Document, KeyPath, dotted, dump_yaml, read_yaml

Model = TypeVar("Model", bound=BaseModel)

# stands for the line of a value that --set has given
COMMAND_LINE = 0

_WANTED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping with a type",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
# keys that can only mean the full form of a study file
_FULL_FORM = frozenset({"objective", "direction", "sampler", "pruner", "fixed"})
_RANGE_KEYS = frozenset({"type", "min", "max", "values"})


_WITH_EXPONENT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@dataclass(frozen=True)
class Mistake:
    """One thing to correct: where, what was found, what is allowed, what to do."""

    key: KeyPath
    allowed: str
    found: str | None = None
    remedy: str = ""

    def text(self, document: Document) -> str:
        line = document.line(self.key)
        place = ["--set"] if line == COMMAND_LINE else [f"line {line}"] if line else []
        place += [document.shown(self.key)] if self.key else []
        said = [f"found {self.found}"] if self.found is not None else []
        said.append(f"allowed: {self.allowed}")
        said += [self.remedy] if self.remedy else []
        return f"{', '.join(place)}: {'; '.join(said)}" if place else "; ".join(said)


def mistakes_error(document: Document, mistakes: Iterable[Mistake]) -> UserError:
    """All mistakes of one file as one error, sorted by line."""
    lines = sorted((document.line(mistake.key) or 0, mistake.text(document)) for mistake in mistakes)
    if len(lines) == 1:
        return UserError(f"{document.path}, {lines[0][1]}")
    return UserError("\n  ".join([f"{document.path}: {len(lines)} mistakes", *(text for _, text in lines)]))


def nearest(name: str, allowed: Iterable[str]) -> str:
    """``did you mean 'x'?``, or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def show(value: object) -> str:
    """A value as it was found in a file, with its kind where that is not plain."""
    if value is None or isinstance(value, bool):
        return {None: "null (nothing)", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "a list" if len(repr(value)) > 60 else f"the list {list(value)!r}"
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}..."


def validate(model: type[Model], document: Document) -> Model:
    """``document.data`` as a ``model``.

    Raises:
        UserError: with all mistakes of the file.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        found = [_translate(model, document, details) for details in error.errors(include_url=False)]
        raise mistakes_error(document, found) from None


def load_study(path: Path) -> tuple[StudyConfig, Document]:
    """A study file in either form: the mapping of parameters alone, or the keys of :class:`StudyConfig`.

    In both, a parameter whose value is a plain number or text is fixed to it. The document comes with it for later
    messages: its data and lines are those of the full form.

    Raises:
        UserError: with all mistakes of the file.
    """
    document = _full_form(read_yaml(path))
    parameters, fixed = document.data["parameters"], document.data.get("fixed", {})
    if not parameters and fixed and isinstance(fixed, dict):
        settings = " ".join(f"--set {name}={value}" for name, value in fixed.items())
        raise UserError(
            f"{path}: found only fixed values ({', '.join(fixed)}), so there is nothing to search; allowed: at least "
            f"one parameter with a range, such as {next(iter(fixed))}: {{type: uniform, min: 0.1, max: 0.9}}; "
            f"for a single training use: python -m autospeed_model.train --data OUT {settings}"
        )
    return validate(StudyConfig, document), document


def load_cluster(name: str, overrides: Mapping[KeyPath, Any] | None = None) -> ClusterConfig:
    """A cluster profile by its path or by its bare name in ``configs/clusters``; ``overrides`` win over the file.

    Raises:
        UserError: there is no such profile, or with all mistakes of the file.
    """
    return validate(ClusterConfig, with_overrides(read_yaml(find_cluster(name)), overrides or {}))


def with_overrides(document: Document, overrides: Mapping[KeyPath, Any]) -> Document:
    """The document with values of the command line in place of its own.

    Raises:
        UserError: a key leads through something that is no mapping.
    """
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    for key, value in overrides.items():
        target = data
        for part in key[:-1]:
            target = target.setdefault(str(part), {})
            if not isinstance(target, dict):
                raise UserError(f"--set {dotted(key)}: {part} is no mapping in {document.path}; set {part} alone")
        target[str(key[-1])] = value
        lines[key] = COMMAND_LINE
    return replace(document, data=data, lines=lines)


def cluster_folders() -> list[Path]:
    """Where profiles are looked for: the working folder, a checkout, an installed package."""
    places = [Path.cwd() / "configs", Path(__file__).parents[1] / "configs", Path(sys.prefix) / "share/hpcjobs/configs"]
    return list(dict.fromkeys(place / "clusters" for place in places if (place / "clusters").is_dir()))


def find_cluster(name: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name).absolute()
    folders = cluster_folders()
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    hint = nearest(name, known)
    if (here := next((file for file in (f"{name}.yaml", f"{name}.yml") if Path(file).is_file()), None)) is not None:
        hint = f"did you mean {here}?"
    raise UserError(
        f"--cluster: found {name!r}; allowed: a path to a YAML file, or one of {', '.join(known) or 'none found'}"
        f"{'; ' + hint if hint else ''}"
    )


def write_study_file(paths: StudyPaths, file: StudyFile) -> None:
    """Freeze the configuration into the study folder."""
    write_atomically(paths.config, dump_yaml(file.model_dump(mode="json")))


def read_study_file(paths: StudyPaths) -> StudyFile:
    """The frozen configuration of a study folder.

    Raises:
        UserError: the folder is not there or holds no study, or its file was damaged.
    """
    allowed = "a study folder, as python -m hpcjobs.submit makes it"
    if not paths.folder.is_dir():
        found = "a file" if paths.folder.exists() else "no such folder"
        raise UserError(f"{paths.folder}: found {found}; allowed: {allowed}; check the path")
    if not paths.config.is_file():
        raise UserError(f"{paths.folder}: found no study.yaml; allowed: {allowed}")
    return validate(StudyFile, read_yaml(paths.config))


def _full_form(document: Document) -> Document:
    """The same file with ``parameters`` and ``fixed`` apart, its lines moved along."""
    data, lines, path = document.data, document.lines, document.path
    full = "parameters" in data
    if not full and (keys := _FULL_FORM & data.keys()):
        close = difflib.get_close_matches("parameters", data, n=1)
        near = f"; is {close[0]!r} meant to be it?" if close else ""
        raise UserError(
            f"{path}, line {lines[(min(keys),)]}: {min(keys)}: found a setting of the study but no key 'parameters'; "
            f"allowed: the searched parameters below 'parameters:', beside the settings{near}"
        )
    given = data["parameters"] if full else data
    if not isinstance(given, dict):
        raise UserError(
            f"{path}, line {lines[('parameters',)]}: parameters: found {show(given)}; allowed: a mapping of names to "
            "ranges, such as box: {type: uniform, min: 5.0, max: 10.0}"
        )
    prefix: KeyPath = ("parameters",) if full else ()
    moved = dict(lines) if full else {}
    written: dict[KeyPath, KeyPath] = {}
    ranges: dict[str, Any] = {}
    fixed: dict[str, Any] = dict(data["fixed"]) if full and isinstance(data.get("fixed"), dict) else {}
    for name, value in given.items():
        here = (*prefix, name)
        scalar = not isinstance(value, (dict, list))
        if scalar and name in fixed:
            raise UserError(
                f"{path}, line {lines[here]}: {name}: found it fixed twice, here and in line "
                f"{lines[('fixed', name)]}; allowed: once; remove one of the two"
            )
        (fixed if scalar else ranges)[name] = value
        section = "fixed" if scalar else "parameters"
        written[(section, name)] = here
        for key, line in lines.items():
            if key[: len(prefix) + 1] == here:
                target: KeyPath = (section, *key[len(prefix) :])
                moved[target] = line
    result = {**data, "parameters": ranges} if full else {"parameters": ranges}
    if fixed:
        result["fixed"] = fixed
    return Document(path, result, moved, written)


def _translate(model: type[BaseModel], document: Document, details: ErrorDetails) -> Mistake:
    """Pydantic's error in our words; its location without the tags that stand in no file."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    key, owner = _locate(model, details["loc"])
    if kind == "mistake":
        key = (*key, *context["key"])
        return Mistake(key, context["allowed"], _as_written(document, key, context["found"]), context["remedy"])
    if kind == "extra_forbidden":
        names = sorted(owner.model_fields)
        return Mistake(key, ", ".join(names), "an unknown key", nearest(str(key[-1]), names))
    if kind == "missing":
        return Mistake(key, "this key is needed here", "nothing", "add it")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        names = ["uniform", "loguniform", "int", "categorical"]
        if kind == "union_tag_invalid":
            tag = value["type"]
            return Mistake((*key, "type"), ", ".join(names), show(tag), nearest(str(tag), names))
        hint = nearest(str(key[-1]), sorted(_FULL_FORM | {"parameters"})) if not _RANGE_KEYS & set(value) else ""
        return Mistake((*key, "type"), ", ".join(names), "nothing", hint or "say which kind of range this is")
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        return Mistake(key, ", ".join(names) or context["expected"], show(value), nearest(str(value), names))
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return Mistake(key, f"{words} {context[bound]}", show(value))
    remedy = ""
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        remedy = f"write {int(value)}"
    elif kind == "string_type" and isinstance(value, (bool, int, float)):
        remedy = "put it in quotes"
    elif kind == "tuple_type" and value is not None:
        remedy = "put it in brackets: [...]"
    return Mistake(key, _WANTED.get(kind, details["msg"]), _as_written(document, key, value), remedy)


def _as_written(document: Document, key: KeyPath, value: object) -> str:
    """:func:`show`, and for a number beyond double precision, which became 0 or infinite, what the file has."""
    line = document.line(key)
    if not isinstance(value, float) or not (value == 0 or math.isinf(value)) or not line or not document.path.is_file():
        return show(value)
    text = document.path.read_text(encoding="utf-8").splitlines()[line - 1]
    found = (number for number in _WITH_EXPONENT.findall(text) if float(number) == value)
    number = next(found, None)
    return show(value) if number is None else f"{number}, which is {value} in double precision"


def _locate(model: type[BaseModel], location: tuple[str | int, ...]) -> tuple[KeyPath, type[BaseModel]]:
    """The key in the file, and the class that the last part of ``location`` belongs to."""
    key: list[str | int] = []
    owner: type[BaseModel] = model
    inner: list[type[BaseModel]] = []
    for part in location:
        tagged = [m for m in inner if part in get_args(getattr(m.model_fields.get("type"), "annotation", None))]
        if tagged:
            owner, inner = tagged[0], []
            continue
        if part == "[key]":
            continue
        key.append(part)
        if len(inner) == 1 and part in inner[0].model_fields:
            owner, inner = inner[0], []
        elif len(inner) == 1:
            owner = inner[0]
        if part in owner.model_fields:
            inner = _models_in(owner.model_fields[str(part)].annotation)
    return tuple(key), owner


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The configuration classes that an annotation such as ``dict[str, A | B]`` leads to."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
