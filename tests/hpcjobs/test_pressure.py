"""Whether the host is the limit, from files as the kernel writes them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from hpcjobs.heartbeat import NodeReport
from hpcjobs.pressure import HostWatch, Pressure, PressureLog, busy_devices
from hpcjobs.progress import NodeLine
from hpcjobs.status_view import Nodes
from tests.hpcjobs.conftest import wait_for


def write_proc(folder: Path, busy: int, idle: int, waited_us: int, other_cpu: int = 0) -> None:
    """Two CPUs, of which number 1 belongs to somebody else."""
    rest = "0 0"
    lines = [
        f"cpu  9 9 9 9 9 9 9 9 {rest}",
        f"cpu0 {busy} 0 0 {idle} 0 0 0 0 {rest}",
        f"cpu1 {other_cpu} 0 0 0 0 0 0 0 {rest}",
    ]
    (folder / "stat").write_text("\n".join([*lines, "intr 1 2 3", ""]))
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 250 kB\nCached: 2097152 kB\n")
    (folder / "pressure").mkdir(exist_ok=True)
    (folder / "pressure" / "cpu").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited_us}\n")


def test_only_our_cpus_count_and_waits_are_shares_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 102.0])
    monkeypatch.setattr("hpcjobs.pressure.time.monotonic", lambda: next(now))
    write_proc(tmp_path, busy=100, idle=100, waited_us=0)
    samples = iter([[0.5, 1.0], [0.0, 0.5]])
    watch = HostWatch([0], lambda: next(samples), tmp_path)
    watch.sample()
    watch.sample()
    write_proc(tmp_path, busy=175, idle=125, waited_us=500_000, other_cpu=10**6)
    found = watch.end()
    assert (found.seconds, found.cpus, found.cpu_busy) == (2.0, 1, 0.75)
    assert (found.memory_free, found.page_cache_gb) == (0.25, 2.0)
    assert (found.cpu_wait, found.memory_wait, found.storage_wait) == (0.25, None, None)
    assert found.device_busy == 0.5


def test_this_machine_can_be_watched() -> None:
    found = HostWatch(os.sched_getaffinity(0)).end()
    assert 0 <= found.cpu_busy <= 1 and 0 < found.memory_free <= 1
    assert found.as_dict()["cpus"] == len(os.sched_getaffinity(0))


def pressure(**change: float) -> Pressure:
    return Pressure(**{"seconds": 10, "cpus": 96, "cpu_busy": 0.5, "memory_free": 0.5, "page_cache_gb": 1, **change})


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({}, None),
        ({"cpu_busy": 0.97, "device_busy": 0.5}, "CPUs: 97% of 96 busy, devices idle 50% of the time; fewer workers"),
        ({"cpu_busy": 0.97, "device_busy": 0.95}, None),
        ({"cpu_busy": 0.97}, "CPUs: 97% of 96 busy; fewer workers or loader threads"),
        ({"cpu_wait": 0.5, "device_busy": 0.1}, "tasks waited for them 50% of the time, devices idle 90%"),
        ({"memory_free": 0.02}, "memory: 2% of it is available; fewer workers need less"),
        ({"memory_wait": 0.2, "device_busy": 1.0}, "tasks waited for it 20% of the time"),
        ({"storage_wait": 0.5, "device_busy": 0.3}, "storage: tasks waited for it 50% of the time, devices idle 70%"),
    ],
)
def test_the_host_is_the_limit_only_where_something_waits_for_it(change: dict[str, float], limit: str | None) -> None:
    found = pressure(**change).limit
    assert found is None if limit is None else limit in (found or "")


def test_an_agent_gets_one_figure_a_period_and_busy_cpus_are_fine_where_nothing_else_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpcjobs.pressure.PERIOD_S", 0.0)
    log = PressureLog(os.sched_getaffinity(0), "none", has_gpus=False)
    found = log.look()
    assert found is not None and found.device_busy == found.cpu_busy
    monkeypatch.setattr("hpcjobs.pressure.PERIOD_S", 60.0)
    assert log.look() is None


def test_status_tells_which_host_is_the_limit_and_of_a_node_that_has_ended_no_more() -> None:
    def shown(state: str) -> str:
        report = NodeReport("1_0", "a", "h", "gpu7", 1, "s", state=state)
        report.host_limit = pressure(cpu_busy=0.95, device_busy=0.4).limit or ""
        report.pressure = {"cpu_busy": 0.95}
        out = io.StringIO()
        Console(width=120, file=out).print(Nodes([NodeLine(report, state, 0.0)]))
        return " ".join(out.getvalue().split())

    assert "gpu7: the host is the limit: CPUs: 95% of" in shown("running")
    assert "devices idle 60% of the time" in shown("running")
    assert "the host is the limit" not in shown("ended")


def test_nvidia_smi_is_asked_without_waiting_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that hangs must not hold up the node's agent."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    os.mkfifo(tmp_path / "answer")
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\necho asked >> {tmp_path}/asked\nread -r line < {tmp_path}/answer\necho "$line"\necho 40\n'
    )
    script.chmod(0o755)
    ask = busy_devices("nvidia")
    assert ask is not None
    assert [ask(), ask(), ask()] == [[], [], []]
    (tmp_path / "answer").write_text("[N/A]\n")  # waits until the program reads
    assert wait_for(ask, what="the answer") == [0.4]
    (tmp_path / "answer").write_text("100\n")
    assert wait_for(ask, what="the next answer") == [1.0, 0.4]
    (tmp_path / "answer").write_text("0\n")
    wait_for(lambda: (tmp_path / "asked").read_text().count("asked") == 3, what="the third question")


def test_devices_that_cannot_be_asked_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hpcjobs.pressure.DRM", tmp_path)
    assert busy_devices("nvidia") is None and busy_devices("amd") is None and busy_devices("none") is None
    for card, text in (("card0", "37\n"), ("card1", "N/A\n"), ("card2", "80\n")):
        (tmp_path / card / "device").mkdir(parents=True)
        (tmp_path / card / "device" / "gpu_busy_percent").write_text(text)
    ask = busy_devices("amd")
    assert ask is not None and ask() == [0.37, 0.8]
