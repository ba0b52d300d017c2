"""Submit: everything is validated before anything is made; a dry run shows what would be done."""

from __future__ import annotations

import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpcjobs.agent import new_report
from hpcjobs.errors import run_entry
from hpcjobs.filesystem import Mount
from hpcjobs.heartbeat import read_nodes
from hpcjobs.job import Job
from hpcjobs.launch import recorded
from hpcjobs.load import read_study_file
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import make_plan
from hpcjobs.study import open_study
from hpcjobs.submission import Submission
from hpcjobs.submit import main, make

MODULE = """\
def train(params, context):
    return params["x"]
train.parameters = {"x": {"type": "float", "min": 0.0, "max": 1.0}}
train.environment = {"MY_SWITCH": "1"}
def hungry(params, context):
    return 0.0
hungry.needs_data = True
"""
STUDY = "objective: quick_objective:train\nparameters:\n  x: {type: uniform, min: 0, max: 1}\n"
CLUSTER = """\
name: site
cores_per_node: 8
gpus_per_node: 4
mode: {by: constraint, modes: [spx, cpx]}
python: %s
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own folder with an objective, a study and a profile; it is the working folder."""
    folder = tmp_path / "it's my project"
    folder.mkdir()
    (folder / "quick_objective.py").write_text(MODULE)
    (folder / "search.yaml").write_text(STUDY)
    (folder / "site.yaml").write_text(CLUSTER % sys.executable)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    return folder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins for Slurm's commands, first in PATH; sbatch keeps the script and its file mode mask."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "sacct", "squeue", "scontrol", "scancel"):
        (commands / name).write_text("#!/bin/sh\n")
    (commands / "sbatch").write_text(
        f'#!/bin/sh\ncat "$1" >> "{tmp_path}/submitted"\numask > "{tmp_path}/umask"\necho Submitted batch job 123\n'
    )
    for command in commands.iterdir():
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    return commands


def submit(*arguments: str) -> int:
    return run_entry(lambda: main(list(arguments)))


def everything_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_help_needs_neither_torch_nor_optuna_nor_submitit() -> None:
    code = """
import sys
from hpcjobs.submit import main
try:
    main(["--help"])
except SystemExit:
    loaded = {"torch", "optuna", "submitit"} & sys.modules.keys()
    sys.exit(f"loaded: {loaded}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


def test_a_dry_run_shows_plan_script_and_step_and_makes_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(project)
    arguments = (
        "--study",
        "search.yaml",
        "--cluster",
        "site.yaml",
        "--nodes",
        "3",
        "--mode",
        "CPX",
        "--account",
        "p 1",
    )
    assert submit(*arguments, "--trials", "200", "--dry-run") == 0
    out = capsys.readouterr().out
    assert everything_in(project) == before
    for line in (
        "#SBATCH --array=0-2%3",
        "#SBATCH --account='p 1'",
        "#SBATCH --constraint=cpx",
        f"#SBATCH --chdir={shlex.quote(str(project))}",
        "MY_SWITCH=1",
        "nothing was made or submitted (--dry-run)",
    ):
        assert line in out.splitlines()
    step = next(line for line in out.splitlines() if line.startswith("srun "))
    assert shlex.split(step)[-3].startswith(f"{project}/runs/search-")
    assert "expected 32 a node" in out


@pytest.mark.parametrize("data", [[], ["--data", "not yet"]])
def test_a_dry_run_shows_the_plan_before_there_is_data(
    data: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "hungry.yaml").write_text(STUDY.replace(":train", ":hungry"))
    arguments = ["--study", "hungry.yaml", "--cluster", "site.yaml", *data]
    assert submit(*arguments, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "#SBATCH" in shown
    assert "without --dry-run this is an error: --data" in shown
    assert submit(*arguments) == 2
    assert capsys.readouterr().err.startswith("error: --data")


@pytest.mark.parametrize("name", ["lumi", "leonardo", "adastra", "site.yaml"])
def test_a_site_that_demands_an_account_is_told_by_a_dry_run_and_before_a_study_is_made(
    name: str, project: Path, slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    arguments = ["--study", "search.yaml", "--cluster", name, "--folder", "mine"]
    needed = [] if name != "site.yaml" else ["--set", "account_required=true"]
    assert submit(*arguments, *needed, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "#SBATCH" in shown
    site = name.removesuffix(".yaml")
    assert f"this is an error: --account: found nothing, but cluster {site} runs no job without one" in shown
    assert submit(*arguments, *needed) == 2
    assert "give it as --account NAME" in capsys.readouterr().err
    assert not (project / "mine").exists()
    given = (["--account", "p1"], ["--set", "sbatch.account=p1"], ["--set", "account_required=false"], ["--prepare"])
    for option in given:
        assert submit(*arguments, *needed, *option, "--dry-run") == 0
        assert "this is an error" not in capsys.readouterr().out
    monkeypatch.setenv("SBATCH_ACCOUNT", "p1")
    assert submit(*arguments, *needed, "--dry-run") == 0
    assert "this is an error" not in capsys.readouterr().out


def test_a_study_goes_on_only_with_the_account_that_its_site_demands(
    project: Path, slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    arguments = ["--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", "--account", "p1"]
    assert submit(*arguments, "--set", "account_required=true") == 0
    assert submit("--resume", "mine", "--set", "account=null") == 2
    assert "error: --account: found nothing" in capsys.readouterr().err
    assert submit("--resume", "mine", "--set", "account=p2") == 0


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ("4", "4 a node, each on 2 cores of the job's 8"),
        ("5", "5 a node, each on 1 core of the job's 8"),
        ("9", "9 a node, which share the job's 8 cores"),
    ],
)
def test_the_plan_tells_a_workers_cores_from_the_jobs(
    project: Path, workers: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--study", "search.yaml", "--cluster", "site.yaml", "--workers", workers, "--dry-run") == 0
    out = capsys.readouterr().out
    assert said in out
    assert "#SBATCH --cpus-per-task=8" in out and "It spans all 8 cores of the node" in out


def test_a_study_to_be_started_by_hand_in_jobs_needs_a_profile(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--study", "search.yaml", "--prepare") == 2
    assert "--prepare: found without --cluster" in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_a_dry_run_on_this_machine_shows_a_workers_command(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--study", "search.yaml", "--workers", "2", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "this machine" in out
    assert "SBATCH" not in out
    assert shlex.split(next(line for line in out.splitlines() if "hpcjobs.worker" in line))[-1] == "0"


@pytest.mark.parametrize("lines", [0, 20])
def test_a_reader_that_leaves_early_causes_no_traceback(project: Path, lines: int) -> None:
    command = f"{shlex.quote(sys.executable)} -u -m hpcjobs.submit --study search.yaml --cluster site.yaml --dry-run"
    done = subprocess.run(["bash", "-c", f"{command} | head -n {lines}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--study: found nothing; allowed: a YAML file"),
        (["--study", "nothing.yaml"], "nothing.yaml: there is no such file"),
        (["--study", "search.yaml", "--nodes", "2"], "--nodes: found 2; allowed: 1 without --cluster"),
        (["--study", "search.yaml", "--mode", "cpx"], "--mode: found 'cpx'; allowed: no mode without --cluster"),
        (["--study", "search.yaml", "--trials", "+5"], "--trials: found '+5'; allowed: +N only with --resume"),
        (["--study", "search.yaml", "--data", "nowhere"], "nowhere: found no such folder"),
        (["--study", "search.yaml", "--folder", "."], "entries that are no study"),
        (["--study", "search.yaml", "--folder", "a%j", "--cluster", "site.yaml"], "found '%' in the path"),
        (["--study", "search.yaml", "--set", "timeout_min=3"], "found without --cluster"),
        (["--study", "search.yaml", "--cluster", "nowhere"], "--cluster: found 'nowhere'; allowed: a path"),
        (["--study", "search.yaml", "--cluster", "site.yaml", "--mode", "qpx"], "allowed on cluster site: spx, cpx"),
        (["--study", "search.yaml", "--cluster", "site.yaml", "--set", "timeout"], "--set: found 'timeout'"),
        (["--study", "search.yaml", "--cluster", "site.yaml", "--set", "timeout=3"], "did you mean 'timeout_min'?"),
        (["--study", "typo.yaml"], "typo.yaml, line 2, parameters.y: found no such parameter; allowed: the"),
        (["--study", "outside.yaml"], "outside.yaml, line 3, parameters.x.max: found 7.0; allowed: 0 to 1"),
        (["--study", "missing.yaml"], "there is no module 'nowhere'"),
        (["--study", "hungry.yaml"], "--data: found nothing, but the objective needs prepared data"),
        (["--study", "hungry.yaml", "--data", "."], "found no manifest.json"),
        (["--study", "sampler.yaml"], "sampler.yaml, line 4, sampler.name: found unknown sampler 'tpee'"),
        (["--study", "option.yaml"], "'gamma': 'abc'} and pruner 'none'"),
        (["--study", "search.yaml", "--folder", "x" * 300], "/study.yaml: File name too long"),
        (["--study", "search.yaml", "--folder", "~nobody-here/x"], "~nobody-here/x: found no home of ~nobody-here"),
        (["--study", "search.yaml", "--cluster", "site"], "did you mean site.yaml?"),
        (["--resume", "nowhere"], "nowhere: found no such folder; allowed: a study folder"),
        (["--resume", "."], "found no study.yaml"),
        (["--resume", ".", "--workers", "2"], "as many as --set workers_per_node=N says"),
        (["--resume", ".", "--mode", "cpx"], "with --set mode.default=MODE"),
        (["--resume", ".", "--study", "search.yaml"], "--study: found together with --resume"),
        (["--resume", ".", "--trials", "5"], "--trials: found '5' with --resume; allowed: +N"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_2_before_anything_is_made(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    (project / "typo.yaml").write_text(STUDY.replace("\nparameters:\n  x:", "\nparameters: {y: 1, x:").rstrip() + "}")
    (project / "outside.yaml").write_text(STUDY.replace("max: 1", "max: 7"))
    (project / "missing.yaml").write_text(STUDY.replace("quick_objective", "nowhere"))
    (project / "hungry.yaml").write_text(STUDY.replace(":train", ":hungry"))
    (project / "sampler.yaml").write_text(STUDY + "sampler: {name: tpee}\n")
    (project / "option.yaml").write_text(STUDY + "sampler: {name: tpe, options: {gamma: abc}}\n")
    before = everything_in(project)
    assert submit(*arguments) == 2
    assert expected in capsys.readouterr().err
    assert everything_in(project) == before


@pytest.mark.parametrize("name", ["optuna.py", "submitit.py", "numpy/__init__.py"])
def test_a_file_that_hides_a_package_is_told_before_anything_is_made(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("import nothing_that_is_there\n")
    command = [sys.executable, "-m", "hpcjobs.submit", "--study", "search.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    package = name.partition("/")[0].removesuffix(".py")
    assert f"{project / name}: found a file that hides the package {package} from Python" in done.stderr
    assert not (project / "runs").exists()


@pytest.mark.parametrize("command", [["submit", "--study", "search.yaml"], ["cancel", "runs/one"]])
def test_a_current_folder_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = subprocess.run(
        [sys.executable, "-m", f"hpcjobs.{command[0]}", *command[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: found no current folder: it was removed; allowed: one that exists; cd to another\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes", "0"], "argument --nodes: found '0'; allowed: a whole number of at least 1"),
        (["--nodes", "1.5"], "argument --nodes: found '1.5'"),
        (["--workers", "-1"], "argument --workers"),
        (["--trials", "0"], "argument --trials: found '0'"),
        (["--trials", "1000000000"], "argument --trials: found '1000000000'"),
        (["--epochs", "many"], "argument --epochs: found 'many'"),
        (["--mode", "cxp"], "argument --mode: found 'cxp'; allowed: spx, dpx, qpx, cpx, auto; did you mean 'cpx'?"),
        (["--name", "a\nb"], "argument --name"),
    ],
)
def test_an_impossible_argument_ends_with_2(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--study", "search.yaml", *arguments])
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["search.yaml"], "; did you mean --study search.yaml?"),
        (["my search.yml", "--workers", "2"], "; did you mean --study 'my search.yml'?"),
        (["--study", "search.yaml", "site.yaml"], ""),
        (["--clutser", "site.yaml"], ""),
    ],
)
def test_a_study_file_without_its_option_is_told_which(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "unrecognized arguments: " in line]
    assert told.partition("; ")[2] == hint.removeprefix("; ")


@pytest.mark.usefixtures("slurm")
def test_a_study_on_slurm_is_made_and_submitted_and_the_next_commands_are_said(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--study", "search.yaml", "--cluster", "site.yaml", "--nodes", "2", "--trials", "50", "--epochs", "3")
    assert submit(*arguments, "--folder", "my study") == 0
    out = capsys.readouterr().out
    file = read_study_file(StudyPaths(project / "my study"))
    assert (file.name, file.study.trials, file.study.epochs, file.run.nodes) == ("search", 50, 3, 2)
    assert file.run.working_folder == project
    assert file.cluster is not None
    assert "submitted 2 nodes as job 123" in out
    for command in ("status", "collect", "cancel"):
        assert f"python -m hpcjobs.{command} {shlex.quote(str(project / 'my study'))}" in out
    assert "#SBATCH --array=0-1%2" in (tmp_path / "submitted").read_text()


@pytest.mark.parametrize("existed", [True, False])
def test_a_warm_start_that_is_refused_leaves_nothing_behind(
    existed: bool, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--study", "search.yaml", "--trials", "2", "--epochs", "1")
    if existed:
        (project / "new").mkdir()
    assert submit(*arguments, "--folder", "old", "--prepare", "--cluster", "site.yaml") == 0
    before = everything_in(project)
    assert submit(*arguments, "--folder", "new", "--warm-start", "old", "--detach") == 2
    assert "found no completed trial" in capsys.readouterr().err
    assert everything_in(project) == before


@pytest.mark.usefixtures("slurm")
def test_of_two_submissions_into_one_folder_the_second_changes_nothing_and_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", "--prepare")

    def slowly(submission: Submission) -> None:  # between its checks and its making, another one is made
        monkeypatch.setattr("hpcjobs.submit.make", make)
        assert submit(*arguments, "--trials", "7") == 0
        make(submission)

    monkeypatch.setattr("hpcjobs.submit.make", slowly)
    assert submit(*arguments, "--trials", "9") == 2
    assert "already holds a study" in capsys.readouterr().err
    study = open_study(StudyPaths(project / "mine"))
    assert (study.file.study.trials, len(study.trials())) == (7, 7)


@pytest.mark.usefixtures("slurm")
def test_a_submission_that_is_killed_in_the_midst_is_not_in_the_way_of_the_next(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", "--prepare")
    kill = (
        "import os, sys, hpcjobs.study as study, hpcjobs.submit as submit\n"
        "study._enqueue = lambda *all: os.kill(os.getpid(), 9)\n"
        "submit.main(sys.argv[1:])"
    )
    killed = subprocess.run([sys.executable, "-c", kill, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert submit(*arguments, "--trials", "7") == 0
    assert len(open_study(StudyPaths(project / "mine")).trials()) == 7


@pytest.mark.usefixtures("slurm")
def test_others_cannot_write_to_a_study_whatever_the_shells_umask(project: Path, tmp_path: Path) -> None:
    import os

    before = os.umask(0)
    try:
        assert submit("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine") == 0
    finally:
        os.umask(before)
    for path in (project / "mine", *everything_in(project / "mine")):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
    assert (tmp_path / "umask").read_text().strip() == "0022"


def test_a_refusal_of_sbatch_is_told_and_the_study_is_kept(
    project: Path, slurm: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    assert submit("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine") == 2
    err = capfd.readouterr().err
    assert "sbatch refused the job: sbatch: error: Invalid account" in err
    assert err.count("Invalid account") == 1
    assert f"--resume {shlex.quote(str(project / 'mine'))} --set KEY=VALUE" in err
    assert "Traceback" not in err


def test_what_is_queued_when_sbatch_refuses_a_later_array_is_recorded_and_told(
    project: Path, slurm: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (slurm / "sbatch").write_text(
        f"#!/bin/sh\nif [ -e {tmp_path}/once ]; then echo 'sbatch: error: QOSMaxSubmitJob' >&2; exit 1; fi\n"
        f"touch {tmp_path}/once\necho Submitted batch job 17\n"
    )
    arguments = ("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine")
    assert submit(*arguments, "--nodes", "5", "--set", "max_array_size=3") == 2
    (record,) = recorded(StudyPaths(project / "mine"))
    assert (record.job_ids, record.elements, record.slurm) == (("17",), 3, True)
    err = capfd.readouterr().err
    assert "sbatch refused 2 of 5 nodes: sbatch: error: QOSMaxSubmitJob" in err
    assert "3 nodes of the study, queued before as job 17, will run" in err
    assert f"--resume {shlex.quote(str(project / 'mine'))} --nodes 2" in err


def test_without_slurm_a_cluster_is_refused_before_anything_is_made(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(project)
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit("--study", "search.yaml", "--cluster", "site.yaml") == 2
    assert "found no sbatch, srun, sacct on this machine" in capsys.readouterr().err
    assert everything_in(project) == before


@pytest.mark.usefixtures("slurm")
def test_a_study_is_resumed_with_more_nodes_and_trials_but_never_made_twice(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpcjobs.study import open_study

    new = ("--study", "search.yaml", "--cluster", "site.yaml", "--trials", "4", "--folder", "mine")
    assert submit(*new, "--prepare") == 0
    assert not (tmp_path / "submitted").exists()
    assert submit(*new) == 2
    assert "found a study there" in capsys.readouterr().err
    assert submit("--resume", "mine", "--dry-run") == 0
    assert "those that are left" in capsys.readouterr().out
    assert submit("--resume", "mine", "--nodes", "3", "--trials", "+5", "--set", "account=other") == 0
    assert len(open_study(StudyPaths(project / "mine")).trials()) == 9
    script = (tmp_path / "submitted").read_text()
    assert "#SBATCH --array=0-2%3" in script
    assert "#SBATCH --account=other" in script
    (project / "mine" / "submitit").chmod(0o777)
    assert submit("--resume", "mine") == 2
    assert "mine/submitit: everybody can write to it (mode 777)" in capsys.readouterr().err


NO_GPU = ("--set", "gpu_vendor=none", "--set", "mode={by: none}")


@pytest.mark.usefixtures("slurm")
def test_what_a_resume_sets_counts_for_the_nodes_that_start_from_then_on(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "quick_objective.py").write_text(MODULE + "import os\ndef told(params, context):\n"
                                                "    return float(os.environ['FOO'])\n")  # fmt: skip
    (project / "search.yaml").write_text(STUDY.replace(":train", ":told"))
    paths = StudyPaths(project / "mine")
    new = ("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", "--trials", "2", "--epochs", "1")
    assert submit(*new, *NO_GPU, "--workers", "2", "--set", "environment={FOO: '1'}", "--prepare") == 0
    first = paths.config.read_bytes()

    changes = ("--resume", "mine", "--set", "environment={FOO: '2'}", "--set", "workers_per_node=1", "--nodes", "2")
    assert submit(*changes, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "1 a node" in shown and "every node that starts from now on" in shown
    assert paths.config.read_bytes() == first
    assert submit(*changes, "--prepare") == 0
    assert read_study_file(paths).run.nodes == 1, "how many nodes is a matter of one submission"

    subprocess.run([sys.executable, "-m", "hpcjobs.node", "mine"], check=True, capture_output=True)
    assert [trial.values for trial in open_study(paths).trials()] == [[2.0], [2.0]]
    (report,) = read_nodes(paths)
    assert len(report.workers) == 1


def test_a_study_that_sbatch_refused_goes_on_with_what_is_corrected(
    project: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepts = (slurm / "sbatch").read_text()
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    new = ("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", "--mode", "cpx")
    assert submit(*new) == 2
    (slurm / "sbatch").write_text(accepts)
    corrected = ("--set", "slurm_partition=gpu", *NO_GPU, "--set", "workers_per_node=2")
    assert submit("--resume", "mine", *corrected) == 0
    assert "2 a node" in capsys.readouterr().out
    file = read_study_file(StudyPaths(project / "mine"))
    assert file.cluster is not None
    assert (file.cluster.slurm_partition, file.cluster.gpu_vendor, file.cluster.workers_per_node) == ("gpu", "none", 2)
    assert file.run.mode is None


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("given", "setting", "mode"),
    [
        (("--mode", "cpx"), "mode.default=spx", "spx"),
        (("--mode", "cpx"), "timeout_min=5", "cpx"),
        (("--mode", "cpx"), "mode.by=comment", "cpx"),
    ],
)
def test_a_mode_that_a_resume_sets_wins_over_the_one_the_study_began_with(
    project: Path, given: tuple[str, ...], setting: str, mode: str
) -> None:
    assert submit("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", *given, "--prepare") == 0
    assert submit("--resume", "mine", "--set", setting) == 0
    assert make_plan(read_study_file(StudyPaths(project / "mine"))).mode == mode


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("options", [("--nodes", "2"), ("--trials", "+1"), ("--set", "timeout_min=60")])
def test_a_resume_that_changes_nothing_leaves_study_yaml_alone(project: Path, options: tuple[str, ...]) -> None:
    new = ("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", "--prepare")
    assert submit(*new) == 0
    config = StudyPaths(project / "mine").config
    config.write_text(f"# mine\n{config.read_text()}")
    before = config.read_bytes()
    assert submit("--resume", "mine", *options) == 0
    assert config.read_bytes() == before


@pytest.mark.usefixtures("slurm")
def test_a_resume_changes_nothing_of_a_study_whose_search_was_edited(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ("--study", "search.yaml", "--cluster", "site.yaml", "--folder", "mine", "--prepare")
    assert submit(*new) == 0
    config = StudyPaths(project / "mine").config
    config.write_text(config.read_text().replace("max: 1.0", "max: 0.5"))
    before = config.read_bytes()
    assert submit("--resume", "mine", "--set", "timeout_min=5") == 2
    assert "allowed: no change within a study" in capsys.readouterr().err
    assert config.read_bytes() == before
    assert submit("--resume", "mine", "--set", "study.epochs=5") == 2
    assert "cluster.study: found an unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "nodes", "told"), [("ext4", "2", True), ("ext4", "1", False), ("lustre", "2", False)])
def test_several_nodes_on_a_filesystem_of_this_one_are_noted(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    nodes: str,
    told: bool,
) -> None:
    monkeypatch.setattr("hpcjobs.submit.mount_of", lambda folder: Mount(kind, (), "/"))
    assert submit("--study", "search.yaml", "--cluster", "site.yaml", "--nodes", nodes, "--dry-run") == 0
    assert ("do other nodes see it?" in capsys.readouterr().out) == told


def test_a_resume_while_slurm_is_silent_tells_what_was_done_and_how_to_go_on(
    project: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ("--study", "search.yaml", "--cluster", "site.yaml", "--trials", "4", "--folder", "mine")
    assert submit(*new, "--prepare") == 0
    # an agent that has not ended, as far as its file tells: Slurm is asked for its job
    new_report(Job("17_0", "17_0"), "its agent").write(StudyPaths(project / "mine"))
    (slurm / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    assert submit("--resume", "mine", "--trials", "+3", "--nodes", "2") == 2
    err = capsys.readouterr().err
    assert "Unable to contact slurm controller\nThe study is kept, with all its trials." in err
    assert err.rstrip().endswith("--nodes 2")


def test_the_overview_names_the_commands_that_are_there() -> None:
    done = subprocess.run([sys.executable, "-m", "hpcjobs"], capture_output=True, text=True, check=True)
    assert "submit " in done.stdout


def test_a_command_after_a_blank_is_told_how_it_is_called() -> None:
    done = subprocess.run([sys.executable, "-m", "hpcjobs", "submit", "--wait"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "call python -m hpcjobs.submit --wait" in done.stderr
