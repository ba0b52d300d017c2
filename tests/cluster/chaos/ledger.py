"""The journal read by rules of our own, a page long: a second opinion beside Optuna's replay and the project's.

A line counts if it is a JSON object with an ``op_code``; of a line that begins torn, the record that ran into it.
What Optuna refuses (a record for a finished trial, a second claim) is counted as refused and changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CREATE_TRIAL, SET_PARAM, SET_STATE, SET_REPORT, SET_USER_ATTR = 4, 5, 6, 7, 8
RUNNING, COMPLETE, PRUNED, FAIL, WAITING = range(5)
ENDED = (COMPLETE, PRUNED, FAIL)


@dataclass
class Trial:
    number: int
    state: int
    history: tuple[int, ...] = ()  # numbers of the trials that this one continues
    writer: str = ""  # process that made it run
    owners: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, float] = field(default_factory=dict)
    reports: dict[int, float] = field(default_factory=dict)
    value: float | None = None
    failure: dict[str, Any] | None = None

    @property
    def owner(self) -> dict[str, Any]:
        return self.owners[-1] if self.owners else {}


class Ledger:
    """All trials after the records read so far. ``violations``: what no order of lawful calls could have written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = path.stat().st_ino
        self._offset = 0
        self.trials: list[Trial] = []
        self.violations: list[str] = []
        self.refused = 0
        self.late_reports: set[tuple[int, int]] = set()  # trial and step, of owners that had lost their trial
        self.claims = 0
        self.read()

    def read(self) -> None:
        """Take in the whole lines that were appended since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for line in data.split(b"\n"):
            record = _parse(line) or _parse(line[max(0, line.rfind(b'{"op_code"')) :])
            if record is not None:
                self._apply(record)

    def is_replaced(self) -> bool:
        """Whether the journal is another file by now, as it is when a lock file was broken."""
        return self._path.stat().st_ino != self._inode

    @property
    def asked(self) -> int:
        """Trials that were asked for; one that continues another is none."""
        return sum(not trial.history for trial in self.trials)

    @property
    def left(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state in (WAITING, RUNNING)]

    def successors(self, number: int) -> list[Trial]:
        return [trial for trial in self.trials if trial.history and trial.history[-1] == number]

    def _apply(self, record: dict[str, Any]) -> None:
        if record["op_code"] == CREATE_TRIAL:
            self._create(record)
        elif record["op_code"] in (SET_PARAM, SET_STATE, SET_REPORT, SET_USER_ATTR):
            trial = self.trials[record["trial_id"]]
            if trial.state in ENDED:
                self.refused += 1
                if record["op_code"] == SET_REPORT:
                    self.late_reports.add((trial.number, record["step"]))
                return
            writer = record["worker_id"].rpartition("-")[0]
            if record["op_code"] == SET_STATE:
                self._set_state(trial, record, writer)
            elif record["op_code"] == SET_PARAM:
                trial.params[record["param_name"]] = record["param_value_internal"]
                self._only_by_owner(trial, writer, "a parameter")
            elif record["op_code"] == SET_REPORT:
                trial.reports[record["step"]] = record["intermediate_value"]
                self._only_by_owner(trial, writer, "a report")
            else:
                self._set_user_attr(trial, record["user_attr"])

    def _create(self, record: dict[str, Any]) -> None:
        history = tuple(record.get("system_attrs", {}).get("retry_history", ()))
        params = {name: float(value) for name, value in record.get("params", {}).items()}
        reports = {int(step): value for step, value in record.get("intermediate_values", {}).items()}
        trial = Trial(len(self.trials), record.get("state", RUNNING), history, params=params, reports=reports)
        self.trials.append(trial)
        if trial.state != WAITING:
            self.violations.append(f"trial {trial.number} was made in another state than waiting")
        if not history:
            return
        before = self.trials[history[-1]]
        if before.state != RUNNING or (before.params, before.reports) != (params, reports):
            self.violations.append(f"trial {trial.number} does not continue what trial {before.number} was")

    def _set_state(self, trial: Trial, record: dict[str, Any], writer: str) -> None:
        state = record["state"]
        if state == RUNNING:
            self.claims += 1
            if trial.state != WAITING:
                self.violations.append(f"trial {trial.number} was claimed while it ran")
                return
            trial.writer = writer
        elif state in (COMPLETE, PRUNED):
            self._only_by_owner(trial, writer, "an end")
            trial.value = record["values"][0] if record["values"] else None
        trial.state = state

    def _set_user_attr(self, trial: Trial, attributes: dict[str, Any]) -> None:
        if "hpcjobs:owner" in attributes:
            if trial.state != WAITING:
                self.violations.append(f"trial {trial.number} got a new owner while it ran")
            trial.owners.append(attributes["hpcjobs:owner"])
        trial.failure = attributes.get("hpcjobs:failure", trial.failure)

    def _only_by_owner(self, trial: Trial, writer: str, what: str) -> None:
        if trial.state == RUNNING and writer != trial.writer:
            self.violations.append(f"trial {trial.number} got {what} from another process than its owner")


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("op_code"), int) else None
