"""The emulated cluster as fixtures; every test in this folder carries the mark ``cluster``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.emulator import Cluster, why_not_here

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def session_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster of four nodes for the whole run. Tests want ``cluster``, which tidies up after each of them."""
    reason = why_not_here()
    if reason and os.environ.get("HPCJOBS_REQUIRE_CLUSTER") == "1":
        pytest.fail(f"HPCJOBS_REQUIRE_CLUSTER=1, but {reason}")
    if reason:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """A running cluster without jobs, its nodes idle, its GPUs in SPX and without faults."""
    session_cluster.reset()
    yield session_cluster
    session_cluster.reset()
