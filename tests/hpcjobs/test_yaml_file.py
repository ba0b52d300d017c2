"""Strict YAML: what people write means what they mean, and every mistake has a line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjobs.errors import UserError
from hpcjobs.yaml_file import dotted, dump_yaml, parse_value, read_yaml

# nine nines of nine of ...: a short file of which a reader can make millions of values
_ALIASES_OF_ALIASES = "a0: &a0 [1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


def read(folder: Path, content: str | bytes) -> dict[str, Any]:
    path = folder / "file.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_yaml(path).data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("+1e3", 1e3), ("-2e-3", -2e-3), ("1.", 1.0), (".5", 0.5), ("5.0e-3", 5e-3),
        ("010", 10), ("0x1F", 31), ("0o17", 15), ("-3", -3), (".inf", math.inf), ("-.INF", -math.inf),
        ("true", True), ("False", False), ("~", None), ("", None), ("null", None),
        ("on", "on"), ("no", "no"), ("1:30", "1:30"), ("1:30:00", "1:30:00"), ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"), ("'1e-6'", "1e-6"), ("loguniform", "loguniform"), ("[1, a]", [1, "a"]),
        ("{a: {}}", {"a": {}}),
    ],
)  # fmt: skip
def test_a_plain_value_is_what_a_person_means(tmp_path: Path, text: str, value: object) -> None:
    found = read(tmp_path, f"key: {text}\n")["key"]
    assert found == value
    assert type(found) is type(value)
    assert parse_value(text) == value


def test_nan_is_read_as_a_number(tmp_path: Path) -> None:
    assert math.isnan(read(tmp_path, "key: .nan")["key"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "line 1: found a list; allowed: a mapping"),
        ("text\n", "line 1: found a single value"),
        ("a: 1\nb: 2\na: 3\n", "line 3: a: found the key a second time (first in line 1)"),
        ("a:\n  b: 1\n  b: 2\n", "line 3: a.b: found the key a second time (first in line 2)"),
        ("a:\n\tb: 1\n", "line 2: this is not valid YAML: found a tab in the indentation; allowed: spaces"),
        ("a: 1\n---\nb: 2\n", "line 2: this is not valid YAML: found a second document"),
        ("a: b: c\n", "line 1: this is not valid YAML: mapping values are not allowed here; check the indentation"),
        ("a: [1, 2\n", "this is not valid YAML"),
        ("a: 'open\n", "this is not valid YAML"),
        ("1: a\n", "line 1: top level: found '1' as a key; allowed: text (put it in quotes)"),
        ("? [a]\n: 1\n", "line 1: top level: found 'a list or mapping' as a key"),
        ("a: !!python/object:os.system {}\n", "line 1: a: found the tag"),
        ("a: !!int abc\n", "line 1: a: found 'abc', which is no valid int"),
        ("a: " + "9" * 5000, "which is no valid int"),
        ("base: &b {x: 1}\na:\n  <<: *b\n", "line 3: a.<<: found a merge key"),
        ("a: &x {b: *x}\n", "an alias that contains itself"),
        (_ALIASES_OF_ALIASES, "more than 100000 values"),
        ('a: "\\uD800"\n', "line 1: a: found '\\ud800'"),
        ('"\\uD800": 1\n', "line 1: top level: found '\\ud800'"),
        ("a: *nowhere\n", "found undefined alias"),
        ("a: \x01\n", "line 1: found the control character U+0001"),
        ("a: " + "[" * 3000, "nested too deeply"),
        (b"a: 1\nb: caf\xe9\n", "line 2: found byte 0xe9, which is not UTF-8"),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, (str, bytes)) else None,
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_line(
    tmp_path: Path, content: str | bytes, expected: str
) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, content)
    assert str(error.value).startswith(str(tmp_path / "file.yaml"))
    assert expected in str(error.value)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        read_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(UserError, match="this is a folder"):
        read_yaml(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffa: 1") == {"a": 1}


def test_every_key_and_list_element_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n")
    document = read_yaml(path)
    keys = [("a",), ("a", "b"), ("a", "c"), ("a", "c", 0), ("a", "c", 1, "d")]
    assert [document.line(key) for key in keys] == [1, 2, 3, 4, 5]
    assert document.line(("a", "b", "missing")) == 2
    assert dotted(("a", "c", 1, "d")) == "a.c[1].d"


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(), scalars | st.lists(scalars) | st.dictionaries(st.text(), scalars)).filter(bool))
def test_what_is_written_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    text = dump_yaml(data)
    if "<<" in data or any(isinstance(value, dict) and "<<" in value for value in data.values()):
        return  # refused on reading
    path = tmp_path_factory.mktemp("yaml") / "file.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    assert repr(read_yaml(path).data) == repr(data)
