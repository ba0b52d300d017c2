"""All Slurm text: the job's script against a recorded one, the step's command, paths of the nasty kind."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcjobs.config import ClusterConfig, ModeSelection, RunConfig, StudyConfig, StudyFile, Uniform
from hpcjobs.errors import UserError
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import Plan, make_plan
from hpcjobs.slurm import (
    agent_python,
    check_path,
    job_script,
    setup_lines,
    shell_line,
    step_command,
    submitit_parameters,
    worker_command,
)

RECORDED = Path(__file__).with_name("job_script.txt")
NASTY = ["with space", "it's", 'say "hi"', "$HOME", "`id`", "a;b&c|d", "é ß 漢", "*?[x]", "#no comment", "~", "-n"]


def plan(name: str = "study", *, nodes: int = 1, ask: Any = None, **cluster: Any) -> Plan:
    site = ClusterConfig(name="site", **{"cores_per_node": 96, "python": "/opt/python/bin/python3", **cluster})
    study = StudyConfig(parameters={"x": Uniform(type="uniform", min=0, max=1)})
    return make_plan(StudyFile(name=name, study=study, run=RunConfig(nodes=nodes, mode=ask), cluster=site))


FULL: dict[str, Any] = {
    "account": "project_1",
    "slurm_partition": "gpu",
    "qos": "debug",
    "constraint": "mi300x",
    "timeout_min": 30,
    "gres": "gpu:mi300x:8",
    "mem_gb_per_node": 1000,
    "mode": ModeSelection(by="constraint", modes=("spx", "cpx")),
    "sbatch": {"reservation": "my night", "contiguous": True, "mail_type": "END"},
    "srun": ("--label",),
    "modules": ("rocm/6.4.1", "python it's"),
    "setup": ("ulimit -n 65536",),
    "environment": {"GREETING": "it's $HOME"},
}


def test_the_whole_script_is_the_recorded_one() -> None:
    made = plan("it's a study", nodes=4, ask="cpx", **FULL)
    paths = StudyPaths(Path("/scratch/my studies/it's $HOME é"))
    assert job_script(made, paths, 4, Path("/home/me/my project")) == RECORDED.read_text(encoding="utf-8")


def test_the_shown_script_is_what_submitit_submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import submitit

    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    made = plan("it's a study", ask="cpx", **FULL)
    paths = StudyPaths(tmp_path / "it's é")
    executor = submitit.SlurmExecutor(folder=paths.submitit, python=agent_python(made))
    executor.update_parameters(**submitit_parameters(made, tmp_path))
    assert executor._make_submission_file_text(executor._submitit_command_str, "uid") == job_script(
        made, paths, 1, tmp_path
    )


def test_a_site_that_meters_no_memory_and_has_no_features_gets_neither() -> None:
    script = job_script(plan(), StudyPaths(Path("/s")), 1)
    for option in (
        "--mem",
        "--constraint",
        "--account",
        "--qos",
        "--partition",
        "--comment",
        "--gres",
        "--array",
        "wckey",
    ):
        assert option not in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "# setup" not in script


def test_a_shared_node_and_a_site_without_gpus_are_asked_for_as_such() -> None:
    script = job_script(plan(exclusive=False, gpus_per_node=0, gpu_vendor="none"), StudyPaths(Path("/s")), 1)
    assert "--exclusive" not in script
    assert "gpu" not in script


def test_a_comment_asks_for_the_mode_where_the_site_wants_it_so() -> None:
    script = job_script(plan(ask="cpx", mode=ModeSelection(by="comment", modes=("cpx",))), StudyPaths(Path("/s")), 1)
    assert "#SBATCH --comment=cpx\n" in script
    assert "--constraint" not in script


def test_the_profiles_sbatch_options_win_over_ours() -> None:
    options = {"mem": 0, "exclusive": "user", "gpus-per-node": 4, "ntasks_per_core": 1}
    lines = job_script(plan(sbatch=options), StudyPaths(Path("/s")), 1).splitlines()
    for name in ("mem=0", "exclusive=user", "gpus-per-node=4", "ntasks-per-core=1"):
        option = f"#SBATCH --{name}"
        assert [line for line in lines if line.startswith(option.partition("=")[0])] == [option]


@pytest.mark.parametrize("name", NASTY)
def test_the_batch_shell_hands_a_nasty_path_on_unchanged(tmp_path: Path, name: str) -> None:
    interpreter = tmp_path / name / "python"
    interpreter.parent.mkdir()
    interpreter.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$VALUE"\n')
    interpreter.chmod(0o755)
    made = plan(name, python=str(interpreter), environment={"VALUE": name})
    paths = StudyPaths(tmp_path / name / "study")
    script = job_script(made, paths, 1, tmp_path)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["-u", "-m", "submitit.core._submit", str(paths.submitit), name]
    assert f"#SBATCH --job-name={shlex.quote(name)}\n" in script


def test_a_module_that_does_not_load_ends_the_job_with_its_name() -> None:
    script = "module() { return 1; }\n" + "\n".join(setup_lines(plan(modules=("it's 1",)))) + "\necho went on"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "hpcjobs: module load it's 1 failed\n")


def test_a_step_overlaps_spans_the_node_and_keeps_the_jobs_devices() -> None:
    command = step_command(plan(ask="cpx", **FULL), StudyPaths(Path("/scratch/my study")), "12_3", 7)
    end = command.index("/opt/python/bin/python3")
    assert command[0] == "srun"
    assert {"--nodes=1", "--ntasks=1", "--overlap", "--cpus-per-task=96", "--cpu-bind=none", "--label"} <= set(
        command[:end]
    )
    assert "--output=/scratch/my study/logs/12_3/worker_007.log" in command[:end]
    assert not any(option.startswith(("--exact", "--gres", "--gpus")) for option in command[:end])
    assert command[end:] == [
        "/opt/python/bin/python3", "-u", "-m", "hpcjobs.worker", "/scratch/my study", "--worker", "7",
    ]  # fmt: skip
    assert shlex.split(shell_line(command)) == command


def test_workers_run_in_the_container_and_the_agent_outside_it() -> None:
    import sys

    made = plan(container=("apptainer", "exec", "my image.sif"), python=None)
    assert worker_command(made, StudyPaths(Path("/s")), 0)[:4] == ["apptainer", "exec", "my image.sif", "python3"]
    assert agent_python(made) == shlex.quote(sys.executable)
    inside = plan(container=("apptainer", "exec", "i.sif"), python="/opt/venv/bin/python")
    assert worker_command(inside, StudyPaths(Path("/s")), 0)[3] == "/opt/venv/bin/python"
    assert agent_python(inside) == shlex.quote(sys.executable)
    assert agent_python(plan(python="/my env/bin/python")) == "'/my env/bin/python'"


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_path_that_slurm_can_carry_is_allowed(name: str) -> None:
    check_path(Path("/scratch") / name)


@pytest.mark.parametrize("name", ["a%j", "back\\slash", "new\nline", "tab\t", "bell\a", "line\u2028separator"])
def test_a_path_that_slurm_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="in the path; allowed: no %, no backslash and no control character"):
        check_path(Path("/scratch") / name)
