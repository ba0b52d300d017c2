"""Our replay comes to the same studies and trials as Optuna's own, from any sequence of records."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution, distribution_to_json
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.trial import FrozenTrial, TrialState

from hpcjobs import journal_snapshot
from hpcjobs.journal import StudyStorage, open_storage
from hpcjobs.journal_records import encode, parse_lines
from hpcjobs.journal_replay import LAST_ENDED, Replay
from hpcjobs.journal_trial import LazyTrial
from hpcjobs.paths import StudyPaths

NOW = "2026-11-30T21:28:15.707205+00:00"
DISTRIBUTIONS = [
    FloatDistribution(0, 1),
    FloatDistribution(1e-6, 1, log=True),
    IntDistribution(0, 5),
    CategoricalDistribution((None, True, "a", 2.5)),
]
ids = st.integers(0, 4)
values = st.one_of(st.none(), st.lists(st.floats(allow_nan=False), min_size=1, max_size=1))
names = st.sampled_from(["x", "y"])

records = st.one_of(
    st.fixed_dictionaries({"op_code": st.just(0), "study_name": names, "directions": st.just([2])}),
    st.fixed_dictionaries({"op_code": st.just(1), "study_id": st.integers(0, 1)}),
    st.fixed_dictionaries({"op_code": st.just(2), "study_id": ids, "user_attr": st.just({"k": [1]})}),
    st.fixed_dictionaries({"op_code": st.just(4), "study_id": st.integers(0, 1), "datetime_start": st.just(NOW)}),
    st.fixed_dictionaries(
        {
            "op_code": st.just(4),
            "study_id": st.just(0),
            "datetime_start": st.none(),
            "state": st.sampled_from([0, 4]),
            "distributions": st.just({"x": distribution_to_json(DISTRIBUTIONS[0])}),
            "params": st.just({"x": 0.5}),
            "intermediate_values": st.just({"3": 0.25}),
            "system_attrs": st.just({"failed_trial": 0}),
        }
    ),
    st.fixed_dictionaries(
        {
            "op_code": st.just(5),
            "trial_id": ids,
            "param_name": names,
            "param_value_internal": st.just(1.0),
            "distribution": st.sampled_from(DISTRIBUTIONS).map(distribution_to_json),
        }
    ),
    st.fixed_dictionaries(
        {
            "op_code": st.just(6),
            "trial_id": ids,
            "state": st.sampled_from([0, 1, 2, 3, 4]),
            "values": values,
            "datetime_start": st.just(NOW),
            "datetime_complete": st.just(NOW),
        }
    ),
    st.fixed_dictionaries(
        {"op_code": st.just(7), "trial_id": ids, "step": ids, "intermediate_value": st.floats(allow_nan=False)}
    ),
    st.fixed_dictionaries({"op_code": st.just(8), "trial_id": ids, "user_attr": st.just({"u": "é\n"})}),
    st.fixed_dictionaries({"op_code": st.just(9), "trial_id": ids, "system_attr": st.just({"s": 1})}),
    st.fixed_dictionaries({"op_code": st.just(10)}),
)
start = [
    {"op_code": 0, "study_name": "x", "directions": [2]},
    {"op_code": 4, "study_id": 0, "datetime_start": NOW},
]


def line_of(record: dict[str, Any], n: int) -> bytes:
    return encode({"op_code": record["op_code"], "worker_id": "other-1", **record}, n)


def state_of(replay: JournalStorageReplayResult) -> dict[str, Any]:
    return {
        "read": replay.log_number_read,
        "trials": copy.deepcopy(replay._trials),
        "order": dict(replay._study_id_to_trial_ids),
        "studies": [study.__dict__ for study in replay.get_all_studies()],
    }


def replayed(data: bytes, look: int | None = None) -> Replay:
    """Replay; somebody looks at all trials after ``look`` records, and what he got must not change any more."""
    replay = Replay("me-")
    found = parse_lines(data)
    assert found is not None
    replay.apply_logs(found[:look])
    seen = [replay.get_trial(trial_id) for trial_id in replay._trials]
    before = pickle.dumps(seen)
    if look is not None:
        replay.apply_logs(found[look:])
        assert pickle.dumps(seen) == before
    return replay


@settings(max_examples=150, deadline=None)
@given(st.lists(records, max_size=25), st.integers(0, 25))
def test_any_records_lead_to_the_state_of_optuna(log: list[dict[str, Any]], look: int) -> None:
    data = b"".join(line_of(record, n) for n, record in enumerate(start + log))
    stock = JournalStorageReplayResult("me-")
    stock.apply_logs(json.loads(line) for line in data.splitlines())
    assert state_of(replayed(data)) == state_of(stock)
    assert state_of(replayed(data, look)) == state_of(stock)


def test_the_last_ended_trials_are_those_of_the_highest_numbers(tmp_path: Path) -> None:
    storage = open_storage(StudyPaths(tmp_path))
    study = optuna.create_study(study_name="s", storage=storage)
    waiting = [study.ask() for _ in range(LAST_ENDED + 10)]
    for trial in reversed(waiting[1:]):
        state = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)[trial.number % 3]
        study.tell(trial, 1.0 if state == TrialState.COMPLETE else None, state)
    for number in range(LAST_ENDED):
        ended = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))[-LAST_ENDED:]
        assert storage.last_ended(study._study_id) == ended
        # a trial that is added as it ended somewhere else
        study.add_trial(optuna.trial.create_trial(value=float(number)))
    storage.save_snapshot()
    assert open_storage(StudyPaths(tmp_path)).last_ended(study._study_id) == study.trials[-LAST_ENDED:]


@settings(max_examples=50, deadline=None)
@given(st.lists(records, max_size=25))
def test_snapshot_restores_the_state(log: list[dict[str, Any]]) -> None:
    replay = replayed(b"".join(line_of(record, n) for n, record in enumerate(start + log)))
    with pytest.MonkeyPatch.context() as patch:
        kept: list[str] = []
        patch.setattr(journal_snapshot, "_checksum", lambda descriptor, offset: 0)
        patch.setattr(journal_snapshot, "write_atomically", lambda path, text: kept.append(text))
        journal_snapshot.save(replay, Path("journal.log"), -1, 0)
    restored = journal_snapshot._restore("me-", json.loads(kept[0]))
    assert state_of(restored) == state_of(replay)
    assert restored._next_study_id == replay._next_study_id


def test_lazy_trial_is_the_trial_of_optuna_to_everybody() -> None:
    report = {"op_code": 7, "trial_id": 0, "step": 2, "intermediate_value": 0.5}
    replay = Replay("me-")
    replay.apply_logs(parse_lines(b"".join(map(line_of, [*start, report], range(3)))) or [])
    plain = JournalStorageReplayResult("me-")
    plain.apply_logs([*({"worker_id": "o", **record} for record in start)])
    plain._trials[0].intermediate_values[2] = 0.5

    def lazy() -> FrozenTrial:
        trial = replay._trials[0].changeable_copy()  # type: ignore[attr-defined]
        assert isinstance(trial, LazyTrial)
        assert "intermediate_values" not in trial.__dict__
        return trial

    expected = plain._trials[0]
    assert lazy() == expected
    assert expected == lazy()
    assert lazy() == lazy()
    assert repr(lazy()).startswith("FrozenTrial(number=0, ")
    assert "intermediate_values={2: 0.5}" in repr(lazy())
    assert type(copy.deepcopy(lazy())) is FrozenTrial
    assert copy.copy(lazy()) == pickle.loads(pickle.dumps(lazy())) == expected
    assert lazy().last_step == 2
    with pytest.raises(AttributeError, match="no_such"):
        lazy().no_such  # type: ignore[attr-defined]  # noqa: B018


def study_with_trials(folder: Path, count: int) -> tuple[StudyStorage, optuna.Study]:
    storage = open_storage(StudyPaths(folder))
    study = optuna.create_study(study_name="s", storage=storage)
    for number in range(count):
        trial = study.ask({"x": DISTRIBUTIONS[1], "n": DISTRIBUTIONS[2], "c": DISTRIBUTIONS[3]})
        trial.report(number, step=1)
        study.tell(trial, float(number))
    return storage, study


def test_study_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    storage, study = study_with_trials(tmp_path, 5)
    storage.save_snapshot()
    study.tell(study.ask(), 9.0)
    opened = open_storage(StudyPaths(tmp_path))
    assert optuna.load_study(study_name="s", storage=opened).trials == study.trials
    assert opened._replay_result.log_number_read == storage._replay_result.log_number_read
    stock = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log")))
    assert optuna.load_study(study_name="s", storage=stock).trials == study.trials


@pytest.mark.parametrize("damage", ["of another journal", "cut", "not JSON", "other version"])
def test_snapshot_that_does_not_fit_is_passed_over(damage: str, tmp_path: Path) -> None:
    storage, _ = study_with_trials(tmp_path, 3)
    storage.save_snapshot()
    snapshot = tmp_path / "journal.snapshot"
    if damage == "of another journal":
        data = (tmp_path / "journal.log").read_bytes()
        (tmp_path / "journal.log").write_bytes(data.replace(b'"state":1', b'"state":3'))
    elif damage == "cut":
        snapshot.write_bytes(snapshot.read_bytes()[:100])
    elif damage == "not JSON":
        snapshot.write_bytes(b"\x80\x04K\x01.")
    else:
        snapshot.write_text(snapshot.read_text().replace('"version":1', '"version":2'))
    opened = optuna.load_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    state = TrialState.FAIL if damage == "of another journal" else TrialState.COMPLETE
    assert [trial.state for trial in opened.trials] == [state] * 3


def test_long_journal_is_opened_from_a_snapshot_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcjobs.journal._SNAPSHOT_AFTER_RECORDS", 10)
    _, study = study_with_trials(tmp_path, 5)
    assert not (tmp_path / "journal.snapshot").exists()
    open_storage(StudyPaths(tmp_path))
    assert (tmp_path / "journal.snapshot").exists()
    monkeypatch.setattr("hpcjobs.journal_file.parse_lines", lambda data: pytest.fail("replayed"))
    opened = open_storage(StudyPaths(tmp_path))
    assert opened.get_all_trials(study._study_id) == study.trials


@settings(max_examples=60, deadline=None)
@given(st.lists(records, max_size=25), st.sets(st.sampled_from(list(TrialState))))
def test_trials_by_state_are_those_of_optuna(log: list[dict[str, Any]], states: set[TrialState]) -> None:
    data = b"".join(line_of(record, n) for n, record in enumerate(start + log))
    stock = JournalStorageReplayResult("me-")
    stock.apply_logs(json.loads(line) for line in data.splitlines())
    replay = replayed(data)
    for study in stock.get_all_studies():
        for asked in (None, tuple(states)):
            found = replay.get_all_trials(study._study_id, asked)
            assert found == stock.get_all_trials(study._study_id, asked)
        waiting = stock.get_all_trials(study._study_id, (TrialState.WAITING,))
        chosen = min(waiting, key=lambda trial: (not trial.params, trial.number), default=None)
        assert replay.next_waiting(study._study_id) == chosen
        ended = stock.get_all_trials(study._study_id, (TrialState.COMPLETE, TrialState.PRUNED))
        assert replay.last_ended(study._study_id) == ended


def test_worker_that_ends_a_trial_under_the_lock_writes_the_due_snapshot_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcjobs.journal._SNAPSHOT_EVERY_TRIALS", 2)
    storage, study = study_with_trials(tmp_path, 1)
    trial = study.ask()
    with storage.exclusive():
        study.tell(trial, 1.0)
        assert not (tmp_path / "journal.snapshot").exists()
    assert (tmp_path / "journal.snapshot").exists()
