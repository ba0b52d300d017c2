"""What goes wrong in AutoSpeed's data and training, by who can do something about it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2

# what a path that a user gave can be: too long, a loop of links, below or in place of a file, not ours, on a full disk
_OF_A_PATH = frozenset(
    {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM}
    | {errno.EROFS, errno.ENOSPC, errno.EDQUOT}
)


class UserError(ValueError):
    """A mistake in what the user gave us. The message says where, what was found, what is allowed and what to do."""


class DivergedError(ArithmeticError):
    """The loss is no longer a finite number: the hyper-parameters are at fault, not the machine."""


def run_entry(main: Callable[[], int | None]) -> int:
    """Run an entry's ``main``; a :class:`UserError` becomes its message on stderr and exit code 2.

    So does an error of the system that names a path and tells of that path, such as a missing permission. A training
    that has diverged ends with its message and exit code 1.
    """
    try:
        if "" in sys.argv[1:]:
            # taken for a path, it would be the working folder
            raise UserError("found an empty argument; allowed: text; is a shell variable in it not set?")
        return main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _OF_A_PATH or error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; check the path and who may use it", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
