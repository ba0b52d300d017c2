"""What each worker did when: read from the journal's records in their order, one pass, no replay.

The journal knows when a trial began and when it ended. It does not know when one was handed back, nor when a lost one
was last worked on: those ends lie between the times of the records around them, and the later one is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from optuna.storages.journal._storage import JournalOperation
from optuna.trial import TrialState

from hpcjobs.budget import FAILURE
from hpcjobs.failures import INFRASTRUCTURE
from hpcjobs.journal_records import parse
from hpcjobs.owners import OWNER

_INFRASTRUCTURE = {kind.value for kind in INFRASTRUCTURE}
_TRIAL_STATE = b'"op_code":%d' % JournalOperation.SET_TRIAL_STATE_VALUES.value
_USER_ATTR = b'"op_code":%d' % JournalOperation.SET_TRIAL_USER_ATTR.value
_ATTRIBUTES = (OWNER.encode(), FAILURE.encode())


@dataclass(frozen=True)
class Span:
    """One stretch of work of one worker on one trial. Times are seconds since the epoch.

    ``outcome``: completed, pruned, failed (the trial's own fault), lost (to a fault of the machine), handed back,
    running.
    """

    element: str
    node: str
    worker: int
    trial: int
    start: float
    end: float
    outcome: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class NodeSpan:
    """One array element from its first trial's begin to its last trial's end."""

    element: str
    node: str
    start: float
    end: float
    workers: int

    @property
    def hours(self) -> float:
        return (self.end - self.start) / 3600


def read_spans(journal: Path, now: float) -> list[Span]:
    """All spans of a study's journal in the order in which they began; those still open end ``now``."""
    with journal.open("rb") as file:
        return spans_of(_records(file), now)


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The few records that matter here; reports and parameters, most of all lines, are not parsed."""
    for line in lines:
        head = line[:16]
        if _TRIAL_STATE in head or (_USER_ATTR in head and any(name in line for name in _ATTRIBUTES)):
            record = parse(line)
            if record is not None:
                yield record


def spans_of(records: Iterable[dict[str, Any]], now: float) -> list[Span]:
    """The spans that records of trial states and owners tell of. ``trial`` in a span is Optuna's trial number."""
    open_spans: dict[int, Span] = {}
    owners: dict[int, dict[str, Any]] = {}
    failures: dict[int, str] = {}
    ended: list[Span] = []
    clock = 0.0
    for record in records:
        trial = int(record["trial_id"])
        if "user_attr" in record:
            attributes = record["user_attr"]
            owners[trial] = attributes.get(OWNER) or owners.get(trial, {})
            failures[trial] = (attributes.get(FAILURE) or {}).get("class", failures.get(trial, ""))
            continue
        state = TrialState(record["state"])
        clock = max(clock, _time(record.get("datetime_start")), _time(record.get("datetime_complete")))
        if state == TrialState.RUNNING:
            owner = owners.get(trial, {})
            place = owner.get("element", ""), owner.get("node", ""), int(owner.get("worker", 0))
            open_spans[trial] = Span(*place, trial, _time(record.get("datetime_start")) or clock, now, "running")
        elif trial in open_spans:
            ended.append(replace(open_spans.pop(trial), end=clock, outcome=_outcome(state, failures.get(trial, ""))))
    return sorted([*ended, *open_spans.values()], key=lambda span: span.start)


def _outcome(state: TrialState, failure: str) -> str:
    if state == TrialState.FAIL:
        return "lost" if failure in _INFRASTRUCTURE else "failed"
    return {TrialState.COMPLETE: "completed", TrialState.PRUNED: "pruned", TrialState.WAITING: "handed back"}[state]


def _time(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def node_spans(spans: Iterable[Span]) -> list[NodeSpan]:
    """One entry for each array element, in the order in which they began."""
    of_element: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        of_element[span.element].append(span)
    nodes = [
        NodeSpan(
            element,
            own[0].node,
            min(span.start for span in own),
            max(span.end for span in own),
            len({span.worker for span in own}),
        )
        for element, own in of_element.items()
    ]
    return sorted(nodes, key=lambda node: node.start)


def node_hours_at(nodes: Iterable[NodeSpan], moment: float) -> float:
    """Node-hours used until ``moment``."""
    return sum(max(0.0, min(moment, node.end) - node.start) for node in nodes) / 3600


def recoveries(spans: Iterable[Span]) -> list[Span]:
    """From each loss to the next begin of work on the same worker: the time in which it was brought back."""
    of_worker: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        of_worker[span.element, span.worker].append(span)
    found = []
    for own in of_worker.values():
        for before, after in pairwise(own):
            if before.outcome == "lost" and after.start > before.end:
                found.append(replace(before, start=before.end, end=after.start, outcome="recovering"))
    return found
