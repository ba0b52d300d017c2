"""How the tests are spread over processes (``pytest -n 3 --dist loadgroup``)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# these share something costly: a running cluster, a compiled extension
TOGETHER = ("cluster", "hip_kernels")
# so long that they have a cluster of their own, beside that of the others
FAULTS = ("test_chaos.py", "test_failures.py", "test_growing.py", "test_requeue.py")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep a file's tests in one process, and those of the cluster, which mostly wait, beside all others."""
    folder = item.path.relative_to(HERE).parts[0]
    group = folder if folder in TOGETHER else item.path.name
    item.add_marker(pytest.mark.xdist_group("faults" if item.path.name in FAULTS else group))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""
    items.sort(key=lambda item: (HERE / "cluster" not in item.path.parents, item.path.name not in FAULTS))
