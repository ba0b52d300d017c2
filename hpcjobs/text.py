"""Numbers and times as people read and write them."""

from __future__ import annotations

import argparse
import contextlib
import math


def number_text(value: object) -> str:
    """A value with at most four significant digits; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        # 12000.0 is no 1.2e+04
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    return str(value)


def counted(number: int, noun: str) -> str:
    """So many of it: ``1 trial``, ``2 trials``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float | None) -> str:
    """Seconds in the two units that matter."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def positive(text: str) -> int:
    """A whole number of at least 1 from the command line."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A finite time from the command line, in seconds."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number of seconds, 0 or more")
