"""``submit --mode auto``: what it says, and what is then submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.errors import UserError
from hpcjobs.submit import main
from tests.hpcjobs.published import published_table

HERE = Path(__file__).parent
# as if the published figures had been measured of a test's objective
TABLE = {"cluster": "emulated", "objective": "objectives:with_batch_size"}


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(HERE)  # objectives are imported from where submit is called
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    (tmp_path / "study.yaml").write_text(
        "objective: objectives:with_batch_size\nfixed: {batch_size: 16}\n"
        "parameters: {x: {type: uniform, min: 0, max: 1}}\n"
    )
    table = published_table()
    (tmp_path / "table.json").write_text(type(table)(**{**vars(table), **TABLE}).to_json())

    def run(*more: str) -> str:
        arguments = ["--study", str(tmp_path / "study.yaml"), "--folder", str(tmp_path / "f"), "--dry-run"]
        assert main([*arguments, *more]) == 0
        return capsys.readouterr().out.replace("\n", " ")

    run.table = ["--throughput-table", str(tmp_path / "table.json")]  # type: ignore[attr-defined]
    return run


def test_the_measured_mode_is_submitted_and_its_reason_said(submit) -> None:
    out = submit("--cluster", "emulated", "--mode", "auto", *submit.table, "--trials", "2000")
    assert "mode auto: measured (table published): at batch size 16, precision auto, cpx trains 8,309 images/s" in out
    assert "#SBATCH --constraint=cpx" in out
    assert "one per logical GPU that is there; expected 64 a node" in out


def test_no_more_workers_are_started_than_there_are_trials(submit) -> None:
    out = submit("--cluster", "emulated", "--mode", "auto", *submit.table, "--trials", "20")
    assert "#SBATCH --constraint=dpx" in out or "#SBATCH --constraint=qpx" in out
    assert "the sampler has" in out


def test_a_table_beside_the_profile_is_found(submit, tmp_path: Path) -> None:
    profile = tmp_path / "mysite.yaml"
    profile.write_text((HERE.parents[1] / "configs/clusters/emulated.yaml").read_text())
    (tmp_path / "mysite.throughput.json").write_bytes((tmp_path / "table.json").read_bytes())
    assert "mode auto: measured" in submit("--cluster", str(profile), "--mode", "auto", "--trials", "2000")


def test_without_a_table_a_rule_answers_and_says_so(submit) -> None:
    out = submit("--cluster", "emulated", "--mode", "auto", "--trials", "2000")
    assert "mode auto: rule, since there is no table of measurements: cpx" in out
    assert "python -m hpcjobs.throughput measures this cluster" in out


def test_the_rule_starts_as_many_workers_as_it_says(submit) -> None:
    out = submit("--cluster", "emulated", "--mode", "auto", "--trials", "50")
    assert "cpx with 50 workers a node" in out
    assert "50 a node" in out and "expected 64 a node" not in out


def test_what_the_user_gives_wins(submit) -> None:
    out = submit("--cluster", "emulated", "--mode", "auto", "--workers", "5", "--trials", "2000")
    assert "5 a node" in out


def test_several_workers_on_each_gpu_can_be_asked_for(submit) -> None:
    out = submit("--cluster", "leonardo", "--account", "x", "--workers-per-gpu", "3")
    assert "3 per logical GPU that is there; expected 12 a node" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--throughput-table", "t.json"], "found without --mode auto"),
        (["--cluster", "emulated", "--mode", "auto", "--throughput-table", "nowhere.json"], "no such file"),
        (["--workers", "2", "--workers-per-gpu", "2"], "found both"),
    ],
)
def test_mistakes_are_told(submit, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        submit(*arguments)
