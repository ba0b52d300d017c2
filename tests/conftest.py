"""The order of the tests, which run in several processes, file by file (``pytest -n 3 --dist loadfile``)."""

from __future__ import annotations

from pathlib import Path

import pytest

CLUSTER = Path(__file__).parent / "cluster"
LONGEST = ("test_chaos.py", "test_failures.py", "test_growing.py", "test_requeue.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cluster's tests first, which mostly wait, so that the others fill what they leave of the processor."""
    items.sort(key=lambda item: (CLUSTER not in item.path.parents, item.path.name not in LONGEST))
