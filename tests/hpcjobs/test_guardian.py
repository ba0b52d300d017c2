"""One agent looks after lost workers, and another one does when it is silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState

from hpcjobs import guardian
from hpcjobs.agent import new_report
from hpcjobs.budget import claim
from hpcjobs.guardian import LEASE_S, LOOK_S, Guardian
from hpcjobs.job import Job
from hpcjobs.owners import Owner
from hpcjobs.slurm_control import JobState, SlurmUnavailableError
from hpcjobs.study import OpenStudy

BEAT_S = 2.0


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass for all agents."""
    now = [1000.0]

    def go_on(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(guardian, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return go_on


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that job 17 was cancelled."""
    monkeypatch.setattr(guardian.slurm_control, "job_states", lambda ids: {"17_0": JobState("CANCELLED")})


def lose_a_trial(study: OpenStudy, **of_its_owner: Any) -> Callable[[], bool]:
    """Let a trial's worker be gone, on another host; tells whether the trial was recovered."""
    owner = Owner.of_this_process(element="17_0", agent="its agent", worker=0, token="of the dead")
    trial_id = claim(study, dataclasses.replace(owner, **{"host": "another", "job": "17", **of_its_owner}))
    assert trial_id is not None
    return lambda: study.trial(trial_id).state == TrialState.FAIL


@pytest.mark.usefixtures("slurm")
def test_only_one_agent_looks_as_long_as_it_beats(studies: Any, go_on: Callable[[float], None]) -> None:
    study = studies.create("quadratic")
    first, second = (Guardian(study, name, with_slurm=True) for name in ("first", "second"))
    for _ in range(int(3 * LEASE_S / BEAT_S)):
        first.tick()
        second.tick()
        go_on(BEAT_S)
    first.tick()
    recovered = lose_a_trial(study)
    second.tick()
    assert not recovered()
    go_on(LOOK_S)
    first.tick()
    assert recovered()


@pytest.mark.usefixtures("slurm")
def test_another_agent_takes_over_from_a_silent_one_which_then_leaves_it_alone(
    studies: Any, go_on: Callable[[float], None]
) -> None:
    study = studies.create("quadratic")
    first, second = (Guardian(study, name, with_slurm=True) for name in ("first", "second"))
    first.tick()
    second.tick()
    recovered = lose_a_trial(study)
    go_on(LEASE_S - 0.1)
    second.tick()
    assert not recovered()
    go_on(0.2)
    second.tick()
    assert recovered()
    another = lose_a_trial(study)
    while not another():
        first.tick()
        assert not another()
        go_on(BEAT_S)
        second.tick()


@pytest.mark.usefixtures("slurm")
def test_an_agent_that_ends_leaves_the_lease_to_the_next_one_at_once(
    studies: Any, go_on: Callable[[float], None]
) -> None:
    study = studies.create("quadratic")
    first, second = (Guardian(study, name, with_slurm=True) for name in ("first", "second"))
    first.tick()
    second.tick()
    first.release()
    recovered = lose_a_trial(study)
    go_on(BEAT_S)
    second.tick()
    assert recovered()


@pytest.mark.parametrize("name", ["17_0", "17"])  # of an array, and of a job that is none
@pytest.mark.parametrize(("restarts", "is_gone"), [(0, False), (1, True), (None, False)])
def test_an_element_that_was_queued_again_and_says_nothing_has_lost_its_former_run(
    restarts: int | None, is_gone: bool, name: str, studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows it as running for its whole time limit if the node failed when its new run was about to begin."""

    def told(job: str) -> int:
        assert job == name
        if restarts is None:
            raise SlurmUnavailableError("no answer")
        return restarts

    monkeypatch.setattr(guardian.slurm_control, "job_states", lambda ids: {name: JobState("RUNNING")})
    monkeypatch.setattr(guardian.slurm_control, "restarts", told)
    study = studies.create("quadratic")
    recovered = lose_a_trial(study, run=0)
    Guardian(study, "here", with_slurm=True).tick()
    assert recovered() == is_gone


@pytest.mark.parametrize("has_agent", [True, False])
def test_any_agent_sees_what_an_agent_that_is_gone_has_left_on_its_host(has_agent: bool, studies: Any) -> None:
    """Slurm may have lost its state and show the job as running. A living agent looks after its workers itself."""
    study = studies.create("quadratic")
    Guardian(study, "on another host", with_slurm=True).tick()
    agent = new_report(Job("17_0", "17_0"), "its agent")
    if not has_agent:
        agent.start = "long ago"
    agent.write(study.paths)
    recovered = lose_a_trial(study, host=agent.host, start="long ago")
    Guardian(study, "here", with_slurm=True).tick()
    assert recovered() == (not has_agent)
