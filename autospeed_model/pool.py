"""Work spread over processes that end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Each(Protocol):
    """Like ``map``, but results come in any order."""

    def __call__(self, function: Callable[[Task], Result], tasks: Iterable[Task], /) -> Iterator[Result]: ...


@contextmanager
def spread(jobs: int) -> Iterator[Each]:
    """A function like ``map`` that runs on ``jobs`` processes and yields results as they come, few tasks ahead.

    With one job everything runs in this process. An exception of a task is raised here, and ends the others.
    """
    if jobs == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent) as pool:

        def each(function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
            waiting: set[Future[Result]] = set()
            for task in tasks:
                waiting.add(pool.submit(function, task))
                if len(waiting) >= 3 * jobs:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)

        try:
            yield each
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """End this worker when its parent is gone: after a ``kill -9`` it would wait for work for ever."""
    threading.Thread(target=_wait_for_end_of_parent, daemon=True).start()


def _wait_for_end_of_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
