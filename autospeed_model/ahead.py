"""Work of the host that is done while the device, or this thread, does other things."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def ahead(function: Callable[[Argument], Result], arguments: Iterable[Argument]) -> Iterator[Result]:
    """``map(function, arguments)``, in order, the next result being made in a thread while the last one is used."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=getattr(function, "__name__", "ahead"))
    try:
        pending = None
        for argument in arguments:
            following = executor.submit(function, argument)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()
    finally:
        executor.shutdown(cancel_futures=True)
