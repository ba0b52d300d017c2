"""Pure: a study's search space against what its objective declares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hpcjobs.config import Categorical, Choice, Int, StudyConfig
from hpcjobs.load import Mistake, mistakes_error, nearest, show
from hpcjobs.objective import Declaration
from hpcjobs.yaml_file import Document, KeyPath

_KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text"}


def check_search_space(study: StudyConfig, declaration: Declaration, document: Document) -> None:
    """Refuse names that the objective does not have, and values outside what it declares.

    An objective without a declaration takes any names.

    Raises:
        UserError: with all mistakes of the file.
    """
    if declaration.parameters is None:
        return
    known = declaration.parameters
    keys: list[KeyPath] = [("parameters", name) for name in study.parameters]
    keys += [("fixed", name) for name in study.fixed]
    unknown = sorted((key for key in keys if key[-1] not in known), key=lambda key: document.line(key) or 0)
    mistakes = [_unknown(key, study, known, is_first=key == unknown[0]) for key in unknown]
    mistakes += _wrong_values(study, known)
    if mistakes:
        raise mistakes_error(document, mistakes)


def _wrong_values(study: StudyConfig, known: Mapping[str, Mapping[str, Any]]) -> Iterator[Mistake]:
    for name, parameter in study.parameters.items():
        key: KeyPath = ("parameters", name)
        if name not in known:
            continue
        if isinstance(parameter, Categorical):
            for index, value in enumerate(parameter.values):
                yield from _value((*key, "values", index), value, known[name])
        else:
            kind = known[name].get("type", "float")
            if kind not in ("float", "int") or "choices" in known[name]:
                yield Mistake((*key, "type"), "categorical", repr(parameter.type), f"{name} takes {_kind(known[name])}")
            elif kind == "int" and not isinstance(parameter, Int):
                yield Mistake((*key, "type"), "int, categorical", repr(parameter.type), f"{name} is a whole number")
            else:
                yield from _value((*key, "min"), parameter.min, known[name])
                yield from _value((*key, "max"), parameter.max, known[name])
    for name, value in study.fixed.items():
        if name in known:
            yield from _value(("fixed", name), value, known[name])


def _unknown(key: KeyPath, study: StudyConfig, known: Mapping[str, Any], *, is_first: bool) -> Mistake:
    """The names are many: they are listed for the first mistake of a file."""
    # the full form alone can name another objective
    taken = "" if "objective" in study.model_fields_set else " (no objective: is given, so AutoSpeed's is taken)"
    names = f": {', '.join(sorted(known))}" if is_first else ", listed above"
    allowed = f"the parameters of {study.objective}{taken if is_first else ''}{names}"
    return Mistake(key, allowed, "no such parameter", nearest(str(key[-1]), known))


def _value(key: KeyPath, value: Choice, info: Mapping[str, Any]) -> Iterator[Mistake]:
    choices = info.get("choices")
    if choices is not None:
        if value not in choices:
            yield Mistake(key, ", ".join(map(str, choices)), show(value), nearest(str(value), map(str, choices)))
        return
    if not _has_kind(value, info.get("type")):
        yield Mistake(key, _kind(info), show(value))
        return
    low, high = info.get("min"), info.get("max")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        below = low is not None and value < low
        above = high is not None and value > high
        if below or above:
            yield Mistake(key, _span(low, high), show(value))


def _has_kind(value: Choice, kind: str | None) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str)
    if kind in ("int", "float"):
        return isinstance(value, int if kind == "int" else (int, float)) and not isinstance(value, bool)
    return True


def _kind(info: Mapping[str, Any]) -> str:
    if "choices" in info:
        return "one of " + ", ".join(map(str, info["choices"]))
    return _KINDS.get(info.get("type", ""), "a value")


def _span(low: float | None, high: float | None) -> str:
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    if math.isinf(high):
        return f"at least {low:g}"
    return f"at most {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"
