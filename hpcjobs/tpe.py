"""Optuna's TPE, to which a running trial counts for what it has reported.

With a constant liar every trial that runs is a bad guess until it ends, so that many workers do not try the same. Under
halving those that run on are the best of all: the sampler would learn to stay away from where they are, for most of
the study. Here only a trial without a report is such a guess. One with reports counts as if it were pruned now: behind
the completed ones, in order of its last epoch and value.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import TYPE_CHECKING, Any, cast

from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study


class ReportsTPESampler(TPESampler):
    """See the module. Options are those of Optuna's ``TPESampler``."""

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return super().sample_relative(cast("Study", _WithReports(study)), trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return super().sample_independent(cast("Study", _WithReports(study)), trial, param_name, param_distribution)


class _WithReports:
    """A study whose running trials are pruned as soon as they have reported."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(self, states: Container[TrialState], **how: Any) -> list[FrozenTrial]:
        """What TPE asks for; no copies of copies, and no cache: a study of ours is made anew for each draw."""
        seen = (_as_reported(trial) for trial in self._study.get_trials(deepcopy=False))
        return [trial for trial in seen if trial.state in states]


def _as_reported(trial: FrozenTrial) -> FrozenTrial:
    if trial.state != TrialState.RUNNING or not trial.intermediate_values:
        return trial
    seen = copy.copy(trial)  # the storage keeps its own
    seen.state = TrialState.PRUNED
    return seen
