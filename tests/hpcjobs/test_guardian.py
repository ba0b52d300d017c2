"""One agent looks after lost workers, and another one does when it is silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState

from hpcjobs import guardian
from hpcjobs.budget import claim
from hpcjobs.guardian import LEASE_S, LOOK_S, Guardian
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


def lose_a_trial(study: OpenStudy) -> Callable[[], bool]:
    """Let a trial's worker be gone; tells whether the trial was recovered."""
    owner = Owner.of_this_process(element="here_1", agent="its agent", worker=0, token="of the dead")
    trial_id = claim(study, dataclasses.replace(owner, start="long ago"))
    assert trial_id is not None
    return lambda: study.trial(trial_id).state == TrialState.FAIL


def test_only_one_agent_looks_as_long_as_it_beats(studies: Any, go_on: Callable[[float], None]) -> None:
    study = studies.create("quadratic")
    first, second = (Guardian(study, name, with_slurm=False) for name in ("first", "second"))
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


def test_another_agent_takes_over_from_a_silent_one_which_then_leaves_it_alone(
    studies: Any, go_on: Callable[[float], None]
) -> None:
    study = studies.create("quadratic")
    first, second = (Guardian(study, name, with_slurm=False) for name in ("first", "second"))
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
    go_on(LOOK_S)
    first.tick()
    assert not another()
    second.tick()
    assert another()


def test_an_agent_that_ends_leaves_the_lease_to_the_next_one_at_once(
    studies: Any, go_on: Callable[[float], None]
) -> None:
    study = studies.create("quadratic")
    first, second = (Guardian(study, name, with_slurm=False) for name in ("first", "second"))
    first.tick()
    second.tick()
    first.release()
    recovered = lose_a_trial(study)
    go_on(BEAT_S)
    second.tick()
    assert recovered()


@pytest.mark.parametrize(("restarts", "is_gone"), [(0, False), (1, True), (None, False)])
def test_an_element_that_was_queued_again_and_says_nothing_has_lost_its_former_run(
    restarts: int | None, is_gone: bool, studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows it as running for its whole time limit if the node failed when its new run was about to begin."""

    def told(element: str) -> int:
        if restarts is None:
            raise SlurmUnavailableError("no answer")
        return restarts

    monkeypatch.setattr(guardian.slurm_control, "job_states", lambda ids: {"17_0": JobState("RUNNING")})
    monkeypatch.setattr(guardian.slurm_control, "restarts", told)
    study = studies.create("quadratic")
    owner = Owner.of_this_process(element="17_0", agent="its agent", worker=0, token="of the former run")
    trial_id = claim(study, dataclasses.replace(owner, host="another", job="17", run=0))
    assert trial_id is not None
    Guardian(study, "here", with_slurm=True).tick()
    assert (study.trial(trial_id).state == TrialState.FAIL) == is_gone
