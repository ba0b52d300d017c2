"""One agent of a study looks after trials whose node is gone, and asks Slurm for all of them.

Which one is told by a lease: a file that its holder rewrites with every beat. Two holders for a moment do no harm,
since a trial is recovered inside the journal's exclusive section. So the lease is short: after a few beats without a
change, which also a holder misses that waits for the journal, another agent looks.

Any other agent looks after what was left on its own host by an agent that is gone: it sees the processes, while Slurm
may have lost its own state, and show their job as running until its limit.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpcjobs import slurm_control
from hpcjobs.failures import Failure, FailureClass, is_journal_out_of_reach
from hpcjobs.heartbeat import HeartbeatWatch, read_node
from hpcjobs.liveness import gone
from hpcjobs.owners import OWNER, Owner, process_alive
from hpcjobs.paths import write_atomically
from hpcjobs.recovery import recover
from hpcjobs.study import OpenStudy

log = logging.getLogger("hpcjobs.guardian")

LOOK_S = 5.0
LEASE_S = 10.0
# Slurm is asked so often while all is well, and at every look while a running trial's node is silent
ASK_S = 60.0
ASK_IN_DOUBT_S = 10.0


class Guardian:
    """Looks after other nodes' trials as long as this agent holds the lease."""

    def __init__(self, study: OpenStudy, agent: str, *, with_slurm: bool) -> None:
        self._study = study
        self._agent = agent
        self._with_slurm = with_slurm
        self._watch = HeartbeatWatch(study.paths)
        self._lease = study.paths.nodes / ".guardian"
        self._beat = 0
        self._seen: tuple[Any, float] = (None, time.monotonic())
        self._holds = False
        self._looked = -LOOK_S
        self._asked = -ASK_S
        self.jobs: dict[str, slurm_control.JobState] = {}

    def tick(self) -> None:
        """Call this with every beat of the node."""
        now = time.monotonic()
        held, self._holds = self._holds, self._holds_lease(now)
        if now - self._looked < LOOK_S and held == self._holds:
            return
        self._looked = now
        try:
            if self._holds:
                self._look(now)
            else:
                self._look_here()
        except OSError as error:
            if not is_journal_out_of_reach(error):
                raise
            log.error("nothing is recovered now: %s", error)

    def _holds_lease(self, now: float) -> bool:
        """Take the lease if nobody has it or its holder has been silent, by our clock, for too long."""
        try:
            lease = json.loads(self._lease.read_bytes())
        except (FileNotFoundError, ValueError):
            lease = None
        if lease != self._seen[0]:
            self._seen = (lease, now)
        free = lease is None or lease.get("agent") in (self._agent, None)
        if not free and now - self._seen[1] < LEASE_S:
            return False
        if lease is not None and lease.get("agent") not in (self._agent, None):
            log.info("agent %s is silent: this one looks after other nodes' trials", lease["agent"])
        self._beat += 1
        return self._write_lease({"agent": self._agent, "beat": self._beat})

    def _write_lease(self, lease: dict[str, Any]) -> bool:
        try:
            write_atomically(self._lease, json.dumps(lease), durable=False)
        except OSError as error:  # a full disk, say: whoever can write next takes the lease
            log.warning("the guardian's lease cannot be written: %s", error)
            return False
        self._seen = (lease, time.monotonic())
        return True

    def release(self) -> None:
        """Leave the lease to the next agent at once."""
        if self._seen[0] is not None and self._seen[0].get("agent") == self._agent:
            self._write_lease({"agent": None})

    def _look(self, now: float) -> None:
        self._watch.look()
        owners = self._owners()
        strangers = [owner for _, owner in owners if not owner.is_visible]
        jobs = self._ask(now, strangers) if self._with_slurm else None
        for trial, owner in owners:
            reason = gone(owner, self._watch, jobs)
            if reason is None and jobs and self._is_doubtful(owner):
                reason = started_again(owner, jobs)
            if reason is not None:
                self._recover(trial, owner, reason)

    def _look_here(self) -> None:
        for trial, owner in self._owners():
            if owner.is_visible and not self._has_agent(owner):
                reason = gone(owner, self._watch, None)
                if reason is not None:
                    self._recover(trial, owner, reason)

    def _owners(self) -> list[tuple[FrozenTrial, Owner]]:
        """Running trials of other agents: each sees the ends of its own workers, and knows more about them."""
        running = self._study.trials((TrialState.RUNNING,))
        owners = [(trial, Owner.from_dict(trial.user_attrs.get(OWNER))) for trial in running]
        return [(trial, owner) for trial, owner in owners if owner is not None and owner.agent != self._agent]

    def _has_agent(self, owner: Owner) -> bool:
        """Whether the agent of a worker on this host is still there."""
        report = read_node(self._study.paths.node_file(owner.element))
        return report is not None and report.agent == owner.agent and process_alive(report.pid, report.start)

    def _ask(self, now: float, owners: list[Owner]) -> dict[str, slurm_control.JobState] | None:
        """Slurm's states of the jobs of these owners; None if it was not asked now or does not answer."""
        doubt = any(self._is_doubtful(owner) for owner in owners)
        if not owners or now - self._asked < (ASK_IN_DOUBT_S if doubt else ASK_S):
            return None
        self._asked = now
        try:
            return slurm_control.job_states(sorted({owner.job for owner in owners if owner.job}))
        except slurm_control.SlurmUnavailableError as error:
            log.warning("Slurm does not answer, nothing is recovered meanwhile: %s", error)
            return None

    def _is_doubtful(self, owner: Owner) -> bool:
        silent = self._watch.silent_s(owner.element)
        return silent is None or silent > LOOK_S * 2

    def _recover(self, trial: FrozenTrial, owner: Owner, reason: str) -> None:
        failure = Failure(FailureClass.NODE, f"worker {owner.worker} of {owner.element}: {reason}")
        successor = recover(self._study, trial._trial_id, owner.token, failure)
        log.warning("trial %d of a lost worker goes on as trial %s: %s", trial.number, successor, reason)


def started_again(owner: Owner, jobs: Mapping[str, slurm_control.JobState]) -> str | None:
    """Why the owner is gone, if its element has been queued again since and its new run has said nothing yet.

    It may never: Slurm can lose a job on a node that fails at that moment, and shows it as running until its limit.
    """
    known = [name for name in (owner.element, owner.job) if name in jobs]  # a job that is no array has no elements
    try:
        again = any(slurm_control.restarts(name) > owner.run for name in known)
    except slurm_control.SlurmUnavailableError as error:
        log.warning("Slurm does not tell how often %s was started: %s", owner.element, error)
        return None
    return f"Slurm has started {owner.element} again" if again else None


def recover_lost(study: OpenStudy, *, with_slurm: bool) -> list[tuple[int, int | None]]:
    """One look over a study from outside: recover what certainly has no owner any more. For submit and resume.

    A running trial without an owner of ours (an older journal, somebody's own script) is recovered too if no node of
    ours is alive.

    Returns:
        Pairs of the recovered trial's number and its successor's.
    """
    watch = HeartbeatWatch(study.paths)
    watch.look()
    owners = {t._trial_id: Owner.from_dict(t.user_attrs.get(OWNER)) for t in study.trials((TrialState.RUNNING,))}
    jobs = None
    if with_slurm:
        ids = {owner.job for owner in owners.values() if owner and owner.job}
        ids |= {element.partition("_")[0] for element, report in watch.reports.items() if report.state != "ended"}
        jobs = slurm_control.job_states(sorted(ids))
    recovered = []
    for trial_id, owner in owners.items():
        if owner is None:
            reason = None if live_nodes(watch, jobs) else "it has no owner and no node of the study is alive"
        else:
            reason = gone(owner, watch, jobs)
        if reason is not None:
            failure = Failure(FailureClass.NODE, reason)
            successor = recover(study, trial_id, owner.token if owner else None, failure)
            recovered.append((study.trial(trial_id).number, successor))
    return recovered


def live_nodes(watch: HeartbeatWatch, jobs: dict[str, slurm_control.JobState] | None) -> list[str]:
    """Elements of the study that may still run."""
    live = []
    for element, report in watch.reports.items():
        agent = Owner(
            "", "", "", report.node, report.host, report.pid, report.start, report.agent, element, run=report.run
        )
        if jobs is not None and element.partition("_")[0].isdigit():
            agent = Owner(**{**agent.as_dict(), "job": element.partition("_")[0], "agent": report.agent})
        if report.state != "ended" and gone(agent, watch, jobs) is None:
            live.append(element)
    return live
