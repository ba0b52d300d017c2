"""Runs once per node, in the batch step of its array element: checks the mode, places the workers, starts the agent."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import optuna

from hpcjobs.agent import NodeAgent, new_report
from hpcjobs.cores import allowed_cpus
from hpcjobs.devices import find_gpus, places
from hpcjobs.errors import run_entry
from hpcjobs.job import Job
from hpcjobs.journal_client import SOCKET_VARIABLE
from hpcjobs.journal_server import serve
from hpcjobs.owners import node_name, process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import Plan, make_plan
from hpcjobs.slurm import step_command, worker_command
from hpcjobs.spec import WorkerSpec, control_file, status_file
from hpcjobs.steps import Step
from hpcjobs.study import OpenStudy, open_study

log = logging.getLogger("hpcjobs.node")

EXIT_UNFIT = 3


class UnfitNodeError(RuntimeError):
    """The node is not what the study asks for: its GPUs are in another mode, or there are none."""


def check_mode(plan: Plan) -> None:
    """Raises UnfitNodeError if the node is not in the mode that the study asks for."""
    if plan.mode is None:
        return
    from hpcjobs import partition

    found = partition.current_mode()
    if found != plan.mode:
        raise UnfitNodeError(
            f"{node_name()}: the GPUs are in mode {found or 'unknown'}, the study asks for {plan.mode}. "
            "No trial was begun. Did the prolog set the mode? Look at its log on the node, or submit without --mode."
        )


def make_steps(study: OpenStudy, plan: Plan, job: Job, node_folder: Path, token: str) -> list[Step]:
    """One step per place of this node."""
    vendor = plan.cluster.gpu_vendor if plan.cluster else None
    gpus = find_gpus(vendor)
    found = places(plan, gpus, allowed_cpus())
    if plan.cluster and plan.cluster.gpus_per_node and vendor != "none":
        if not gpus:
            raise UnfitNodeError(
                f"{node_name()}: no GPU was found, the profile {plan.cluster.name} says that a node has "
                f"{plan.cluster.gpus_per_node}. No trial was begun. Look at: python -m hpcjobs.partition show"
            )
        if plan.workers_by_devices and len(gpus) != plan.workers_per_node:
            log.warning("%d logical GPUs were found where %d were expected", len(gpus), plan.workers_per_node)
    steps = []
    for worker, place in enumerate(found):
        # the threads of the cores that are really there, unless the site's profile says otherwise
        threads = {"OMP_NUM_THREADS": str(max(1, len(place.cores)))}
        own = plan.cluster.environment if plan.cluster else {}
        environment = {**plan.environment, **threads, **own, **place.environment}
        if place.device:
            # several processes on one MIOpen database damage it
            cache = str(node_folder / f"miopen_{worker:03d}")
            environment |= {"MIOPEN_USER_DB_PATH": cache, "MIOPEN_CUSTOM_CACHE_DIR": cache}
        spec = WorkerSpec(
            folder=study.paths.folder,
            element=job.element,
            worker=worker,
            token="",
            agent=token,
            agent_pid=os.getpid(),
            agent_start=process_start(os.getpid()) or "",
            status=status_file(node_folder, worker),
            control=control_file(node_folder),
            device=place.device,
            has_gpu=bool(place.device),
            environment=environment,
            cores=place.cores,
        )
        if job.slurm_id is None:
            command = worker_command(plan, study.paths, worker)
        else:
            command = step_command(plan, study.paths, job.element, worker)
        path = study.paths.worker_log(job.element, worker)
        steps.append(Step(spec, place, node_folder, path, command, writes_own_log=job.slurm_id is not None))
    return steps


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """The agent's log: on stderr, which submitit keeps, and in the study folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr), logging.FileHandler(path)]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def run_node(folder: str, environment: dict[str, str | None] | None = None) -> int:
    """What submitit runs on each node: the agent of the study in ``folder``.

    Args:
        environment: variables to set, or with None to remove, before anything looks at devices.
    """
    for name, value in (environment or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    paths = StudyPaths(Path(folder))
    job = Job.from_environment()
    token = secrets.token_hex(8)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # on the node's own disk, and ours alone
    node_folder = Path(tempfile.mkdtemp(prefix="hpcjobs-"))
    with logging_to(paths.node_log(job.element)):
        try:
            code = _run(paths, job, node_folder, token)
        except UnfitNodeError as error:
            log.error("%s", error)
            report = new_report(job, token)
            report.state, report.message = "ended", str(error)
            report.write(paths)
            code = EXIT_UNFIT
        finally:
            shutil.rmtree(node_folder, ignore_errors=True)
    if code:
        # not an Exception: submitit would print a traceback over the message
        sys.exit(code)
    return code


def _run(paths: StudyPaths, job: Job, node_folder: Path, token: str) -> int:
    study = open_study(paths)
    plan = make_plan(study.file, local_cores=len(os.sched_getaffinity(0)))
    log.info("node agent of %s on %s, run %d of this element", job.element, node_name(), job.restarts + 1)
    check_mode(plan)
    steps = make_steps(study, plan, job, node_folder, token)
    devices = {step.report().device for step in steps} - {""}
    log.info("%d workers on %s", len(steps), f"{len(devices)} logical GPUs" if devices else "CPU cores alone")
    with _journal_server(paths):
        return NodeAgent(study, plan, job, node_folder, steps, token).run()


@contextlib.contextmanager
def _journal_server(paths: StudyPaths) -> Iterator[None]:
    """Append for all workers of this node together. Workers that cannot reach the server append by themselves."""
    try:
        server = serve(paths)
    except OSError as error:
        log.warning("workers append to the journal by themselves: no local socket can be made (%s)", error)
        yield
        return
    os.environ[SOCKET_VARIABLE] = str(server.socket_path)
    try:
        with server:
            yield
    finally:
        del os.environ[SOCKET_VARIABLE]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.node", description="The node agent of a study, inside a job (see slurm/study.sbatch)."
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    return run_node(str(parser.parse_args(arguments).folder.absolute()))


if __name__ == "__main__":
    sys.exit(run_entry(main))
