"""Asynchronous successive halving with rungs in epochs, for workers that never wait for each other.

ASHA (Li et al. 2020) in its stopping form: at an epoch that is a rung, a trial goes on if it is among the best
``1/reduction_factor`` of all that have reached that rung. Nothing is promoted later, so a trial's schedule always runs
over all its epochs, and no checkpoint of a stopped trial is kept for a return.

Optuna's own pruner keeps a note in each trial that reached a rung. Here the decision is read off the reports
themselves, so that it is the same before and after a trial is handed back, and a trial that goes on under a new number
after a fault counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optuna.pruners import BasePruner
from optuna.study import StudyDirection

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


def rungs_of(epochs: int, min_resource: int, reduction_factor: int) -> tuple[int, ...]:
    """Epochs at which trials of so many ``epochs`` are compared: the first one, then each ``reduction_factor`` times
    later, all before the last epoch."""
    rungs = []
    rung = min_resource
    while rung < epochs:
        rungs.append(rung)
        rung *= reduction_factor
    return tuple(rungs)


class HalvingPruner(BasePruner):
    """See the module. Names of options are those of Optuna's ``SuccessiveHalvingPruner``."""

    def __init__(self, epochs: int, min_resource: int = 1, reduction_factor: int = 3) -> None:
        """:raises ValueError: for a first rung below 1, or a factor below 2."""
        if not isinstance(min_resource, int) or min_resource < 1:
            raise ValueError(f"min_resource is {min_resource!r}; allowed: a whole number of epochs of at least 1")
        if not isinstance(reduction_factor, int) or reduction_factor < 2:
            raise ValueError(f"reduction_factor is {reduction_factor!r}; allowed: a whole number of at least 2")
        self.reduction_factor = reduction_factor
        self.rungs = rungs_of(epochs, min_resource, reduction_factor)

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether ``trial``, which has just reported, ends here."""
        step = trial.last_step
        if step not in self.rungs:
            return False
        trials = study.get_trials(deepcopy=False)
        own = trial.intermediate_values[step]
        others = self._values_at(step, trials, trial)
        kept = (len(others) + 1) // self.reduction_factor
        if kept == 0:  # too few to judge by
            return False
        if study.direction == StudyDirection.MAXIMIZE:
            better = sum(value > own for value in others)
        else:
            better = sum(value < own for value in others)
        return better >= kept

    @staticmethod
    def _values_at(rung: int, trials: list[FrozenTrial], own: FrozenTrial) -> list[float]:
        """What the other trials reported at the rung; of a trial and those it continues only the last counts."""
        from hpcjobs.budget import HISTORY

        left_out = {own.number}
        for trial in [*trials, own]:
            left_out.update(trial.system_attrs.get(HISTORY) or ())
        values = (trial.intermediate_values.get(rung) for trial in trials if trial.number not in left_out)
        return [value for value in values if value is not None]
