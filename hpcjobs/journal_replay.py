"""Replay of the journal into trials: Optuna's own rules, at a fraction of their cost.

Every worker replays every record, so with W workers a record is replayed W times; this is what limits a study of short
trials. Saved against the base class: records are read into structures that have only what counts; distributions are
parsed once per text and shared; a trial is copied before a change only if somebody outside may hold it; a parameter is
checked against one known distribution of its name instead of a search through all trials; reports stay a chain, and
times text, until somebody looks at them.
"""

from __future__ import annotations

import bisect
import gc
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages.journal._storage import NOT_FOUND_MSG, JournalStorageReplayResult
from optuna.trial import FrozenTrial, TrialState

from hpcjobs.journal_records import (
    OPERATIONS,
    CreateStudy,
    CreateTrial,
    DeleteStudy,
    Record,
    Report,
    SetStudySystemAttr,
    SetStudyUserAttr,
    SetTrialParam,
    SetTrialState,
    SetTrialSystemAttr,
    SetTrialUserAttr,
    UnusualRecord,
)
from hpcjobs.journal_trial import STATES, LazyTrial, from_template, parse_distribution

_RUNNING, _WAITING = TrialState.RUNNING, TrialState.WAITING
_UNFINISHED = (_RUNNING, _WAITING)
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
# how many trials that ended well are kept at hand
LAST_ENDED = 20


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A hundred thousand new objects, none of them garbage, would be walked through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Replay(JournalStorageReplayResult):
    """The studies and trials after all records read so far."""

    def __init__(self, worker_id_prefix: str) -> None:
        super().__init__(worker_id_prefix)
        self._last_created_trial_id_by_this_process = -1
        # trials that nobody outside has seen since their last copy: these are changed in place
        self._private: dict[int, LazyTrial] = {}
        self._by_number: dict[int, list[FrozenTrial]] = defaultdict(list)  # per study
        # per study, numbers of trials: asked for by every worker that looks for work
        self._running: dict[int, set[int]] = defaultdict(set)
        self._waiting: dict[int, set[int]] = defaultdict(set)
        self._begun_waiting: dict[int, set[int]] = defaultdict(set)
        self._last_ended: dict[int, list[int]] = defaultdict(list)
        self._successors: dict[int, dict[int, int]] = defaultdict(dict)
        self._known_distributions: dict[int, dict[str, BaseDistribution]] = defaultdict(dict)
        self._handlers: dict[type, Callable[[Any], None]] = {
            CreateStudy: self._apply_create_study,
            DeleteStudy: self._apply_delete_study,
            SetStudyUserAttr: self._apply_set_study_user_attr,
            SetStudySystemAttr: self._apply_set_study_system_attr,
            CreateTrial: self._create_trial,
            SetTrialParam: self._set_param,
            SetTrialState: self._set_state,
            Report: self._add_report,
            SetTrialUserAttr: self._set_user_attr,
            SetTrialSystemAttr: self._set_system_attr,
            UnusualRecord: self._apply_unusual,
        }

    def apply_logs(self, logs: Iterable[Record | UnusualRecord]) -> None:  # type: ignore[override]
        """Apply all records; then raise the first error that a record of this worker met, as Optuna does."""
        failure: Exception | None = None
        handlers = self._handlers
        for log in logs:
            self.log_number_read += 1
            try:
                handlers[type(log)](log)
            except (KeyError, ValueError, DuplicatedStudyError, UpdateFinishedTrialError) as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _apply_unusual(self, log: UnusualRecord) -> None:
        operation = OPERATIONS.get(log["op_code"])
        if operation is not None:  # None: an operation that Optuna's own replay passes over as well
            self._handlers[operation](log)

    # What callers get is not changed any more

    def get_trial(self, trial_id: int) -> FrozenTrial:
        trial = super().get_trial(trial_id)
        return trial if trial.state.is_finished() else trial.independent_copy()  # type: ignore[attr-defined]

    def get_all_trials(self, study_id: int, states: Container[TrialState] | None) -> list[FrozenTrial]:
        if study_id not in self._studies:
            raise KeyError(NOT_FOUND_MSG)
        trials = self._by_number[study_id]
        if states is None:
            self._private.clear()
            return list(trials)
        if not any(state in states for state in _UNFINISHED):
            return [trial for trial in trials if trial.state in states]
        found: list[FrozenTrial]
        if any(state in states for state in _FINISHED):
            found = [trial for trial in trials if trial.state in states]
        else:  # must not walk through the whole history
            running = self._running[study_id] if _RUNNING in states else set()
            waiting = self._waiting[study_id] if _WAITING in states else set()
            found = [trials[number] for number in sorted(running | waiting)]
        self._private.clear()
        return found

    def next_waiting(self, study_id: int) -> FrozenTrial | None:
        """The waiting trial to take next: the first of those that have parameters already, or else of all."""
        waiting = self._begun_waiting[study_id] or self._waiting[study_id]
        return self._by_number[study_id][min(waiting)] if waiting else None

    def last_ended(self, study_id: int) -> list[FrozenTrial]:
        """Those of the highest numbers among the completed and pruned trials, at most :data:`LAST_ENDED`, in order."""
        trials = self._by_number[study_id]
        return [trials[number] for number in self._last_ended[study_id]]

    def successor(self, study_id: int, number: int) -> FrozenTrial | None:
        """The trial that continues the trial with this number, by Optuna's attribute ``retry_history``."""
        successor = self._successors[study_id].get(number)
        return None if successor is None else self._by_number[study_id][successor]

    def check_updatable(self, trial_id: int) -> None:
        """Raises Optuna's error of an update of a trial that is finished or not there."""
        self._trial_exists_and_updatable(trial_id, {"worker_id": self.worker_id})

    def check_distribution(self, trial_id: int, name: str, distribution: BaseDistribution) -> None:
        """Raises ValueError if the parameter is known with a distribution that this one does not fit."""
        known = self._known_distributions[self._trial_id_to_study_id[trial_id]].get(name)
        if known is not None:
            check_distribution_compatibility(known, distribution)

    def _is_issued_by_this_worker(self, log: Any) -> bool:
        return bool(log["worker_id"] == self.worker_id)

    def _changeable(self, trial_id: int, log: Record) -> LazyTrial | None:
        """The trial to change in place, or None if the record does not count."""
        own = self._private.get(trial_id)
        if own is not None:
            return own
        trial = self._trials.get(trial_id)
        if trial is None or trial.state.is_finished():
            # The base class knows whether this is an error of our own or to be passed over.
            self._trial_exists_and_updatable(trial_id, log)  # type: ignore[arg-type]  # it asks for one key
            return None
        return self._own_copy(trial)

    def _own_copy(self, trial: FrozenTrial) -> LazyTrial:
        own: LazyTrial = trial.changeable_copy()  # type: ignore[attr-defined]  # all trials here are lazy
        trial_id = own._trial_id
        self._trials[trial_id] = self._private[trial_id] = own
        self._by_number[self._trial_id_to_study_id[trial_id]][own._number] = own
        return own

    def _create_trial(self, log: CreateTrial) -> None:
        study_id = log.study_id
        if not self._study_exists(study_id, log):  # type: ignore[arg-type]  # it asks for one key
            return
        trial_ids = self._study_id_to_trial_ids[study_id]
        trial_id = len(self._trials)
        if log.state is not None:
            trial = from_template(log, trial_id, len(trial_ids))
        else:
            trial = LazyTrial.of(
                {
                    "_number": len(trial_ids),
                    "state": _RUNNING,
                    "_values": None,
                    "datetime_complete": None,
                    "_params": {},
                    "_user_attrs": {},
                    "_system_attrs": {},
                    "_distributions": {},
                    "_trial_id": trial_id,
                },
                earlier={},
            )
            trial.start = log.datetime_start
        self.add_trial(study_id, trial)
        if log.worker_id.startswith(self._worker_id_prefix) and self._is_issued_by_this_worker(log):
            self._last_created_trial_id_by_this_process = trial_id
            if trial.state is _RUNNING:
                self._worker_id_to_owned_trial_id[self.worker_id] = trial_id

    def add_trial(self, study_id: int, trial: LazyTrial) -> None:
        """Take in a trial that follows all others."""
        trial_id = trial._trial_id
        self._trials[trial_id] = trial
        self._study_id_to_trial_ids[study_id].append(trial_id)
        self._trial_id_to_study_id[trial_id] = study_id
        self._by_number[study_id].append(trial)
        if not trial.state.is_finished():
            self._private[trial_id] = trial
        self.note_state(study_id, trial)
        if trial._system_attrs:
            self.note_lineage(study_id, trial)
        if trial._distributions:
            known = self._known_distributions[study_id]
            for name, distribution in trial._distributions.items():
                known.setdefault(name, distribution)

    def note_state(self, study_id: int, trial: FrozenTrial) -> None:
        """Keep the numbers of the trials of a state: take in a trial that has come to it."""
        number, state = trial._number, trial.state
        if state is _RUNNING:
            self._running[study_id].add(number)
        elif state is _WAITING:
            self._waiting[study_id].add(number)
            if trial._params:
                self._begun_waiting[study_id].add(number)
        elif state is not TrialState.FAIL:
            last = self._last_ended[study_id]
            bisect.insort(last, number)
            del last[:-LAST_ENDED]

    def _forget_state(self, study_id: int, trial: FrozenTrial) -> None:
        """Before the state of ``trial`` changes."""
        number = trial._number
        if trial.state is _RUNNING:
            self._running[study_id].discard(number)
        else:
            self._waiting[study_id].discard(number)
            self._begun_waiting[study_id].discard(number)

    def note_lineage(self, study_id: int, trial: FrozenTrial) -> None:
        if history := trial._system_attrs.get("retry_history"):
            self._successors[study_id][history[-1]] = trial._number

    def _set_param(self, log: SetTrialParam) -> None:
        trial_id, name = log.trial_id, log.param_name
        trial = self._changeable(trial_id, log)
        if trial is None:
            return
        distribution = parse_distribution(log.distribution)
        study_id = self._trial_id_to_study_id[trial_id]
        known = self._known_distributions[study_id].setdefault(name, distribution)
        if known is not distribution:
            try:
                check_distribution_compatibility(known, distribution)
            except ValueError:
                if self._is_issued_by_this_worker(log):
                    raise
                return
        trial._params = {**trial._params, name: distribution.to_external_repr(log.param_value_internal)}
        trial._distributions = {**trial._distributions, name: distribution}
        if trial.state is _WAITING:
            self.note_state(study_id, trial)

    def _set_state(self, log: SetTrialState) -> None:
        trial_id = log.trial_id
        trial = self._changeable(trial_id, log)
        if trial is None:
            return
        state = STATES[log.state]
        if state is _RUNNING:
            if trial.state is _RUNNING:  # another worker was first
                return
            trial.__dict__.pop("_datetime_start", None)
            trial.start = log.datetime_start
            if log.worker_id.startswith(self._worker_id_prefix) and self._is_issued_by_this_worker(log):
                self._worker_id_to_owned_trial_id[self.worker_id] = trial_id
        elif state.is_finished():
            del trial.datetime_complete
            trial.complete = log.datetime_complete
            del self._private[trial_id]
        study_id = self._trial_id_to_study_id[trial_id]
        self._forget_state(study_id, trial)
        trial.state = state
        self.note_state(study_id, trial)
        if log.values is not None:
            trial._values = log.values

    def _add_report(self, log: Report | UnusualRecord) -> None:
        trial = self._private.get(log.trial_id)
        if trial is None:
            known = self._trials.get(log.trial_id)
            if known is None or known.state.is_finished():  # whoever reports has checked this before
                return
            trial = self._own_copy(known)
        trial.add_report(log if isinstance(log, Report) else Report(log.trial_id, log.step, log.intermediate_value))

    def _set_user_attr(self, log: SetTrialUserAttr) -> None:
        trial = self._changeable(log.trial_id, log)
        if trial is not None:
            trial._user_attrs = {**trial._user_attrs, **log.user_attr}

    def _set_system_attr(self, log: SetTrialSystemAttr) -> None:
        trial = self._changeable(log.trial_id, log)
        if trial is not None:
            trial._system_attrs = {**trial._system_attrs, **log.system_attr}
            self.note_lineage(self._trial_id_to_study_id[trial._trial_id], trial)
