"""The exact budget: a study has as many trials as were asked for, and each ends once.

All trials wait in the journal from the start. A worker claims one, runs it, and either finishes it or hands it back.
Every step reads and appends inside the journal's exclusive section, so no trial has two owners and none ends twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpcjobs.failures import Failure, FailureClass
from hpcjobs.journal_lock import FencedError
from hpcjobs.owners import OWNER, Owner
from hpcjobs.study import GIVEN, OpenStudy
from hpcjobs.text import counted

FAILURE = "hpcjobs:failure"
RESULT = "hpcjobs:result"
HISTORY = "retry_history"  # Optuna's own name: numbers of the trials that this one continues
UNASKED = "hpcjobs:unasked"  # how often in a row a trial was handed back unasked, and its number of reports then
STOPPED = "hpcjobs:stopped"  # of the study: why no trial is begun any more, and after how many errors


class TrialTaken(BaseException):
    """The trial is no longer ours: it was recovered while this process did not run. Drop it.

    Not an Exception, so that an objective's ``except Exception`` lets it pass.
    """


def token_of(trial: FrozenTrial) -> str | None:
    owner = Owner.from_dict(trial.user_attrs.get(OWNER))
    return owner.token if owner else None


def is_ours(trial: FrozenTrial, token: str) -> bool:
    return trial.state == TrialState.RUNNING and token_of(trial) == token


def predecessor(trial: FrozenTrial) -> int | None:
    """Number of the trial that this one continues."""
    history = trial.system_attrs.get(HISTORY)
    return history[-1] if history else None


def is_baseline(trial: FrozenTrial) -> bool:
    """Whether it is the first trial of a study, or goes on from it, and took the defaults or what else was given.

    It is never pruned: what is found is compared with it, and learns more slowly at first than parameters that gain
    little.
    """
    first = min([trial.number, *trial.system_attrs.get(HISTORY, [])])
    return first == 0 and GIVEN in trial.system_attrs


def claim(study: OpenStudy, owner: Owner) -> int | None:
    """Take a waiting trial for ``owner``, begun ones first; None if nothing waits or the study has stopped itself."""
    if study.storage.next_waiting(study.study_id) is None or why_stopped(study):
        return None
    try:
        return _claim(study, owner)
    except FencedError:
        with study.storage.exclusive():  # where it is known whether what was written counts
            mine = [trial for trial in study.trials((TrialState.RUNNING,)) if is_ours(trial, owner.token)]
        if not mine:
            raise
        return mine[0]._trial_id


def _claim(study: OpenStudy, owner: Owner) -> int | None:
    with study.storage.exclusive():
        chosen = study.storage.next_waiting(study.study_id)
        if chosen is None or why_stopped(study):
            return None
        # the owner first: there is no moment at which a trial of ours runs and nobody knows for whom
        study.storage.set_trial_user_attr(chosen._trial_id, OWNER, owner.as_dict())
        if not study.storage.set_trial_state_values(chosen._trial_id, TrialState.RUNNING):
            raise RuntimeError(f"trial {chosen.number} was taken inside the exclusive section of the journal")
    return chosen._trial_id


def hand_back(study: OpenStudy, trial_id: int, token: str, *, asked: bool = True) -> bool:
    """The owner gives up its running trial: it waits again, with its parameters and reports. False if not ours.

    Unless ``asked`` to by whoever wants the worker to stop, this is counted: see :func:`times_unasked`.
    """
    with study.storage.exclusive():
        trial = study.trial(trial_id)
        if not is_ours(trial, token):
            return False
        with study.storage.batch():
            if not asked:
                noted = {"times": times_unasked(trial) + 1, "reports": len(trial.intermediate_values)}
                study.storage.set_trial_user_attr(trial_id, UNASKED, noted)
            study.storage.set_trial_state_values(trial_id, TrialState.WAITING)
    return True


def times_unasked(trial: FrozenTrial) -> int:
    """How often in a row the objective handed the trial back unasked, without a new report in between."""
    noted = trial.user_attrs.get(UNASKED) or {}
    return int(noted["times"]) if noted.get("reports") == len(trial.intermediate_values) else 0


def finish(
    study: OpenStudy,
    trial_id: int,
    token: str,
    state: TrialState,
    *,
    value: float | None = None,
    result: dict[str, Any] | None = None,
    failure: Failure | None = None,
) -> FrozenTrial:
    """End a trial that we own as completed, pruned or failed. A pruned trial keeps its last report as its value.

    Raises:
        TrialTaken: if the trial is not ours any more, or somebody else already continues it.
    """
    with study.storage.exclusive():
        trial = study.trial(trial_id)
        if not is_ours(trial, token) or successor_of(study, trial.number) is not None:
            raise TrialTaken(f"trial {trial.number} was recovered by somebody else")
        if state == TrialState.PRUNED and trial.intermediate_values:
            value = trial.intermediate_values[max(trial.intermediate_values)]
        with study.storage.batch():
            if result:
                study.storage.set_trial_user_attr(trial_id, RESULT, result)
            if failure:
                study.storage.set_trial_user_attr(trial_id, FAILURE, failure.as_dict())
                _stop_if_broken(study, failure)
            study.storage.set_trial_state_values(trial_id, state, None if value is None else [value])
    return study.trial(trial_id)


def why_stopped(study: OpenStudy) -> str | None:
    """Why no trial is begun any more, if the study has stopped itself."""
    why: str | None = _stop(study).get("why")
    return why


def go_on(study: OpenStudy) -> None:
    """Let a study that has stopped itself begin trials again. Its errors up to now count towards no other stop."""
    with study.storage.exclusive():
        if why_stopped(study):
            study.storage.set_study_user_attr(study.study_id, STOPPED, {"errors": _stop(study)["errors"]})


def _stop(study: OpenStudy) -> dict[str, Any]:
    return study.storage.get_study_user_attrs(study.study_id).get(STOPPED) or {}


def _stop_if_broken(study: OpenStudy, failure: Failure) -> None:
    """Stop the study if its objective only raises errors: all its budget would go that way.

    Called inside the exclusive section and the batch that end a trial with ``failure``.
    """
    most = study.file.study.stop_after_errors
    if failure.kind != FailureClass.OBJECTIVE or not most or study.trials((TrialState.COMPLETE, TrialState.PRUNED)):
        return
    failures = [trial.user_attrs.get(FAILURE) or {} for trial in study.trials((TrialState.FAIL,))]
    errors = 1 + sum(each.get("class") == FailureClass.OBJECTIVE.value for each in failures)
    if errors >= most + _stop(study).get("errors", 0):
        why = f"{counted(errors, 'trial')} failed with an error of the objective and none has ended well"
        stop = {"errors": errors, "why": f"{why}; the last: {failure.message}"}
        study.storage.set_study_user_attr(study.study_id, STOPPED, stop)


def successor_of(study: OpenStudy, number: int) -> FrozenTrial | None:
    """The trial that continues trial ``number``, if it was recovered."""
    return study.storage.successor(study.study_id, number)


def trials_left(study: OpenStudy) -> int:
    """How many trials of the budget have not ended: as :func:`count` says, without a look at those that have."""
    trials = study.trials((TrialState.RUNNING, TrialState.WAITING))
    return sum(successor_of(study, trial.number) is None for trial in trials)


@dataclass(frozen=True)
class Counts:
    """Where the budget stands. ``failed`` are the trials' own failures; recovered ones go on under a new number."""

    completed: int = 0
    pruned: int = 0
    failed: int = 0
    running: int = 0
    waiting: int = 0
    recovered: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def budget(self) -> int:
        return self.completed + self.pruned + self.failed + self.running + self.waiting

    @property
    def finished(self) -> int:
        return self.completed + self.pruned + self.failed

    @property
    def left(self) -> int:
        return self.running + self.waiting


def count(study: OpenStudy) -> Counts:
    """Count the trials of the budget: a recovered trial and its successor are one."""
    trials = study.trials()
    continued = {predecessor(trial) for trial in trials}
    numbers = dict.fromkeys(TrialState, 0)
    recovered = 0
    failures: dict[str, int] = {}
    for trial in trials:
        if trial.state == TrialState.FAIL:
            kind = (trial.user_attrs.get(FAILURE) or {}).get("class", "unknown")
            failures[kind] = failures.get(kind, 0) + 1
        if trial.number in continued:
            recovered += 1
        else:
            numbers[trial.state] += 1
    return Counts(
        completed=numbers[TrialState.COMPLETE],
        pruned=numbers[TrialState.PRUNED],
        failed=numbers[TrialState.FAIL],
        running=numbers[TrialState.RUNNING],
        waiting=numbers[TrialState.WAITING],
        recovered=recovered,
        failures=failures,
    )
