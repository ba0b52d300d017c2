"""The pages for clusters, with a real Slurm: a site without a profile, from the doctor to the morning after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.emulator import Cluster
from tests.test_docs import CLUSTER_PAGES, DOCS, commands_of, run, write_example


def test_the_pages_for_clusters_go_as_they_say(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_example(tmp_path, with_gpu=False)
    environment = {name: cluster.env[name] for name in ("SLURM_CONF", "ROCM_PATH")}
    for page in CLUSTER_PAGES:
        for command in commands_of(DOCS / page):
            run(command, tmp_path, **environment)
    assert (tmp_path / "runs" / "first" / "results" / "report.html").is_file()
