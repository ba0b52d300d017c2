"""What goes wrong in AutoSpeed's data and training, by who can do something about it."""

from __future__ import annotations

import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2


class UserError(ValueError):
    """A mistake in what the user gave us. The message says where, what was found, what is allowed and what to do."""


class DivergedError(ArithmeticError):
    """The loss is no longer a finite number: the hyper-parameters are at fault, not the machine."""


def run_entry(main: Callable[[], int | None]) -> int:
    """Run an entry's ``main``; a :class:`UserError` becomes its message on stderr and exit code 2."""
    try:
        return main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
