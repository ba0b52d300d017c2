"""What an objective sees of its trial: where to write, when to stop, and whom to tell how it goes."""

from __future__ import annotations

import contextlib
import math
import operator
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import optuna
from optuna.exceptions import UpdateFinishedTrialError

from hpcjobs.budget import TrialTaken, is_baseline, is_ours
from hpcjobs.failures import writable
from hpcjobs.paths import CHECKPOINT
from hpcjobs.trial_files import append_to_curves

__all__ = ["HandBack", "TrialContext", "TrialTaken"]


@contextlib.contextmanager
def own_error_handling() -> Iterator[None]:
    """For Optuna's samplers and pruners: what an objective makes NumPy and Python raise is no error in them."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class HandBack(BaseException):
    """The trial goes back to the queue and will go on from its checkpoint.

    Not an Exception, so that an objective's ``except Exception`` lets it pass.

    Attributes:
        asked: the worker must stop; otherwise it is only the objective that wants to.
    """

    def __init__(self, message: str, *, asked: bool) -> None:
        super().__init__(message)
        self.asked = asked


class Clock(Protocol):
    """What the context asks its worker: is a stop ordered, and how many seconds are left before the job ends."""

    def stop_ordered(self) -> bool: ...

    def seconds_left(self) -> float | None: ...

    def progress(self, epoch: int, value: float, figures: dict[str, float], epoch_s: float) -> None: ...


@dataclass
class Timing:
    """Measured in one run of an objective, to tell whether another one still fits into the job."""

    started: float = field(default_factory=time.monotonic)
    last_report: float | None = None
    first_report_s: float | None = None
    first_poll_s: float | None = None
    epoch_s: float | None = None  # the slowest of this run

    def poll(self) -> None:
        if self.first_poll_s is None:
            self.first_poll_s = time.monotonic() - self.started

    def report(self) -> float:
        """Note a report; returns the seconds since the one before."""
        now = time.monotonic()
        since = now - (self.last_report if self.last_report is not None else self.started)
        if self.last_report is None:
            self.first_report_s = since
        else:
            self.epoch_s = max(since, self.epoch_s or 0.0)
        self.last_report = now
        return since

    def as_dict(self) -> dict[str, float]:
        figures = {"first_report_s": self.first_report_s, "first_poll_s": self.first_poll_s, "epoch_s": self.epoch_s}
        return {name: round(value, 3) for name, value in figures.items() if value is not None}


class TrialContext:
    """The second argument of an objective ``(params, context) -> float``.

    Attributes:
        number: of the trial, from 0.
        folder: the trial's own folder, which exists. What the objective puts there stays, but for the checkpoint.
        checkpoint: where the objective keeps its state; if the file exists, the trial goes on from it. It is removed
            once the trial has ended, unless that is the best one so far.
        data: the dataset's folder, if the study has one.
        epochs: how many the study asks for.
        device: ``cuda:0`` (also on AMD GPUs) or ``cpu``.
        figures: what the last report said besides its value.
    """

    def __init__(
        self,
        *,
        trial: optuna.Trial,
        token: str,
        folder: Path,
        curves: Path,
        data: Path | None,
        epochs: int,
        device: str,
        clock: Clock,
    ) -> None:
        self.number = trial.number
        self.folder = folder
        self.checkpoint = folder / CHECKPOINT
        self.data = data
        self.epochs = epochs
        self.device = device
        self.figures: dict[str, float] = {}
        self.timing = Timing()
        self._curves = curves
        self._trial = trial
        self._token = token
        self._clock = clock
        frozen = trial.storage.get_trial(trial._trial_id)
        self._prunes = not (isinstance(trial.study.pruner, optuna.pruners.NopPruner) or is_baseline(frozen))
        self._reported = set(frozen.intermediate_values)

    @property
    def stop_requested(self) -> bool:
        """Poll this between steps. When true: save the checkpoint and call :meth:`hand_back`."""
        self.timing.poll()
        return self._clock.stop_ordered()

    def hand_back(self) -> None:
        """End this run after saving a checkpoint; the trial will go on from it.

        Where no stop is requested, it is offered again at once. So often in a row without a new report it has failed.
        """
        raise HandBack(f"trial {self.number} handed back", asked=self._clock.stop_ordered())

    def report(self, epoch: int, value: float, **figures: float) -> None:
        """Report the objective's value after an epoch, once per epoch, after saving the checkpoint.

        An epoch that was reported before (by the run that this one continues) is not written again. Figures that are
        not finite are left out: JSON has no such numbers.

        Raises:
            ArithmeticError: if the value is not finite: the trial has diverged.
            TypeError: if the epoch is no whole number.
            ValueError: if the epoch is negative, or the name of a figure cannot be written.
            optuna.TrialPruned: if the pruner gives the trial up.
            HandBack: if the worker must stop, or the job ends before another epoch would.
            TrialTaken: if the trial was recovered by somebody else meanwhile.
        """
        epoch = operator.index(epoch)  # NumPy's are whole numbers too, but no JSON
        if epoch < 0:
            raise ValueError(f"report: found epoch {epoch}; allowed: whole numbers from 0")
        for name in figures:
            if name != writable(name):
                raise ValueError(f"report: found a figure named {name!r}; allowed: text that UTF-8 can hold")
        value = float(value)
        if not math.isfinite(value):
            raise ArithmeticError(f"the value reported for epoch {epoch} is {value}")
        numbers = {name: float(figure) for name, figure in figures.items()}
        epoch_s = self.timing.report()
        self.figures = {name: number for name, number in numbers.items() if math.isfinite(number)}
        if epoch not in self._reported:
            self._reported.add(epoch)
            append_to_curves(self._curves, self.number, epoch, value, self.figures)
            try:
                self._trial.report(value, epoch)
            except UpdateFinishedTrialError:
                raise TrialTaken(f"trial {self.number} has ended meanwhile") from None
        self._check_owner()
        self._clock.progress(epoch, value, self.figures, epoch_s)
        if self._prunes and self._should_prune():
            raise optuna.TrialPruned(f"pruned after epoch {epoch}")
        if self._clock.stop_ordered() or (epoch < self.epochs and not self._another_epoch_fits()):
            raise HandBack(f"trial {self.number} handed back", asked=True)

    def _should_prune(self) -> bool:
        with own_error_handling():
            return self._trial.should_prune()

    def _check_owner(self) -> None:
        """Look whether the trial is still ours. At every report: one that did not count must not be taken for written,
        since the successor has neither it nor a checkpoint that goes further."""
        if not is_ours(self._trial.storage.get_trial(self._trial._trial_id), self._token):
            raise TrialTaken(f"trial {self.number} belongs to somebody else meanwhile")

    def _another_epoch_fits(self) -> bool:
        """An objective that polls can stop at any step; any other one would lose the epoch that the job's end cuts."""
        left = self._clock.seconds_left()
        if left is None or self.timing.first_poll_s is not None:
            return True
        return left > 1.2 * (self.timing.epoch_s or self.timing.first_report_s or 0.0)
