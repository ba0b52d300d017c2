"""Who runs a trial, and whether a process is still the one that it was."""

from __future__ import annotations

import functools
import os
import re
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpcjobs.journal_lock import boot_id, process_namespace

OWNER = "hpcjobs:owner"


@functools.cache
def _here() -> tuple[str, str]:
    """This boot and this namespace of process ids."""
    return boot_id()[:8], re.sub(r"\D", "", process_namespace())


def node_name() -> str:
    """Slurm's name of this node, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def process_start(pid: int) -> str | None:
    """Boot, namespace and start time (clock ticks) of a living process; None when there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the command name in parentheses may hold spaces and parentheses itself
    after_name = text.rpartition(")")[2].split()
    if after_name[0] in "ZX":
        return None
    return ":".join([*_here(), after_name[19]])


def is_visible(host: str, start: str) -> bool:
    """Whether this process can tell if one of ``host`` that began at ``start`` is still there.

    It cannot see into another host, nor out of or into a container with process ids of its own. After a reboot of this
    host it knows that the process is gone.
    """
    boot, namespace = _here()
    return host == socket.gethostname() and (start.split(":")[0] != boot or start.split(":")[1] == namespace)


def process_alive(pid: int, start: str) -> bool:
    """Is process ``pid`` of this host the one that began at ``start``? Only true where it is visible."""
    return process_start(pid) == start


def process_gone(pid: int, start: str, host: str | None = None) -> bool:
    """Has the process certainly ended? Not the contrary of :func:`process_alive`: of some nothing is known."""
    return is_visible(host or socket.gethostname(), start) and not process_alive(pid, start)


@dataclass(frozen=True)
class Owner:
    """The worker that runs a trial. ``token`` is drawn anew for every start of a worker."""

    job: str
    task: str
    step: str
    node: str
    host: str
    pid: int
    start: str
    token: str
    element: str = ""
    agent: str = ""  # token of the node agent that started the worker
    worker: int = 0
    run: int = 0  # how often Slurm has queued the element again

    @classmethod
    def of_this_process(cls, *, element: str, agent: str, worker: int, token: str) -> Owner:
        environment = os.environ
        return cls(
            job=environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID", ""),
            task=environment.get("SLURM_ARRAY_TASK_ID", ""),
            step=environment.get("SLURM_STEP_ID", ""),
            node=node_name(),
            host=socket.gethostname(),
            pid=os.getpid(),
            start=process_start(os.getpid()) or "",
            token=token,
            element=element,
            agent=agent,
            worker=worker,
            run=int(environment.get("SLURM_RESTART_COUNT") or 0),
        )

    @classmethod
    def from_dict(cls, data: Any) -> Owner | None:
        """Read the attribute of a trial; None for what is not one of ours."""
        if not isinstance(data, dict) or not data.get("token"):
            return None
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError:
            return None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_visible(self) -> bool:
        """Whether this process can tell by itself if the owner is still there."""
        return is_visible(self.host, self.start)
