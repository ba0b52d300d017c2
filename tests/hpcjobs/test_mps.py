"""NVIDIA's service for shared GPUs, played by a script that writes down what it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcjobs import mps

VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the script, whose file ``said`` has one line a call: its arguments and its input."""
    script = tmp_path / "nvidia-cuda-mps-control"
    script.write_text(f"""#!/bin/sh
read -r line <&0
echo "$1:$line:$CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/said
case "$1$line" in $(cat {tmp_path}/hangs 2>/dev/null || echo never)) exec sleep 600 ;; esac
exit $(cat {tmp_path}/code 2>/dev/null || echo 0)
""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_workers_find_a_service_of_their_node_which_ends_with_them(
    service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_PROBE", "pass")
    with mps.shared_gpus(service) as there:
        assert there
        assert {name: os.environ[name] for name in VARIABLES} == {
            "CUDA_MPS_PIPE_DIRECTORY": str(service / "mps_pipe"), "CUDA_MPS_LOG_DIRECTORY": str(service / "mps_log"),
        }  # fmt: skip
    assert (service / "said").read_text().splitlines() == [f"-d::{service}/mps_pipe", f":quit:{service}/mps_pipe"]
    assert not [name for name in VARIABLES if name in os.environ]


@pytest.mark.parametrize("broken", ["service", "client"])
def test_where_it_does_not_work_workers_do_not_look_for_it(
    service: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(mps, "_PROBE", "import sys; sys.exit(1)" if broken == "client" else "pass")
    if broken == "service":
        (service / "code").write_text("1")
    with mps.shared_gpus(service) as there:
        assert not there
        assert not [name for name in VARIABLES if name in os.environ]
    assert {line.rpartition(":")[2] for line in (service / "said").read_text().splitlines()} == {f"{service}/mps_pipe"}


@pytest.mark.parametrize(("hangs", "works"), [("-d", False), ("quit", True)])
def test_a_service_that_hangs_holds_up_no_node(
    service: Path, monkeypatch: pytest.MonkeyPatch, hangs: str, works: bool
) -> None:
    """At its start workers go without it; at its end the node goes on to queue its element again."""
    monkeypatch.setattr(mps, "_PROBE", "pass")
    monkeypatch.setattr(mps, "TIMEOUT_S", 2)
    (service / "hangs").write_text(hangs)
    with mps.shared_gpus(service) as there:
        assert there is works
    assert not [name for name in VARIABLES if name in os.environ]


def test_the_sites_own_service_is_left_alone(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/site")
    with mps.shared_gpus(service) as there:
        assert there
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/site"
    assert not (service / "said").exists()


def test_machines_without_it_share_as_they_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.shared_gpus(tmp_path) as there:
        assert not there
