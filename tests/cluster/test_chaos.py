"""The short form of ``make chaos``: every kind of fault in one study, and the checker itself."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.chaos.chaos_objective import STEPS, expected
from tests.cluster.chaos.checker import Verdict, check
from tests.cluster.chaos.ends import Ends
from tests.cluster.chaos.faults import FAULTS
from tests.cluster.chaos.run import make_parser, run_round
from tests.cluster.daemons import wait_until
from tests.cluster.emulator import Cluster

FAULTS_HERE = 32
FIXED = {"base": 0.1, "step_s": 0.1}


@pytest.mark.slow
def test_a_study_under_every_kind_of_fault_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    options = make_parser().parse_args(["--workers=3", "--pause=0.5", "--patience=400"])
    done = run_round(
        cluster, tmp_path / "round", seed=1, faults=FAULTS_HERE, lock="kernel", every=list(FAULTS), options=options,
        report=print,
    )  # fmt: skip
    assert done.verdict is not None
    print(done.verdict.figures)
    # every line of what is wrong: pytest shortens a dictionary
    assert done.verdict.holds, "\n".join(f"{claim}: {found}" for claim, found in done.verdict.wrong.items() if found)
    assert len(done.records) == FAULTS_HERE
    assert len({record.kind for record in done.records}) >= len(FAULTS) - 3


X = 0.5
RATES, VALUES = expected({"x": X, **FIXED}, 2)
DISTRIBUTION = json.dumps(
    {"name": "FloatDistribution", "attributes": {"low": 0.0, "high": 1.0, "step": None, "log": False}}
)
OWNER = {"hpcjobs:owner": {"token": "t"}}


def lawful() -> list[dict[str, object]]:
    """The records of a study of one trial: made, claimed, two epochs, ended."""
    of_trial = {"worker_id": "w-1", "trial_id": 0}
    return [
        {"op_code": 0, "worker_id": "s-1", "study_name": "s", "directions": [1]},
        {"op_code": 4, "worker_id": "s-1", "study_id": 0, "datetime_start": None, "state": 4, "value": None,
         "values": None, "distributions": {}, "params": {}, "user_attrs": {}, "system_attrs": {},
         "intermediate_values": {}},
        {"op_code": 8, **of_trial, "user_attr": OWNER},
        {"op_code": 6, **of_trial, "state": 0, "values": None, "datetime_start": "2026-01-01T00:00:00+00:00"},
        {"op_code": 5, **of_trial, "param_name": "x", "param_value_internal": X, "distribution": DISTRIBUTION},
        {"op_code": 7, **of_trial, "step": 1, "intermediate_value": VALUES[0]},
        {"op_code": 7, **of_trial, "step": 2, "intermediate_value": VALUES[1]},
        {"op_code": 6, **of_trial, "state": 1, "values": [VALUES[1]], "datetime_complete": "2026-01-01T00:00:01+00:00"},
    ]  # fmt: skip


def diary() -> list[dict[str, object]]:
    lines: list[dict[str, object]] = [{"what": "begin", "t": 1.0, "pid": 1, "number": 0, "step": 0}]
    lines += [{"what": "reported", "t": 2.0, "pid": 1, "number": 0, "epoch": n + 1, "value": VALUES[n]} for n in (0, 1)]
    return [*lines, {"what": "finished", "t": 3.0, "pid": 1, "number": 0, "state": "COMPLETE", "value": VALUES[1]}]


def verdict_on(
    folder: Path, records: list[dict[str, object]], lines: list[dict[str, object]], budget: int = 1,
    ends: tuple[tuple[int, float], ...] = (),
) -> Verdict:  # fmt: skip
    journal = folder / "journal.log"
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "diary").mkdir(exist_ok=True)
    (folder / "diary" / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check(journal, folder / "diary", budget=budget, fixed=FIXED, epochs=2, ends=ends)


def wrong(folder: Path, records: list[dict[str, object]], lines: list[dict[str, object]], budget: int = 1) -> set[str]:
    """The claims that do not hold for this journal and diary."""
    verdict = verdict_on(folder, records, lines, budget)
    return {claim for claim, found in verdict.wrong.items() if found}


def test_the_checker_agrees_with_a_lawful_journal(tmp_path: Path) -> None:
    assert wrong(tmp_path, lawful(), diary()) == set()
    assert len(RATES) == 2 * STEPS


def test_the_checker_sees_a_lost_result_and_a_lost_report(tmp_path: Path) -> None:
    assert "finished trials lost" in wrong(tmp_path, lawful()[:-1], diary())
    assert "reports lost" in wrong(tmp_path, [r for r in lawful() if r.get("step") != 1], diary())


def test_the_checker_sees_a_second_owner(tmp_path: Path) -> None:
    records = lawful()
    stranger = {**records[3], "worker_id": "other-1"}
    assert "trials with two owners" in wrong(tmp_path, [*records[:4], stranger, *records[4:]], diary())
    records[6]["worker_id"] = "other-1"
    assert "trials with two owners" in wrong(tmp_path, records, diary())


def test_the_checker_sees_one_number_run_by_two_at_once(tmp_path: Path) -> None:
    other = {"what": "begin", "t": 2.5, "pid": 2, "number": 0, "step": 0}
    assert "numbers run twice" in wrong(tmp_path, lawful(), [*diary(), other])


def test_the_checker_sees_a_trial_too_many_or_too_few(tmp_path: Path) -> None:
    assert wrong(tmp_path, lawful(), diary(), budget=2) == {"budget exact"}
    assert "budget exact" in wrong(tmp_path, [*lawful(), lawful()[1]], diary())


def test_the_checker_sees_a_schedule_that_began_anew(tmp_path: Path) -> None:
    records = lawful()
    records[6]["intermediate_value"] = VALUES[0]
    records[7]["values"] = [VALUES[0]]
    assert "curves broken" in wrong(tmp_path, records, diary()[:-2])


def test_the_checker_measures_a_recovery_from_the_last_line_and_from_the_end_of_the_worker(tmp_path: Path) -> None:
    first, second = diary()[:2], diary()[2:]
    second = [{"what": "begin", "t": 10.0, "pid": 2, "number": 0, "step": STEPS}, *second]
    second = [{**line, "pid": 2, "t": 10.0 + n} for n, line in enumerate(second)]
    stopped = verdict_on(tmp_path, lawful(), [*first, *second], ends=((2, 13.0),))
    assert (stopped.holds, stopped.recoveries_s, stopped.after_end_s) == (True, [8.0], [])
    killed = verdict_on(tmp_path, lawful(), [*first, *second], ends=((1, 0.5), (1, 6.0), (2, 13.0)))
    assert (killed.recoveries_s, killed.after_end_s) == ([8.0], [4.0])


def test_the_end_of_a_worker_is_not_noted_too_late(tmp_path: Path) -> None:
    worker = subprocess.Popen(["sleep", "1000"])
    (tmp_path / f"{worker.pid}-1.jsonl").touch()
    ends = Ends(tmp_path)
    ends.look()
    killed = time.monotonic()
    worker.kill()
    wait_until(lambda: worker.poll() is not None, "the end of the worker")
    ends.start()
    wait_until(lambda: bool(ends._ended), "the end to be seen")
    ((pid, at),) = ends.stop()
    assert pid == worker.pid
    assert at <= killed
