"""A model of a parallel filesystem's latencies on a local one: a named model, not a measurement of any site.

Every lock and every call that a metadata server answers (open, stat, link, rename, unlink, flock) takes 0.5 ms more,
and every sync 3 ms more. Reads and writes of open files take nothing more.
"""

from __future__ import annotations

import builtins
import fcntl
import os
import time
from collections.abc import Callable
from typing import Any

METADATA_S = 0.0005
SYNC_S = 0.003

_METADATA_CALLS = ["open", "stat", "fstat", "lstat", "symlink", "link", "rename", "replace", "unlink"]
_SYNC_CALLS = ["fsync", "fdatasync"]


def _delayed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return call


def install() -> None:
    """Add the latencies to this process, for whichever storage it uses."""
    for name in _METADATA_CALLS:
        setattr(os, name, _delayed(getattr(os, name), METADATA_S))
    for name in _SYNC_CALLS:
        setattr(os, name, _delayed(getattr(os, name), SYNC_S))
    fcntl.flock = _delayed(fcntl.flock, METADATA_S)  # type: ignore[assignment]
    builtins.open = _delayed(builtins.open, METADATA_S)  # type: ignore[assignment]
