"""What can be a user's mistake, told as one: shown without a traceback, exit code 2."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

EXIT_USER_ERROR = 2
# what a shell reports for a process that SIGPIPE has ended
EXIT_CLOSED_PIPE = 141
EXIT_INTERRUPTED = 130

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
# what a path that a user gave can be: not there, too long, in a loop of links, below a file, not ours, on a full disk
_OF_A_PATH = _NO_ROOM | frozenset(
    {errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.EACCES, errno.EPERM, errno.EROFS}
)


class UserError(Exception):
    """A mistake in what the user gave us. The message says where, what was found, what is allowed and what to do."""


def run_entry(main: Callable[[], int | None]) -> int:
    """Run an entry's ``main`` and turn a :class:`UserError` into its message on stderr and exit code 2.

    So is an error of the system that names a path and tells of that path, such as a missing permission.
    """
    _prepare_output()
    try:
        code = _told(main)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # so rich ends the process, with 1
            return EXIT_CLOSED_PIPE
        if ended.code:
            raise
        code = 0  # --help
    return _written_out(code)


def tell_missing_module(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For ``sys.excepthook``: one line instead of a traceback where a file of ours imports what is not installed.

    Such an import stands above an entry's ``main``, out of reach of :func:`run_entry`. All else is shown as ever, so is
    a module of our own that is missing, and one that an installed package lacks.
    """
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    is_here = last is not None and Path(last.tb_frame.f_code.co_filename).parent == Path(__file__).parent
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not is_here or name in ("", "hpcjobs", "autospeed_model", "hip_kernels"):
        sys.__excepthook__(kind, error, trace)
        return
    print(
        f"error: No module named {name!r} for {sys.executable}; activate the environment that has it (in a checkout: "
        "source .venv/bin/activate), or install what is missing there (docs/my-cluster.md)",
        file=sys.stderr,
    )


def _told(main: Callable[[], int | None]) -> int:
    try:
        if "" in sys.argv[1:]:
            # taken for a path, it would be the working folder
            raise UserError("found an empty argument; allowed: text; is a shell variable in it not set?")
        return main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return EXIT_CLOSED_PIPE
    except OSError as error:
        if error.errno in _NO_ROOM:  # a write to a file that is open, standard output say, names none
            print(f"error: {error.filename or 'a file'}: {error.strerror}; make room", file=sys.stderr)
        elif error.errno in _OF_A_PATH and error.filename is not None:
            print(f"error: {error.filename}: {error.strerror}; check the path and who may use it", file=sys.stderr)
        else:
            raise
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _written_out(code: int) -> int:
    """Write what the buffer still holds; an error of it while the interpreter ends could not be told any more."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes it once more at the end
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            return code or EXIT_CLOSED_PIPE
        if not code:
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
        return code or EXIT_USER_ERROR
    return code


def _prepare_output() -> None:
    """Names in any script can be printed, whatever the terminal's own; what is closed swallows all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _reader_is_gone() -> bool:
    """Whether it is our standard output that is closed, and not some connection."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))
