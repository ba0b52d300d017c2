"""Strict YAML for files that people edit: numbers as people write them, no silent surprises, a line for every key.

The rules are those of YAML 1.2's core schema, which differ from PyYAML's 1.1 where it hurts: ``1e-6`` is a number,
``on``, ``no`` and ``2024-01-01`` are text, ``010`` is ten and ``1:30`` is text. A repeated key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpcjobs.errors import UserError

KeyPath = tuple[str | int, ...]

# more than this is no configuration, but data, or aliases of aliases that unfold without end
_MOST_VALUES = 100_000

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"(?:~|null|Null|NULL|)", "~nN\0"),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("int", r"(?:[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?[0-9]+[eE][-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever :func:`read_yaml` would take for something else than text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML's other styles lose some line separators
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
        )


def _int(text: str) -> int:
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _float(text: str) -> float:
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _text(text: str) -> str:
    text.encode()  # an escape can name half a character, which no file can hold: UnicodeEncodeError is a ValueError
    return text


_PLAIN: dict[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": _int,
    "tag:yaml.org,2002:float": lambda text: _float(text.lower()),
    "tag:yaml.org,2002:str": _text,
}


@dataclass(frozen=True)
class Document:
    """A YAML mapping as plain Python values, and the line (from 1) of every key and list element."""

    path: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    # first two parts of a key -> how the file itself has them, where that differs
    written: dict[KeyPath, KeyPath] = field(default_factory=dict)

    def shown(self, key: KeyPath) -> str:
        """``key`` as it stands in the file."""
        return dotted(self.written.get(key[:2], key[:2]) + key[2:])

    def line(self, key: KeyPath) -> int | None:
        """The line of ``key``, or of the nearest key around it."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key)


def read_yaml(path: Path) -> Document:
    """Read a file that must hold one mapping.

    Raises:
        UserError: the file is missing, unreadable, not UTF-8, not YAML, empty or not a mapping; a key is repeated or is
            no text.
    """
    text = _read_text(path)
    try:
        node = yaml.compose(text, _Loader)
        if node is None:
            raise UserError(f"{path}: the file is empty; a mapping of keys and values is wanted (name: value)")
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            raise UserError(
                f"{path}, line {node.start_mark.line + 1}: found {kind}; allowed: a mapping of keys and values "
                "(lines of the form name: value, without a dash before them)"
            )
        lines: dict[KeyPath, int] = {}
        data = _Builder(path, lines).value(node, ())
    except yaml.YAMLError as error:
        raise UserError(_explain(path, text, error)) from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply to be a configuration; remove the brackets") from None
    return Document(path, data, lines)


def dump_yaml(data: dict[str, Any]) -> str:
    """``data`` (plain values) as text that :func:`read_yaml` reads back equal, keys in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def parse_value(text: str) -> Any:
    """A value given on the command line, by the same rules as in a file: ``30``, ``cpx``, ``'007'``, ``[a, b]``.

    Raises:
        UserError: it is no YAML.
    """
    source = Path("command line")
    try:
        node = yaml.compose(text, _Loader)
        return None if node is None else _Builder(source, {}).value(node, ())
    except yaml.YAMLError as error:
        raise UserError(_explain(source, text, error)) from None


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; check the path (it is taken from {Path.cwd()})") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder; name the YAML file in it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: found byte 0x{content[error.start]:02x}, which is not UTF-8; "
            f"save the file as UTF-8 (iconv -f latin1 -t utf-8)"
        ) from None


@dataclass(frozen=True)
class _Builder:
    """Turns YAML nodes into plain values and notes the lines."""

    path: Path
    lines: dict[KeyPath, int]

    def value(self, node: yaml.Node, key: KeyPath, inside: tuple[int, ...] = ()) -> Any:
        if id(node) in inside:
            raise self.error(node, key, "an alias that contains itself; write the values out")
        if len(self.lines) > _MOST_VALUES:
            raise self.error(node, key, f"more than {_MOST_VALUES} values, aliases unfolded; allowed: a configuration")
        inside = (*inside, id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self.mapping(node, key, inside)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = []
            for index, item in enumerate(node.value):
                here = (*key, index)
                self.lines[here] = item.start_mark.line + 1
                items.append(self.value(item, here, inside))
            return items
        if node.tag not in _PLAIN:
            raise self.error(node, key, f"the tag {node.tag!r}; allowed: plain values, remove the tag")
        try:
            return _PLAIN[node.tag](node.value)
        except ValueError:
            raise self.error(
                node, key, f"{node.value[:40]!r}, which is no valid {node.tag.rpartition(':')[2]}"
            ) from None

    def mapping(self, node: yaml.MappingNode, key: KeyPath, inside: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if name_node.tag != "tag:yaml.org,2002:str":
                found = name_node.value if isinstance(name_node, yaml.ScalarNode) else "a list or mapping"
                raise self.error(name_node, key, f"{found!r} as a key; allowed: text (put it in quotes)")
            name: str = self.value(name_node, key, inside)
            here = (*key, name)
            if name in result:
                raise self.error(
                    name_node,
                    here,
                    f"the key a second time (first in line {self.lines[here]}); allowed: once; remove one of the two",
                )
            if name == "<<":
                raise self.error(name_node, here, "a merge key; allowed: plain keys; write the values out")
            self.lines[here] = name_node.start_mark.line + 1
            result[name] = self.value(value_node, here, inside)
        return result

    def error(self, node: yaml.Node, key: KeyPath, found: str) -> UserError:
        return UserError(f"{self.path}, line {node.start_mark.line + 1}: {dotted(key) or 'top level'}: found {found}")


def dotted(key: KeyPath) -> str:
    """``("parameters", "box", "values", 0)`` as people say it: ``parameters.box.values[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part or repr(part)}" for part in key).lstrip(".")


def _explain(path: Path, text: str, error: yaml.YAMLError) -> str:
    """PyYAML's complaint in one line, with the remedy for the usual slips."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{path}, line {line}: found the control character U+{error.character:04X}; remove it"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if mark is None:
        return f"{path}: this is not valid YAML: {problem}"
    line_text = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "\t" in line_text[: mark.column + 1]:
        problem = "found a tab in the indentation; allowed: spaces; replace each tab by two spaces"
    elif "single document" in str(error):
        problem = "found a second document after '---'; allowed: one document in a file; remove the line"
    elif "mapping values are not allowed" in problem:
        problem += "; check the indentation, and put values that contain ': ' in quotes"
    return f"{path}, line {mark.line + 1}: this is not valid YAML: {problem}"
