"""Pure: plan -> submitit's parameters, the sbatch text, the ``srun`` command of a step. All Slurm text is here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from hpcjobs.config import CONTROL_CHARACTER
from hpcjobs.errors import UserError
from hpcjobs.job import MOST_REQUEUES
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import Plan

# An agent that stops in order queues its element again itself. One that was killed (signals are codes over 128) cannot:
# the batch shell does it then, as often as the agent would.
TEARDOWN = [
    "code=$?",
    f'if [ "$code" -gt 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_REQUEUES} ]; then',
    '    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"',
    "fi",
    'exit "$code"',
]


def check_path(path: Path) -> None:
    """Refuse what Slurm cannot carry: ``%`` and backslash are patterns in its file names, a newline ends an option.

    Raises:
        UserError: the path holds one of them.
    """
    text = str(path)
    found = CONTROL_CHARACTER.search(text)
    bad = found.group() if found else next((c for c in "%\\" if c in text), None)
    if bad is not None or not text.isprintable():
        raise UserError(
            f"{text!r}: found {bad or 'a character that is not printable'!r} in the path; allowed: no %, no "
            "backslash and no control character, since Slurm reads them as patterns; choose another folder"
        )


def agent_python(plan: Plan) -> str:
    """The node agent's interpreter as a shell word: outside any container, where ``srun`` is."""
    cluster = plan.cluster
    return shlex.quote(cluster.python if cluster and cluster.python and not cluster.container else sys.executable)


def submitit_parameters(plan: Plan, working_folder: Path | None = None) -> dict[str, Any]:
    """Parameters for ``submitit.SlurmExecutor(...).update_parameters``: one element per node, run in the batch step."""
    cluster = plan.cluster
    assert cluster is not None, "a local plan has no Slurm parameters"
    options: dict[str, Any] = {"requeue": True}
    if working_folder is not None:
        options["chdir"] = str(working_folder)
    parameters: dict[str, Any] = {
        "job_name": plan.name,
        "account": cluster.account,
        "partition": cluster.slurm_partition,
        "qos": cluster.qos,
        "constraint": plan.constraint,
        "comment": plan.comment,
        "time": plan.timeout_min,
        "nodes": 1,
        "ntasks_per_node": 1,
        "cpus_per_task": cluster.cores_per_node,
        "mem": None if cluster.mem_gb_per_node is None else f"{cluster.mem_gb_per_node}GB",
        "exclusive": True if cluster.exclusive else None,
        "signal_delay_s": plan.signal_delay_s,
        "array_parallelism": max(plan.arrays),
        "setup": setup_lines(plan) or None,
        "teardown": TEARDOWN,
        "additional_parameters": options,
        "use_srun": False,
    }
    if cluster.gres is not None:
        parameters["gres"] = cluster.gres
    elif cluster.gpus_per_node:
        parameters["gpus_per_node"] = cluster.gpus_per_node
    for key, value in cluster.sbatch.items():
        # under the name that submitit uses, so that the profile's value replaces ours instead of standing beside it
        name = key.replace("-", "_")
        options[name if name in parameters else name.replace("_", "-")] = value
    # submitit names itself as the job's wckey, which sites that track them refuse
    return {key: value for key, value in parameters.items() if value is not None} | {"wckey": None}


def setup_lines(plan: Plan) -> list[str]:
    """Shell lines before the node agent: modules, environment, the profile's own lines."""
    cluster = plan.cluster
    assert cluster is not None
    lines = []
    if cluster.modules:
        # sbatch's shell is no login shell, so that `module` may not be defined yet
        lines.append("type module >/dev/null 2>&1 || source /etc/profile")
    for module in cluster.modules:
        word = shlex.quote(module)
        message = shlex.quote(f"hpcjobs: module load {module} failed")
        lines.append(f"module load {word} || {{ echo {message} >&2; exit 1; }}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    lines += cluster.setup
    return lines


def job_script(plan: Plan, paths: StudyPaths, elements: int, working_folder: Path | None = None) -> str:
    """The whole sbatch text of one array of ``elements`` nodes, made by the function that submitit submits with."""
    from submitit.slurm.slurm import _make_sbatch_string

    parameters = submitit_parameters(plan, working_folder)
    if elements > 1:
        parameters["map_count"] = elements
    command = f"{agent_python(plan)} -u -m submitit.core._submit {shlex.quote(str(paths.submitit))}"
    return str(_make_sbatch_string(command=command, folder=paths.submitit, **parameters))


def worker_command(plan: Plan, paths: StudyPaths, worker: int) -> list[str]:
    """The command of one worker, inside the container where the profile names one."""
    return module_command(plan, "hpcjobs.worker", str(paths.folder), "--worker", str(worker))


def module_command(plan: Plan, module: str, *arguments: str) -> list[str]:
    """A Python module's command where workers run: inside the container, with the profile's Python."""
    cluster = plan.cluster
    container = list(cluster.container) if cluster else []
    default = "python3" if container else sys.executable
    python = (cluster.python if cluster else None) or default
    return [*container, python, "-u", "-m", module, *arguments]


def step_command(plan: Plan, paths: StudyPaths, element: str, worker: int) -> list[str]:
    """The ``srun`` command of one worker, started by the node agent inside its job."""
    return srun_command(plan, worker, paths.worker_log(element, worker), worker_command(plan, paths, worker))


def srun_command(plan: Plan, worker: int, log: Path, command: list[str]) -> list[str]:
    """``command`` as one long-lived step of the job that this process runs in.

    ``--overlap`` with the job's own GRES lets all steps of a node run side by side; ``--exact`` would run them one
    after another, and ``--gres=none`` would take the devices away where cgroups constrain them. Overlapping steps are
    all given the same first CPUs, so that every step spans the node's cores and the worker binds itself to its own.
    """
    cluster = plan.cluster
    assert cluster is not None, "a local plan has no steps"
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        f"--cpus-per-task={cluster.cores_per_node}",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        "--unbuffered",
        "--open-mode=append",
        f"--job-name=worker_{worker:03d}",
        f"--output={log}",
        *cluster.srun,
        *command,
    ]


def shell_line(command: list[str]) -> str:
    """A command as one line for a shell."""
    return shlex.join(command)
