"""Lines are read as JSON would be read line by line, whatever somebody has made of them."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjobs.journal_records import Record, UnusualRecord, parse, parse_lines
from tests.hpcjobs.test_journal_replay import line_of, records, replayed, start, state_of

# what damage is made of: it ends lines, opens and closes JSON, is no ASCII, no UTF-8, or no digit of a number
damages = st.sampled_from(
    [b"", b"\n", b",", b"}", b"{", b'"', b"[", b"\x00", b"\xff", b" ", b"9", b"-", b"e", b"}{", b"},{"]
)


def fields_of(record: Record | UnusualRecord) -> dict[str, Any]:
    if isinstance(record, UnusualRecord):
        return dict(record.__dict__)
    return {key: value for key, value in msgspec.structs.asdict(record).items() if value is not None}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(records, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3), damages), max_size=3),
)
def test_what_counts_is_what_json_reads(log: list[dict[str, Any]], cuts: list[tuple[int, int, bytes]]) -> None:
    data = b"".join(line_of(record, n) for n, record in enumerate(log))
    for at, length, put in cuts:
        at %= len(data)
        data = data[:at] + put + data[at + length :]
    data = data[: data.rfind(b"\n") + 1]
    expected = [parse(line) for line in data.split(b"\n")[:-1]]
    found = parse_lines(data)
    assert (found is None) == (None in expected)
    for record, fields in zip(found or [], expected, strict=False):
        assert fields is not None
        got = fields_of(record)
        assert got == {key: fields[key] for key in got}


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 10**400, 2**70, 3, "é\ud800", None, [1, None], {"a": {"b": []}}], ids=repr
)
def test_any_value_that_json_writes_comes_back(value: Any) -> None:
    attribute = {"op_code": 8, "trial_id": 0, "user_attr": {"u": value}}
    trial = replayed(b"".join(map(line_of, [*start, attribute], range(3)))).get_trial(0)
    assert repr(trial.user_attrs["u"]) == repr(value)


def test_reports_that_are_no_number_count_as_they_do_for_optuna() -> None:
    reports = [
        {"op_code": 7, "trial_id": 0, "step": n, "intermediate_value": v} for n, v in enumerate([math.nan, 1, 0.5])
    ]
    data = b"".join(map(line_of, [*start, *reports], range(5)))
    assert repr(replayed(data).get_trial(0).intermediate_values) == "{0: nan, 1: 1.0, 2: 0.5}"


def test_two_records_on_a_line_beside_an_empty_one_are_none() -> None:
    line = line_of(start[0], 0)
    assert parse_lines(line + line) is not None
    assert parse_lines(line[:-1] + line + b"\n") is None
    assert parse_lines(line[:-1] + b"," + line + b"\n") is None


def test_record_of_a_later_optuna_is_passed_over() -> None:
    later = {"op_code": 11, "worker_id": "a", "something": [1]}
    assert state_of(replayed(line_of(later, 0)))["read"] == 1
    assert json.loads(line_of(later, 0))["something"] == [1]
