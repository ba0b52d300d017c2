"""The worker's log, which an objective in the same process can neither close nor silence."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = "hpcjobs"


class _ToDescriptor(logging.Handler):
    """Writes to a descriptor of its own. What cannot be written, on a full disk say, is lost and harms nobody."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line)


class WorkerLog:
    """Holds the standard error with which the worker began. Other loggers than ours write there as they did."""

    def __init__(self) -> None:
        self._descriptor = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
        self._handler = _ToDescriptor(self._descriptor)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=_FORMAT)
        self.restore()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around what runs an objective's code."""
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Undo what an objective's code has done to our loggers, or has closed, as far as ours depends on it."""
        logging.disable(logging.NOTSET)
        ours = logging.getLogger(_OURS)
        ours.handlers, ours.filters, ours.propagate = [self._handler], [], False
        ours.setLevel(logging.INFO)
        below = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(f"{_OURS}.")]
        for logger in below:
            logger.handlers, logger.filters, logger.propagate = [], [], True
            logger.setLevel(logging.NOTSET)
        for logger in (ours, *below):
            logger.disabled = False
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name)
            if stream is None or getattr(stream, "closed", False):
                self._reopen(name, number)

    def _reopen(self, name: str, number: int) -> None:
        """What the next trial prints must not fail because this one has closed the stream."""
        try:
            os.fstat(number)
        except OSError:
            os.dup2(self._descriptor, number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False))
