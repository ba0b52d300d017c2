"""A trial that the replay builds: what few look at stays text of the journal until somebody asks for it."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any

from optuna.distributions import json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from hpcjobs.journal_records import Record, Report, UnusualRecord

parse_distribution = lru_cache(maxsize=4096)(json_to_distribution)
STATES = {state.value: state for state in TrialState}


def local_time(text: str | None) -> datetime | None:
    """A time of the journal (with its zone) as Optuna's trials have it: local and without zone."""
    if text is None:
        return None
    return datetime.fromtimestamp(datetime.fromisoformat(text).timestamp())


class LazyTrial(FrozenTrial):
    """A trial whose latest reports are still a chain and whose times still text, until somebody asks for them.

    While they are, the attribute is missing in its dictionary. The dictionaries of parameters and attributes may be
    shared with other states of the trial: they are replaced, never changed.

    Attributes:
        earlier: the intermediate values before those reports.
        reports: the last one, which leads to those ``before`` it; all states of the trial share them.
        start: text of the time of the start; ``complete`` likewise.
    """

    __slots__ = ("complete", "earlier", "reports", "start")

    earlier: dict[int, float]
    reports: Report | None
    start: str | None
    complete: str | None

    @staticmethod
    def of(fields: dict[str, Any], earlier: dict[int, float]) -> LazyTrial:
        trial = object.__new__(LazyTrial)
        trial.__dict__ = fields
        trial.earlier = earlier
        trial.reports = trial.start = trial.complete = None
        return trial

    def add_report(self, report: Report) -> None:
        if "intermediate_values" in self.__dict__:
            self.earlier = self.__dict__.pop("intermediate_values")
        report.before = self.reports
        self.reports = report

    def changeable_copy(self) -> LazyTrial:
        trial = object.__new__(LazyTrial)
        trial.__dict__ = dict(self.__dict__)
        trial.earlier, trial.reports, trial.start, trial.complete = (
            self.earlier,
            self.reports,
            self.start,
            self.complete,
        )
        return trial

    def independent_copy(self) -> FrozenTrial:
        """A trial that may be changed: Optuna's ``Trial`` notes in it what it has written to the storage."""
        fields = dict(self.all_fields())
        for name in ("_params", "_distributions", "_user_attrs", "_system_attrs", "intermediate_values"):
            fields[name] = dict(fields[name])
        trial = object.__new__(FrozenTrial)
        trial.__dict__ = fields
        return trial

    def __getattr__(self, name: str) -> Any:
        value: Any
        if name == "intermediate_values":
            reports, report = [], self.reports
            while report is not None:
                reports.append((report.step, report.intermediate_value))
                report = report.before
            value = {**self.earlier, **dict(reversed(reports))}
            self.earlier, self.reports = value, None
        elif name == "_datetime_start":
            value = local_time(self.start)
        elif name == "datetime_complete":
            value = local_time(self.complete)
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__[name] = value
        return value

    def all_fields(self) -> dict[str, Any]:
        """The dictionary, with nothing missing."""
        self.intermediate_values, self._datetime_start, self.datetime_complete  # noqa: B018
        return self.__dict__

    # Whatever looks into the dictionary must find it complete

    def __eq__(self, other: Any) -> bool:
        for trial in (self, other):
            if isinstance(trial, LazyTrial):
                trial.all_fields()
        return super().__eq__(other)

    __hash__ = FrozenTrial.__hash__

    def __repr__(self) -> str:
        self.all_fields()
        return super().__repr__().replace(type(self).__name__, FrozenTrial.__name__, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as the trial of Optuna that it stands for."""
        return (object.__new__, (FrozenTrial,), self.all_fields())


def from_template(log: Record | UnusualRecord, trial_id: int, number: int) -> LazyTrial:
    """A trial whose first record says more than that it starts."""
    distributions = {name: parse_distribution(text) for name, text in (log["distributions"] or {}).items()}
    params = log["params"] or {}
    trial = FrozenTrial(
        trial_id=trial_id,
        number=number,
        state=STATES[log["state"]],
        params={name: distributions[name].to_external_repr(value) for name, value in params.items()},
        distributions=distributions,
        user_attrs=log["user_attrs"] or {},
        system_attrs=log["system_attrs"] or {},
        value=log["value"],
        intermediate_values={int(step): value for step, value in (log["intermediate_values"] or {}).items()},
        datetime_start=local_time(log["datetime_start"]),
        datetime_complete=local_time(log["datetime_complete"]),
        values=log["values"],
    )
    return LazyTrial.of(trial.__dict__, earlier=trial.intermediate_values)
