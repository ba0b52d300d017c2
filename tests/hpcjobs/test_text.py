"""Numbers of the command line."""

from __future__ import annotations

import argparse

import pytest

from hpcjobs import cancel
from hpcjobs.text import counted, positive, seconds


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("2.5", 2.5), ("1e3", 1000.0)])
def test_seconds(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon", ""])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed: a number of seconds, 0 or more"):
        seconds(text)


@pytest.mark.parametrize(("number", "text"), [(0, "0 cells"), (1, "1 cell"), (2, "2 cells")])
def test_one_thing_is_not_many(number: int, text: str) -> None:
    assert counted(number, "cell") == text


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "², ", "many"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed: a whole number of at least 1"):
        positive(text)


def test_cancel_refuses_such_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cancel.main(["runs/experiment1", "--wait", "nan"])
    assert ended.value.code == 2
    assert "argument --wait: found 'nan'" in capsys.readouterr().err
