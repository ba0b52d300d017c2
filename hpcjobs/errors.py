"""What can be a user's mistake, told as one: shown without a traceback, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2


class UserError(Exception):
    """A mistake in what the user gave us. The message says where, what was found, what is allowed and what to do."""


def run_entry(main: Callable[[], int | None]) -> int:
    """Run an entry's ``main`` and turn a :class:`UserError` into its message on stderr and exit code 2."""
    try:
        return main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
