"""How entries end: mistakes and errors that tell of a path are messages, everything else keeps its traceback."""

from __future__ import annotations

import errno
import io
import os
import sys

import pytest

from hpcjobs.errors import EXIT_USER_ERROR, UserError, run_entry


def raising(error: BaseException) -> int:
    raise error


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["entry"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("a mistake"), "error: a mistake\n"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "/a/path"), "error: /a/path: Permission denied; check"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "error: a file: No space left on device; make room"),
        (OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "/a/path"), "error: /a/path: File name too"),
    ],
)
def test_what_a_user_can_mend_is_a_message(error: Exception, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_entry(lambda: raising(error)) == EXIT_USER_ERROR
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "input/output error", "/a/path"), OSError(errno.EACCES, "no path"), ValueError("bug")]
)
def test_any_other_error_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_entry(lambda: raising(error))


def test_an_empty_argument_is_not_taken_for_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["entry", "--data", ""])
    assert run_entry(lambda: 0) == EXIT_USER_ERROR
    assert "found an empty argument" in capsys.readouterr().err


def test_output_in_another_encoding_or_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert run_entry(lambda: print("größe")) == 0
    assert written.getvalue() == b"gr\\xf6\\xdfe\n"
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert run_entry(lambda: print(sys.stdout.isatty(), sys.stderr.isatty())) == 0
