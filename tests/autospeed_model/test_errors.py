"""How entries end: mistakes, paths that cannot be used and divergence are messages, everything else a traceback."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from autospeed_model.errors import DivergedError, UserError, run_entry


def raising(error: BaseException) -> int:
    raise error


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["entry"])


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (UserError("a mistake"), 2, "error: a mistake\n"),
        (DivergedError("epoch 1: the loss is not finite"), 1, "error: epoch 1: the loss is not finite\n"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "/a/path"), 2, "error: /a/path: Permission denied; check"),
    ],
)
def test_what_a_user_can_mend_is_a_message(
    error: Exception, code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_entry(lambda: raising(error)) == code
    assert capsys.readouterr().err.startswith(expected)


def test_any_other_error_keeps_its_traceback() -> None:
    with pytest.raises(OSError, match="input/output"):
        run_entry(lambda: raising(OSError(errno.EIO, "input/output error", "/a/path")))


def test_an_empty_argument_is_not_taken_for_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["entry", "--data", ""])
    assert run_entry(lambda: 0) == 2
    assert "found an empty argument" in capsys.readouterr().err
