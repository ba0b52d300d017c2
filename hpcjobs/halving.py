"""Asynchronous successive halving with rungs in epochs, for workers that never wait for each other.

ASHA (Li et al. 2020) in its stopping form: at an epoch that is a rung, a trial goes on if it is among the best that
have reached that rung. Nothing is promoted later, so a trial's schedule always runs over all its epochs, and no
checkpoint of a stopped trial is kept for a return.

How many are the best is a share of all trials that have come to the first rung, not of those at the same rung. The
sampler learns, so that late trials are better than early ones and most of them would pass a rung where they are
compared with the early ones; the share then holds back those that follow. The best so far goes on always: however few
they are, one trial of a study comes to its end.

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
    """See the module. Names of options are those of Optuna's ``SuccessiveHalvingPruner``, and one more.

    ``first_reduction_factor`` is that of the first rung, at which most is saved; by default it is as the others.
    """

    def __init__(
        self, epochs: int, min_resource: int = 1, reduction_factor: int = 3, first_reduction_factor: int | None = None
    ) -> None:
        """:raises ValueError: for a first rung below 1, or a factor below 2."""
        first = reduction_factor if first_reduction_factor is None else first_reduction_factor
        if not isinstance(min_resource, int) or min_resource < 1:
            raise ValueError(f"min_resource is {min_resource!r}; allowed: a whole number of epochs of at least 1")
        for name, factor in (("reduction_factor", reduction_factor), ("first_reduction_factor", first)):
            if not isinstance(factor, int) or factor < 2:
                raise ValueError(f"{name} is {factor!r}; allowed: a whole number of at least 2")
        rungs = rungs_of(epochs, min_resource, reduction_factor)
        self.shares: dict[int, int] = {rung: first * reduction_factor**place for place, rung in enumerate(rungs)}

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether ``trial``, which has just reported, ends here."""
        step = trial.last_step
        if step not in self.shares:
            return False
        own = trial.intermediate_values[step]
        others = self._reports_of_others(study.get_trials(deepcopy=False), trial)
        started = 1 + sum(max(reports) >= min(self.shares) for reports in others)
        kept = max(1, started // self.shares[step])
        at_rung = [reports[step] for reports in others if step in reports]
        if study.direction == StudyDirection.MAXIMIZE:
            better = sum(value > own for value in at_rung)
        else:
            better = sum(value < own for value in at_rung)
        return better >= kept

    @staticmethod
    def _reports_of_others(trials: list[FrozenTrial], own: FrozenTrial) -> list[dict[int, float]]:
        """What the other trials reported, by epoch; of a trial and those that it continues only the last counts."""
        from hpcjobs.budget import HISTORY

        left_out = {own.number}
        for trial in [*trials, own]:
            left_out.update(trial.system_attrs.get(HISTORY) or ())
        reports = (trial.intermediate_values for trial in trials if trial.number not in left_out)
        return [values for values in reports if values]
