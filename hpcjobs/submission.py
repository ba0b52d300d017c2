"""From the command line of submit to a :class:`Submission`: everything validated, nothing made yet."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcjobs.config import ClusterConfig, RunConfig, StudyConfig, StudyFile
from hpcjobs.devices import find_gpus
from hpcjobs.errors import UserError
from hpcjobs.load import load_cluster, load_study, read_study_file, validate, with_overrides
from hpcjobs.mode_choice import Choice, choose, need_of
from hpcjobs.objective import Declaration, inspect_objective
from hpcjobs.paths import JobFolder, StudyPaths, current_folder, from_here
from hpcjobs.plan import Plan, make_plan
from hpcjobs.preflight import check_data, check_new_folder, check_shadows, check_writers
from hpcjobs.search_space import check_search_space
from hpcjobs.slurm import check_path
from hpcjobs.text import counted
from hpcjobs.throughput_table import ThroughputTable, beside_profile
from hpcjobs.yaml_file import KeyPath, parse_value, read_yaml

# --mode: the system chooses
AUTO = "auto"


@dataclass(frozen=True)
class Submission:
    """What submit is about to do. ``more_trials`` are added to a study that exists.

    ``changed`` is its study.yaml with what the command line sets; None where it stays as it is. The first trials of a
    new study take the best parameters of the one in ``warm_start``.
    """

    paths: StudyPaths
    file: StudyFile
    plan: Plan
    resumed: bool = False
    more_trials: int = 0
    changed: StudyFile | None = None
    choice: Choice | None = None  # the answer to --mode auto
    warm_start: StudyPaths | None = None
    objective_sets: Mapping[str, str] = field(default_factory=dict)  # variables, as it declares them
    lacks: tuple[str, ...] = ()  # what a dry run passes over: data that is not there yet, no account


def new_submission(options: argparse.Namespace) -> Submission:
    """A new study from the command line.

    Raises:
        UserError: for any mistake in arguments, files, objective, data or folder.
    """
    if options.study is None:
        raise UserError("--study: found nothing; allowed: a YAML file, such as configs/studies/experiment1.yaml")
    if options.trials is not None and options.trials.startswith("+"):
        raise UserError(f"--trials: found {options.trials!r}; allowed: +N only with --resume; write the number alone")
    study, document = load_study(absolute(options.study))
    given = {"trials": options.trials and int(options.trials), "epochs": options.epochs}
    study = study.model_copy(update={key: value for key, value in given.items() if value})
    overrides = cluster_overrides(options)
    if overrides and options.cluster is None:
        raise UserError(
            "--set, --account and --timeout-min: found without --cluster; allowed: with a profile to change"
        )
    cluster = load_cluster(options.cluster, overrides) if options.cluster is not None else None
    data = absolute(options.data) if options.data is not None else None
    name = options.name or options.study.stem
    if options.workers and options.workers_per_gpu:
        raise UserError("--workers, --workers-per-gpu: found both; allowed: one of them; leave the other out")
    if options.prepare and options.cluster is None:
        raise UserError(
            "--prepare: found without --cluster; allowed: with a profile, which says what a job's nodes have; add "
            "--cluster, or leave --prepare out to run on this machine"
        )
    if options.throughput_table is not None and options.mode != AUTO:
        raise UserError("--throughput-table: found without --mode auto; allowed: with it; add --mode auto")
    run = RunConfig(
        nodes=options.nodes or 1,
        mode=None if options.mode == AUTO else options.mode,
        workers_per_node=options.workers,
        workers_per_gpu=options.workers_per_gpu,
        data=data,
        working_folder=current_folder(),
    )
    file = StudyFile(name=name, study=study, run=run, cluster=cluster)
    plan = make_plan(file, local_cores=available_cores())
    paths = StudyPaths(absolute(options.folder) if options.folder is not None else default_folder(name))
    for path in (paths.folder, current_folder(), *([data] if data else [])):
        check_path(path)
    check_shadows(current_folder())
    check_new_folder(paths, group_writable=group_writes(cluster))
    # inside a container the profile's python is not the login node's
    python = cluster.python if cluster is not None and not cluster.container else None
    declaration = inspect_objective(study.objective, python)
    check_search_space(study, declaration, document)
    from hpcjobs.sampling import check_sampling

    check_sampling(study, document)
    # people look at a plan before hours of preparing data, and before they have a project
    lacks = told_or_raised(
        options.dry_run,
        lambda: check_account(cluster, by_hand=options.prepare),
        lambda: check_data(data, needed=declaration.needs_data),
    )
    declared = declaration.parameters or {}
    defaults = {name: info["default"] for name, info in declared.items() if "default" in info}
    warm_start = StudyPaths(absolute(options.warm_start)) if options.warm_start is not None else None
    if warm_start is not None:
        read_study_file(warm_start)
    value_name = declaration.value_name or file.value_name
    file = file.model_copy(update={"defaults": defaults, "value_name": value_name})
    choice = None
    if options.mode == AUTO:
        choice = _choose(options, file, declaration)
        file = file.model_copy(update={"run": _chosen_run(run, study, choice)})
        plan = make_plan(file, local_cores=available_cores())
    return Submission(
        paths, file, plan, choice=choice, warm_start=warm_start, objective_sets=declaration.environment, lacks=lacks
    )


def check_account(cluster: ClusterConfig | None, *, by_hand: bool = False) -> None:
    """The job has an account where the site runs none without; ``by_hand``: the user's own sbatch line gives it.

    Raises:
        UserError: it has none.
    """
    if cluster is None or by_hand or not cluster.account_required:
        return
    if not (cluster.account or cluster.sbatch.get("account") or os.environ.get("SBATCH_ACCOUNT")):
        raise UserError(
            f"--account: found nothing, but cluster {cluster.name} runs no job without one; allowed: an account of "
            "yours there; give it as --account NAME, or write it into a copy of the profile"
        )


def group_writes(cluster: ClusterConfig | None) -> bool:
    """Whether the profile consents to folders that the group can write to."""
    return cluster is not None and cluster.group_writable_folders


def keep_ours(cluster: ClusterConfig | None) -> None:
    """What jobs load must stay ours: others cannot write, whatever the shell's umask; jobs inherit this one."""
    os.umask(os.umask(0o022) | (0o002 if group_writes(cluster) else 0o022))


def told_or_raised(dry_run: bool, *checks: Callable[[], None]) -> tuple[str, ...]:
    """What the checks find wrong, for a dry run to tell; else the first of it is an error."""
    found = []
    for check in checks:
        try:
            check()
        except UserError as error:
            if not dry_run:
                raise
            found.append(str(error))
    return tuple(found)


def _choose(options: argparse.Namespace, file: StudyFile, declaration: Declaration) -> Choice:
    """The answer to --mode auto, from the table that was named or lies beside the profile, else from a rule."""
    path = options.throughput_table or (beside_profile(options.cluster) if options.cluster else None)
    given = path is not None and (options.throughput_table is not None or path.exists())
    table = ThroughputTable.read(path) if path is not None and given else None
    need = need_of(file.study, file.run.nodes, file.defaults, declaration.memory)
    devices = 1 if file.cluster is not None else len(find_gpus(None)) or max(1, available_cores() // 2)
    return choose(need, file.cluster, table, devices)


def _chosen_run(run: RunConfig, study: StudyConfig, choice: Choice) -> RunConfig:
    """What the user has given stays; workers that no trial is left for are not started."""
    update: dict[str, Any] = {"mode": choice.setup.mode}
    busy = math.ceil(study.trials / run.nodes)
    if run.workers_per_node is None and run.workers_per_gpu is None:
        if choice.some_idle or busy < choice.workers:
            update["workers_per_node"] = min(busy, choice.workers)
        elif choice.setup.per_gpu > 1:
            update["workers_per_gpu"] = choice.setup.per_gpu
    return run.model_copy(update=update)


# what a study was submitted with, and how its next nodes get another one
_OTHER_WAYS = {
    "study": "what a study searches stays as it is: for a changed search give a new study --warm-start FOLDER",
    "mode": "its next nodes get another one with --set mode.default=MODE",
    "workers": "its next nodes start as many as --set workers_per_node=N says; for a study on this machine write "
    "run.workers_per_node into its study.yaml",
    "workers_per_gpu": "its next nodes start as many as run.workers_per_gpu in its study.yaml says",
}


def resumed_submission(options: argparse.Namespace) -> Submission:
    """More nodes or trials for a study that exists; what it searches stays as it is.

    Raises:
        UserError: the folder is no study, or an option would change the study itself.
    """
    fixed = ("study", "cluster", "data", "epochs", "mode", "workers", "workers_per_gpu", "throughput_table")
    for flag in (*fixed, "folder", "name", "warm_start"):
        if getattr(options, flag) is not None:
            hint = f"; {_OTHER_WAYS[flag]}" if flag in _OTHER_WAYS else ""
            raise UserError(
                f"--{flag.replace('_', '-')}: found together with --resume; allowed: --nodes, --trials +N, --set; "
                f"leave it out{hint}"
            )
    if options.trials is not None and not options.trials.startswith("+"):
        raise UserError(
            f"--trials: found {options.trials!r} with --resume; allowed: +N, so many more; write +{options.trials}"
        )
    paths = StudyPaths(absolute(options.resume))
    before = read_study_file(paths)
    overrides = cluster_overrides(options)
    if overrides and before.cluster is None:
        raise UserError("--set, --account and --timeout-min: found for a study on this machine; leave them out")
    changed = validate(StudyFile, with_overrides(read_yaml(paths.config), _in_study_file(overrides)))
    check_existing_folder(paths, changed.cluster)
    # how many nodes is a matter of this submission alone
    run = changed.run.model_copy(update={"nodes": options.nodes or changed.run.nodes})
    file = changed.model_copy(update={"run": run})
    plan = make_plan(file, local_cores=available_cores())
    lacks = told_or_raised(options.dry_run, lambda: check_account(file.cluster, by_hand=options.prepare))
    return Submission(
        paths,
        file,
        plan,
        resumed=True,
        more_trials=int(options.trials or 0),
        changed=changed if changed != before else None,
        lacks=lacks,
    )


def _in_study_file(overrides: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Changes of a profile as changes of study.yaml. There they win over the options that the study began with."""
    result: dict[KeyPath, Any] = {("cluster", *key): value for key, value in overrides.items()}
    if ("workers_per_node",) in overrides:
        result |= {("run", "workers_per_node"): None, ("run", "workers_per_gpu"): None}
    if overrides.keys() & {("mode",), ("mode", "default")} or overrides.get(("mode", "by")) == "none":
        result[("run", "mode")] = None
    return result


def cores_text(plan: Plan) -> str:
    """What each worker has of the cores that the job asks for, which are those of all its workers."""
    each = counted(plan.cores_per_worker, "core")
    if plan.cluster is None:
        return f"each {each}"
    total = plan.cluster.cores_per_node
    if total < plan.workers_per_node:
        return f"which share the job's {counted(total, 'core')}"
    return f"each on {each} of the job's {total}"


def check_existing_folder(paths: JobFolder, cluster: ClusterConfig | None) -> None:
    """Nobody else may change the folder that jobs are started from, nor the one in it that they load pickles from.

    Raises:
        UserError: somebody else can.
    """
    for folder in (paths.folder, paths.submitit):
        if folder.exists():
            check_writers(folder, group_writable=group_writes(cluster))


def absolute(path: Path) -> Path:
    """Absolute and without ``..``; links are kept, since a site's own names for its filesystems are."""
    try:
        path = path.expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: found no home of {path.parts[0]}; allowed: a user of this machine; ./~... for a name"
        ) from None
    return Path(os.path.normpath(from_here(path)))


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def default_folder(name: str) -> Path:
    word = re.sub(r"[^\w.-]+", "_", name).strip("_.") or "study"
    return absolute(Path("runs") / f"{word}-{datetime.datetime.now():%Y%m%d-%H%M%S}")


def cluster_overrides(options: argparse.Namespace) -> dict[KeyPath, Any]:
    overrides: dict[KeyPath, Any] = {}
    for setting in options.set:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise UserError(f"--set: found {setting!r}; allowed: KEY=VALUE, for example timeout_min=30")
        overrides[tuple(key.split("."))] = parse_value(value)
    if options.account is not None:
        overrides[("account",)] = options.account
    if options.timeout_min is not None:
        overrides[("timeout_min",)] = options.timeout_min
    return overrides
