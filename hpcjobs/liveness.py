"""Is the owner of a running trial still there? A live trial is never taken away, so doubt means yes."""

from __future__ import annotations

from collections.abc import Mapping

from hpcjobs.heartbeat import OLD_S, HeartbeatWatch
from hpcjobs.owners import Owner, process_alive
from hpcjobs.slurm_control import ALIVE, GONE, WAITING, JobState

# Slurm says so when all processes of a job have ended, or are on a node that it has given up.
ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)
# Without Slurm's word another host's silence proves little: its network or filesystem may only be slow.
SILENT_WITHOUT_SLURM_S = 900.0


def gone(owner: Owner, watch: HeartbeatWatch, jobs: Mapping[str, JobState] | None) -> str | None:
    """Why the owner is certainly gone, or None if it may be alive.

    Args:
        watch: the nodes' heartbeats as seen by this process.
        jobs: Slurm's states by element; None if Slurm was not asked or did not answer.
    """
    if owner.is_visible:
        return None if process_alive(owner.pid, owner.start) else f"its process {owner.pid} on this host has ended"
    report = watch.reports.get(owner.element)
    silent = watch.silent_s(owner.element)
    # by number: an agent of an earlier run that only stood still writes its file again until it notices
    if report is not None and report.run > owner.run:
        return f"{owner.element} was started again"
    if report is not None and report.agent == owner.agent and report.state == "ended":
        return f"node {owner.node} has ended"
    if owner.job:
        if jobs is None:
            return None
        state = jobs.get(owner.element) or jobs.get(owner.job) or GONE
        if state.state in ALIVE:
            return None
        # a job that Slurm does not know may only have been forgotten, and go on
        if state.state in WAITING | ENDED or silent is None or silent > OLD_S:
            return f"Slurm says that {owner.element} is {state.state}"
        return None
    if silent is None or silent > SILENT_WITHOUT_SLURM_S:
        return f"host {owner.host} is silent"
    return None
