"""The study's storage: damaged files open, nothing is numbered twice, stock Optuna reads what we write."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hpcjobs import journal_repair
from hpcjobs.compact import compact
from hpcjobs.journal import StudyStorage, open_storage
from hpcjobs.journal_lock import JournalTimeoutError
from hpcjobs.journal_records import Damage
from hpcjobs.paths import StudyPaths

CASES = Path(__file__).parent / "cases" / "journal"
FINISHED_VALUES = [0.0, 0.2, 0.4, 0.6000000000000001]


def stock_study(folder: Path) -> optuna.Study:
    """The study as stock Optuna reads it, with nothing of ours."""
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name="s", storage=storage)


def open_case(name: str, folder: Path) -> StudyStorage:
    shutil.copy(CASES / name, folder / "journal.log")
    return open_storage(StudyPaths(folder))


@pytest.mark.parametrize(
    ("case", "lost_records"),
    [
        ("complete_4_running_1.log", None),
        ("torn_last_line.log", ["torn at the end"]),
        ("torn_line_joined_with_next.log", ["torn, and the next record ran into it"]),
        ("blank_line_inside.log", []),
        ("nul_bytes_at_end.log", []),
    ],
)
def test_damaged_journal_opens_and_tells_what_was_lost(
    case: str, lost_records: list[str] | None, tmp_path: Path
) -> None:
    storage = open_case(case, tmp_path)
    trials = optuna.load_study(study_name="s", storage=storage).get_trials()
    assert [trial.value for trial in trials[:4]] == FINISHED_VALUES
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 4 + [TrialState.RUNNING]
    if lost_records is None:
        assert storage.damages == []
    else:
        assert [damage.reason for damage in storage.damages if damage.lost] == lost_records
        kept = [json.loads(line) for line in (tmp_path / "journal.lost.jsonl").read_text().splitlines()]
        original = (CASES / case).read_bytes()
        for damage in kept:
            assert original[damage["offset"] :][: damage["length"]].decode() == damage["text"]


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.glob("*.log")))
def test_record_after_damage_is_read_by_stock_optuna(case: str, tmp_path: Path) -> None:
    study = optuna.load_study(study_name="s", storage=open_case(case, tmp_path))
    study.tell(study.ask(), 0.9)
    assert [trial.value for trial in stock_study(tmp_path).get_trials()] == [*FINISHED_VALUES, None, 0.9]


def test_reader_that_was_open_before_the_repair_goes_on(tmp_path: Path) -> None:
    storage = open_case("complete_4_running_1.log", tmp_path)
    reader = open_storage(StudyPaths(tmp_path))
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code":6,"wor\0\0\0')
    study = optuna.load_study(study_name="s", storage=storage)
    study.tell(study.ask(), 0.9)
    assert optuna.load_study(study_name="s", storage=reader).trials[5].value == 0.9
    assert [damage.reason for damage in storage.damages] == ["torn at the end"]


@pytest.mark.parametrize("damage", [b"not a record\n", b"\0" * 300 + b"\n", b'{"op_code":6,"wor'])
def test_reader_that_passed_over_damage_goes_on_after_its_repair(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk a reader passes over what it cannot repair; when another has repaired it, no byte has moved."""
    study = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    study.tell(study.ask(), 0.0)
    reader = optuna.load_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(damage)
    with monkeypatch.context() as full_disk:

        def keep(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full_disk.setattr(journal_repair, "keep", keep)
        assert [trial.value for trial in reader.trials] == [0.0]
    for value in (1.0, 2.0):
        study.tell(study.ask(), value)
    assert [trial.value for trial in reader.trials] == [0.0, 1.0, 2.0]
    assert [trial.value for trial in stock_study(tmp_path).get_trials()] == [0.0, 1.0, 2.0]
    assert sum(damage.length for damage in study._storage.damages) == len(damage)  # type: ignore[attr-defined]


def test_what_follows_a_torn_tail_meanwhile_is_not_removed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that does not know our lock appends while the tail before is being repaired."""
    study = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    journal = tmp_path / "journal.log"
    record = b'{"op_code":2,"worker_id":"w-1","study_id":0,"user_attr":{"k":1}}\n'
    keep = journal_repair.keep

    def keep_and_append(path: Path, spans: list[Damage]) -> None:
        keep(path, spans)
        with journal.open("ab") as file:
            file.write(record)

    with journal.open("ab") as file:
        file.write(b'{"op_code":6,"wor')
    monkeypatch.setattr(journal_repair, "keep", keep_and_append)
    study.ask()
    assert study.user_attrs == stock_study(tmp_path).user_attrs == {"k": 1}


def test_a_record_that_was_altered_counts_as_it_stands_and_is_reported_once(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    study.tell(study.ask(), 0.25)
    study.tell(study.ask(), 0.5)
    journal = tmp_path / "journal.log"
    written = journal.read_bytes()
    journal.write_bytes(written.replace(b'"values":[0.25]', b'"values":[0.75]'))
    for _ in range(2):
        opened = open_storage(StudyPaths(tmp_path))
        assert [damage.reason for damage in opened.damages] == ["altered since it was written"]
    compact(StudyPaths(tmp_path), grace_s=0)
    assert open_storage(StudyPaths(tmp_path)).damages == []
    assert [trial.value for trial in stock_study(tmp_path).get_trials()] == [0.75, 0.5]
    (kept,) = map(json.loads, (tmp_path / "journal.lost.jsonl").read_text().splitlines())
    assert written[kept["offset"] :][: kept["length"]] == kept["text"].encode().replace(b"[0.75]", b"[0.25]")
    assert not kept["lost"]


def test_compaction_reports_what_was_altered_before_it_is_gone(tmp_path: Path) -> None:
    """Also a record that the others have read long ago, before it was altered."""
    storage = open_storage(StudyPaths(tmp_path))
    study = optuna.create_study(study_name="s", storage=storage)
    for _ in range(20):  # a snapshot looks at the last kilobytes before it
        study.tell(study.ask(), 0.25)
    storage.save_snapshot()
    study.tell(study.ask(), 0.5)
    journal = tmp_path / "journal.log"
    journal.write_bytes(journal.read_bytes().replace(b'"study_name":"s"', b'"study_name":"t"'))
    assert open_storage(StudyPaths(tmp_path)).damages == []  # it goes on from the snapshot
    compact(StudyPaths(tmp_path), grace_s=0)
    (kept,) = map(json.loads, (tmp_path / "journal.lost.jsonl").read_text().splitlines())
    assert (kept["offset"], kept["reason"]) == (0, "altered since it was written")


def test_storage_opened_before_fork_numbers_no_trial_twice(tmp_path: Path) -> None:
    storage = open_storage(StudyPaths(tmp_path))
    study = optuna.create_study(study_name="s", storage=storage)
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                numbers = [study.ask().number for _ in range(25)]
                (tmp_path / f"{child}.json").write_text(json.dumps(numbers))
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    numbers = [n for child in range(4) for n in json.loads((tmp_path / f"{child}.json").read_text())]
    assert sorted(numbers) == list(range(100))


def test_appends_in_the_exclusive_section_need_no_second_lock(tmp_path: Path) -> None:
    storage = open_storage(StudyPaths(tmp_path), deadline_s=2)
    study = optuna.create_study(study_name="s", storage=storage)
    with storage.exclusive():
        trial = study.ask()
        study.tell(trial, 1.0)
    assert stock_study(tmp_path).best_value == 1.0


def test_batch_is_one_append(tmp_path: Path) -> None:
    storage = open_storage(StudyPaths(tmp_path))
    study = optuna.create_study(study_name="s", storage=storage)
    trial = study.ask()
    with storage.batch():
        trial.suggest_float("x", 0, 1)
        trial.suggest_int("n", 1, 9)
        before = (tmp_path / "journal.log").stat().st_size
    assert (tmp_path / "journal.log").read_bytes()[before:].count(b"\n") == 2
    assert set(stock_study(tmp_path).trials[0].params) == {"x", "n"}


def test_record_of_stock_optuna_between_ours_is_read(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    study.tell(study.ask(), 1.0)
    other = stock_study(tmp_path)
    other.tell(other.ask(), 2.0)
    study.tell(study.ask(), 3.0)
    assert [trial.value for trial in study.trials] == [trial.value for trial in other.trials] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["with space", 'it\'s "quoted"', "accents é ü", "%s {x} $HOME"])
def test_folder_with_a_nasty_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    study = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(folder)))
    study.tell(study.ask(), 1.0)
    assert stock_study(folder).best_value == 1.0


def test_relative_folder_outlives_a_change_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "study").mkdir()
    monkeypatch.chdir(tmp_path)
    study = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(Path("study"))))
    monkeypatch.chdir("/")
    study.tell(study.ask(), 1.0)
    assert stock_study(tmp_path / "study").best_value == 1.0


def test_folder_and_link_to_it_share_one_lock(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "link").symlink_to("study")
    direct = open_storage(StudyPaths(tmp_path / "study"))
    linked = open_storage(StudyPaths(tmp_path / "link"), deadline_s=0.1)
    optuna.create_study(study_name="s", storage=direct)
    with direct.exclusive(), pytest.raises(JournalTimeoutError):
        optuna.load_study(study_name="s", storage=linked).ask()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which needs root")
@pytest.mark.parametrize("case", ["complete_4_running_1.log", "torn_line_joined_with_next.log", "torn_last_line.log"])
def test_person_who_may_only_read_sees_the_same_trials(case: str, tmp_path: Path) -> None:
    shutil.copy(CASES / case, tmp_path / "journal.log")
    before = (tmp_path / "journal.log").read_bytes()
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_mode & 0o777 == 0o700:  # pytest keeps its folders to itself
            folder.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setresuid(65534, 65534, 65534)
            study = optuna.load_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
            status = 0 if [trial.value for trial in study.trials] == [*FINISHED_VALUES, None] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "journal.log").read_bytes() == before


def test_worker_whose_trial_was_finished_by_another_is_told(tmp_path: Path) -> None:
    zombie = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    trial = zombie.ask()
    other = optuna.load_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    other.tell(trial.number, state=TrialState.FAIL)
    zombie._storage._synced_at = 0.0  # type: ignore[attr-defined]  # as half a second later
    with pytest.raises(UpdateFinishedTrialError):
        trial.report(1.0, step=0)
    with pytest.raises(UpdateFinishedTrialError):
        trial.set_user_attr("k", 1)


def test_claim_of_a_waiting_trial_succeeds_once(tmp_path: Path) -> None:
    first = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    first.enqueue_trial({})
    second = optuna.load_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    claims = [study._storage.set_trial_state_values(0, TrialState.RUNNING) for study in (first, second)]
    assert claims == [True, False]


def test_reader_follows_a_journal_that_was_replaced(tmp_path: Path) -> None:
    """By a breaker of the soft lock: the same records on a new inode; what a fenced writer wrote is not there."""
    study = optuna.create_study(study_name="s", storage=open_storage(StudyPaths(tmp_path)))
    reader = open_storage(StudyPaths(tmp_path))
    journal = tmp_path / "journal.log"
    shutil.copy(journal, tmp_path / "copy")
    study.ask()
    assert len(reader.get_all_trials(0)) == 1
    (tmp_path / "copy").replace(journal)
    reader._file._followed_at = 0.0
    assert reader.get_all_trials(0) == []
    assert study.ask().number == 0
    assert len(reader.get_all_trials(0)) == 1


def test_storage_can_be_sent_to_another_process(tmp_path: Path) -> None:
    storage = open_storage(StudyPaths(tmp_path))
    optuna.create_study(study_name="s", storage=storage)
    assert [study.study_name for study in pickle.loads(pickle.dumps(storage)).get_all_studies()] == ["s"]
