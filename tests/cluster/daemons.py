"""Start daemons of an emulated cluster, and end exactly what such a cluster started, also after its owner was killed.

Daemons carry a mark in their environment that names the cluster's folder and its owner, the process that started it.
slurmstepd overwrites its environment with its title, but holds its daemon's log; the tasks of jobs have SLURM_CONF.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MARK = "EMULATED_CLUSTER"
OWNER = "EMULATED_CLUSTER_OWNER"


class ClusterError(RuntimeError):
    """The emulated cluster did not do what it had to; the message names the log to read."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
    """Poll until ``condition`` holds; ClusterError naming ``what`` when it does not in time.

    The time is for what never comes: on a busy machine everything may take many times as long as on an idle one.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout_s:g} s in vain for: {what}")
        time.sleep(0.05)


PORTS_OF_ONE = 100
_held: list[socket.socket] = []


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive free ports on 127.0.0.1, below the range that the kernel hands out itself.

    They stay this process's until it ends, also while nothing listens there yet: several clusters start at once.
    """
    assert count <= PORTS_OF_ONE
    for _ in range(1000):
        first = random.SystemRandom().randrange(12000, 30000, PORTS_OF_ONE)
        if _hold(first) and all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ClusterError(f"no {count} consecutive free ports between 12000 and 30000")


def _hold(first: int) -> bool:
    """Take a name that only one process can have at a time, and that the kernel frees with it."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0ports of an emulated cluster, from {first}")
    except OSError:
        name.close()
        return False
    _held.append(name)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def start_daemon(arguments: list[str], folder: Path, log: Path, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a daemon in the foreground of a session of its own, marked as part of the cluster in ``folder``."""
    system = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    mark = {MARK: str(folder), OWNER: f"{os.getpid()}:{_start_time(os.getpid())}"}
    with log.open("ab") as output:
        return subprocess.Popen(
            arguments, env={**system, **mark, **extra}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, cwd="/",
        )  # fmt: skip


def _start_time(pid: int) -> str:
    """When the process started, in clock ticks: with the pid it names a process for good. Empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _belongs(pid: int, folder: Path) -> bool:
    environment = _environment(pid)
    if environment.get(MARK) == str(folder):
        return True
    # a task of a job; a person's shell that exported SLURM_CONF is none
    if "SLURM_JOB_ID" in environment and environment.get("SLURM_CONF", "").startswith(f"{folder}/"):
        return True
    return _is_step_daemon(pid, folder)


def _is_step_daemon(pid: int, folder: Path) -> bool:
    try:
        if not Path(f"/proc/{pid}/comm").read_text().startswith("slurm"):
            return False
        return any(folder in link.readlink().parents for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def end_processes(folder: Path) -> None:
    """Kill every daemon, step and task of the cluster in ``folder``, and wait until they are gone."""
    deadline = time.monotonic() + 120
    while members := [pid for pid in _pids() if pid != os.getpid() and _belongs(pid, folder)]:
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise ClusterError(f"processes of {folder} survive SIGKILL: {members}")
        time.sleep(0.05)


def end_abandoned() -> list[Path]:
    """End the clusters whose owner is gone (killed with -9, say); their folders."""
    abandoned = set()
    for pid in _pids():
        environment = _environment(pid)
        owner, _, started = environment.get(OWNER, "").partition(":")
        if owner and _start_time(int(owner)) != started:
            abandoned.add(Path(environment[MARK]))
    for folder in abandoned:
        end_processes(folder)
    return sorted(abandoned)
