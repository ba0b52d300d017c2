"""A throughput experiment on this machine with real workers, whose images are invented (see fake_measuring.py)."""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.errors import UserError, run_entry
from hpcjobs.load import load_cluster
from hpcjobs.throughput import main
from hpcjobs.throughput_node import EXIT_UNFIT, run_job
from hpcjobs.throughput_plan import Cell, Setup, ThroughputFile, ThroughputPaths, read_file, write_file
from hpcjobs.throughput_table import ThroughputTable
from hpcjobs.throughput_worker import main as worker

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(HERE)  # measuring functions are imported from where the command is called
    return tmp_path / 'it\'s "an" expérience'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins for Slurm's commands, first in PATH; sbatch keeps the script."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "sbatch").write_text(f'#!/bin/sh\ncat "$1" > "{tmp_path}/script"\necho Submitted batch job 41\n')
    for name in ("srun", "sacct", "squeue"):
        (commands / name).write_text("#!/bin/sh\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    return commands


def measure(folder: Path, function: str, *more: str, batch_sizes: str = "8,16", per_gpu: str = "2") -> int:
    arguments = ["--batch-sizes", batch_sizes, "--per-gpu", per_gpu, "--window-s", "0.3", "--no-charts"]
    return main([*arguments, "--measure", f"fake_measuring:{function}", "--folder", str(folder), *more])


def table(folder: Path) -> ThroughputTable:
    return ThroughputTable.read(folder / "results" / "throughput.json")


def raw(folder: Path, batch_size: int, per_gpu: int = 2) -> Any:
    cell = ThroughputPaths(folder).cell(Setup(None, per_gpu), Cell("auto", batch_size))
    return json.loads(cell.read_bytes())


def test_workers_measure_the_same_seconds_and_memory_that_runs_out_is_a_result(folder: Path) -> None:
    assert measure(folder, "measure_fake_images", "--setting", "largest=8", batch_sizes="8,16,32") == 0
    rows = {row.batch_size: row for row in table(folder).rows}
    assert [rows[size].status for size in (8, 16, 32)] == ["ok", "oom", "not tried"]
    windows = [result["windows"] for result in raw(folder, 8)["results"]]
    for name, images in (("end_to_end", 8), ("compute_only", 16)):
        assert [window[name]["images"] for window in windows] == [images] * 2
        speed = sum(window[name]["images_per_s"] for window in windows)
        assert getattr(rows[8], name) == pytest.approx(speed, abs=0.02)
    assert (rows[8].workers, rows[8].memory_gb) == (2, 0.8)
    assert "| 2 per GPU (2) |" in (folder / "results" / "throughput.md").read_text()


def test_this_machine_can_be_the_node_of_somebodys_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `salloc`: there is a job, but without a profile nothing says how to start steps in it."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert measure(folder, "measure_fake_images", batch_sizes="8", per_gpu="1") == 0
    assert [row.status for row in table(folder).rows] == ["ok"]


def test_a_cell_that_fails_does_not_end_the_experiment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(folder, "fails_for_batch_16", batch_sizes="8,16,32", per_gpu="1") == 0
    assert [row.status for row in table(folder).rows] == ["ok", "failed", "ok"]
    assert "ValueError: sixteen is not liked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("opens_no_window", "found no window; allowed: a window named 'end_to_end'"),
        ("returns_nothing", "found NoneType returned; allowed: a dict"),
        ("returns_a_set", "found figures that no JSON can hold"),
    ],
)
def test_a_measuring_function_that_does_not_keep_to_the_rules_is_told(
    folder: Path, function: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(folder, function, batch_sizes="8", per_gpu="1") == 0
    (row,) = table(folder).rows
    assert (row.status, message in row.message) == ("failed", True)
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_worker_that_dies_costs_its_cell_alone(folder: Path, tmp_path: Path) -> None:
    assert measure(folder, "dies_once_for_batch_16", "--setting", f"folder={tmp_path}", batch_sizes="8,16,32") == 0
    assert [row.status for row in table(folder).rows] == ["ok", "failed", "ok"]
    assert {result.get("message") for result in raw(folder, 16)["results"]} >= {"its process ended with -9"}


def test_what_is_measured_is_not_measured_again(folder: Path) -> None:
    assert measure(folder, "measure_fake_images", per_gpu="1") == 0
    paths = ThroughputPaths(folder)
    kept, again = (paths.cell(Setup(None, 1), Cell("auto", size)) for size in (8, 16))
    before = kept.stat().st_mtime_ns
    again.unlink()
    assert main(["--resume", str(folder), "--no-charts"]) == 0
    assert kept.stat().st_mtime_ns == before
    assert again.exists()
    kept.write_text("{}")
    with pytest.raises(UserError, match=r"auto-00008\.json: found no measurement .* --resume measures the cell again"):
        main(["--report", str(folder)])


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize(("measured", "code"), [([8, 16], 128 + signal.SIGTERM), ([16], EXIT_UNFIT)])
def test_what_is_measured_when_slurm_ends_the_job_is_no_result(
    folder: Path, number: int, measured: list[int], code: int
) -> None:
    """Slurm tells the steps, each of which ends by it. The job is queued again if that brings it on."""
    paths = ThroughputPaths(folder)
    write_file(paths, ThroughputFile(
        name="x", measure="fake_measuring:is_told_to_end_at_batch_16", working_folder=HERE, batch_sizes=measured,
        window_s=0.3, settings={"signal": int(number)},
    ))  # fmt: skip
    assert run_job(str(folder), None) == code
    assert not paths.cell(Setup(None, 1), Cell("auto", 16)).exists()
    assert paths.cell(Setup(None, 1), Cell("auto", 8)).exists() == (8 in measured)
    assert paths.problem(None).exists() == (code == EXIT_UNFIT)


def test_the_next_jobs_of_an_experiment_can_have_more_time(folder: Path, tmp_path: Path, slurm: Path) -> None:
    paths = ThroughputPaths(folder)
    paths.submitit.mkdir(parents=True)
    write_file(paths, ThroughputFile(name="x", batch_sizes=(8,), modes=("cpx",), cluster=load_cluster("emulated")))
    assert main(["--resume", str(folder), "--timeout-min", "77", "--account", "a b"]) == 0
    script = (tmp_path / "script").read_text()
    assert "--time=77" in script and "--account='a b'" in script
    write_file(paths, ThroughputFile(name="x", batch_sizes=(8,)))
    with pytest.raises(UserError, match="found for an experiment on this machine"):
        main(["--resume", str(folder), "--timeout-min", "77"])


def test_what_the_jobs_of_an_experiment_load_can_be_changed_by_nobody_else(
    folder: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0)
    try:
        assert measure(folder, "measure_fake_images", "--cluster", "emulated", "--modes", "cpx", per_gpu="1") == 0
    finally:
        os.umask(before)
    paths = ThroughputPaths(folder)
    made = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    assert paths.submitit in made
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    paths.submitit.chmod(0o777)
    with pytest.raises(UserError, match="everybody can write to it"):
        main(["--resume", str(folder)])


def test_a_worker_that_is_never_ready_is_given_up(folder: Path) -> None:
    file = ThroughputFile(
        name="x", measure="fake_measuring:never_ready_for_batch_16", working_folder=HERE, batch_sizes=(8, 16, 32),
        window_s=0.3, patience_s=40.0,
    )  # fmt: skip
    write_file(ThroughputPaths(folder), file)
    assert main(["--resume", str(folder), "--no-charts"]) == 0
    assert [row.status for row in table(folder).rows] == ["ok", "failed", "ok"]
    assert "not ready after 40 s" in raw(folder, 16, per_gpu=1)["results"][0]["message"]


def test_nothing_is_left_on_the_nodes_own_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "disk"
    here.mkdir()
    abandoned = here / "hpcjobs-node-of-a-killed-job"
    abandoned.mkdir()
    (abandoned / "agent").write_text(f"{os.getpid()} another-boot:1:1")
    os.utime(abandoned, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    assert measure(folder, "measure_fake_images", batch_sizes="8", per_gpu="1") == 0
    assert list(here.iterdir()) == []


def test_a_measuring_function_that_is_not_there_is_told_and_nothing_is_measured(folder: Path) -> None:
    assert measure(folder, "nothing_of_this_name", per_gpu="1") == 1
    (problem,) = table(folder).problems.values()
    assert "fake_measuring" in problem and "nothing_of_this_name" in problem
    assert not table(folder).rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "cpx"], "--modes: found 'cpx'; allowed with --cluster alone"),
        (["--cluster", "lumi", "--modes", "cpx"], "allowed on cluster lumi: none"),
        (["--set", "timeout_min=3"], "found without --cluster"),
        (["--precisions", "a/b"], "letters and digits"),
        (["--measure", "fake_measuring"], "--measure: found 'fake_measuring'; allowed: module:function"),
        (["--measure", "fake_measurring:f"], "--measure: found 'fake_measurring:f', but there is no such module"),
        (["--measure", "hpcjobs.nothing:f"], "but there is no such module"),
        (["--window-s", "0"], "window_s"),
    ],
)
def test_mistakes_are_told_before_anything_is_made(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        measure(folder, "measure_fake_images", *arguments)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [([], "--data: found nothing"), (["--data", "not prepared yet"], "not prepared yet: found no such folder")],
)
def test_real_training_needs_data_and_a_look_at_the_plan_does_not(
    folder: Path, data: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=message):
        main(["--folder", str(folder), *data])
    assert main(["--folder", str(folder), *data, "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "x8: 8 workers" in out
    assert "without --dry-run this is an error: --data" in out and message in out
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--resume", "{}", "--dry-run"], "--dry-run"),
        (["--resume", "{}", "--batch-sizes", "8"], "--batch-sizes"),
        (["--resume", "{}", "--report", "{}"], "--resume"),
        (["--report", "{}", "--wait"], "--wait"),
        (["--report", "{}", "--set", "timeout_min=3"], "--set"),
        (["--report", "{}", "--account", "x"], "--account"),
    ],
)
def test_what_an_experiment_that_exists_cannot_take_is_refused(folder: Path, arguments: list[str], option: str) -> None:
    write_file(ThroughputPaths(folder), ThroughputFile(name="x", batch_sizes=(8,)))
    with pytest.raises(UserError, match=f"{option}: found together with --re"):
        main([argument.format(folder) for argument in arguments])
    assert [path.name for path in folder.iterdir()] == ["throughput.yaml"]


@pytest.mark.parametrize("option", ["--modes", "--precisions"])
def test_a_list_without_words_is_refused(folder: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure(folder, "measure_fake_images", option, ",")
    assert "found ','; allowed: words with a comma between them" in " ".join(capsys.readouterr().err.split())


def test_each_mode_is_a_job_with_its_constraint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(folder, "measure_fake_images", "--cluster", "emulated", "--dry-run", per_gpu="1,2") == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "--constraint" in line] == [
        f"#SBATCH --constraint={mode}" for mode in ("spx", "dpx", "qpx", "cpx")
    ]
    assert "cpx: 64 workers, each on 1 core of the job's 64; cells" in out
    assert "cpx-x2: 128 workers, which share the job's 64 cores; cells" in out
    assert not folder.exists()


def test_a_missing_account_is_told_by_the_dry_run_and_refused_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    needs = ("--cluster", "emulated", "--set", "account_required=true")
    assert measure(folder, "measure_fake_images", *needs, "--dry-run") == 0
    assert "without --dry-run this is an error: --account: found nothing" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="--account: found nothing"):
        measure(folder, "measure_fake_images", *needs)
    assert not folder.exists()


def test_a_refusal_of_sbatch_is_told_once_and_the_experiment_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun", "sacct", "squeue"):
        (commands / name).write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    assert run_entry(lambda: measure(folder, "measure_fake_images", "--cluster", "emulated", per_gpu="1")) == 2
    err = capfd.readouterr().err
    assert "sbatch refused the job of mode spx: sbatch: error: Invalid account" in err
    assert err.count("Invalid account") == 1
    assert f"--resume {shlex.quote(str(folder))}" in err
    assert read_file(folder).modes


def test_a_mode_whose_job_waits_or_runs_is_not_submitted_again_and_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "squeue").write_text("#!/bin/sh\necho '41|PENDING|1:00|Priority'\n")
    (commands / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    paths = ThroughputPaths(folder)
    write_file(paths, ThroughputFile(name="x", batch_sizes=(8,), modes=("cpx",), cluster=load_cluster("emulated")))
    paths.jobs.write_text('{"cpx": "41"}')
    assert main(["--resume", str(folder)]) == 0
    assert "mode cpx: job 41 waits or runs already" in capsys.readouterr().out
    (commands / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"nothing is known of job 41: .*Unable to contact"):
        main(["--resume", str(folder)])
    paths.jobs.write_text("{")
    with pytest.raises(UserError, match=r"jobs\.json: found no record of jobs"):
        main(["--resume", str(folder)])


def test_an_experiments_file_comes_back_as_it_was(tmp_path: Path) -> None:
    file = ThroughputFile(name="x", batch_sizes=(32, 8), precisions=("fp32", "bf16"), settings={"size": "s"})
    write_file(ThroughputPaths(tmp_path), file)
    assert read_file(tmp_path) == file
    assert [cell.name for cell in file.cells] == ["fp32-00008", "fp32-00032", "bf16-00008", "bf16-00032"]
    with pytest.raises(UserError, match=r"found no throughput\.yaml"):
        read_file(tmp_path / "elsewhere")


def test_a_worker_is_not_started_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCJOBS_NODE_FOLDER", raising=False)
    with pytest.raises(UserError, match=r"run python -m hpcjobs\.throughput instead"):
        worker([str(tmp_path), "--worker", "0"])
    assert "HPCJOBS_NODE_FOLDER" not in os.environ
