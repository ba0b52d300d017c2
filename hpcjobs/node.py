"""Runs once per node, in the batch step of its array element: checks the mode, places the workers, starts the agent."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.trial import TrialState

from hpcjobs import mps, slurm_control
from hpcjobs.agent import NodeAgent, new_report
from hpcjobs.checked_study import write_checked
from hpcjobs.cores import allowed_cpus
from hpcjobs.devices import find_gpus, places, worker_environment
from hpcjobs.errors import run_entry
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.heartbeat import read_node
from hpcjobs.job import Job
from hpcjobs.journal_client import SOCKET_VARIABLE
from hpcjobs.journal_server import serve
from hpcjobs.load import read_study_file
from hpcjobs.node_folder import node_folder
from hpcjobs.owners import OWNER, Owner, node_name, process_start
from hpcjobs.paths import StudyPaths
from hpcjobs.placement import DeviceList, UnfitNodeError, check_mode
from hpcjobs.placement_map import write_map
from hpcjobs.plan import Plan, make_plan
from hpcjobs.recovery import recover
from hpcjobs.slurm import step_command, worker_command
from hpcjobs.spec import WorkerSpec, control_file, status_file
from hpcjobs.steps import Step
from hpcjobs.study import OpenStudy, open_study
from hpcjobs.text import counted

log = logging.getLogger("hpcjobs.node")

EXIT_UNFIT = 3


def make_steps(study: OpenStudy, plan: Plan, job: Job, folder_here: Path, token: str) -> list[Step]:
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
        if plan.workers_by_devices and len(found) != plan.workers_per_node:
            devices, workers = counted(len(gpus), "logical GPU"), counted(len(found), "worker")
            log.warning("%s: %s, not %d", devices, workers, plan.workers_per_node)
    DeviceList.of(gpus).write(folder_here)
    write_checked(study.file, folder_here)
    write_map(study.paths.placement_file(job.element), plan.mode, gpus, found)
    shares = Counter(place.device for place in found)
    steps = []
    for worker, place in enumerate(found):
        spec = WorkerSpec(
            folder=study.paths.folder,
            element=job.element,
            worker=worker,
            token="",
            agent=token,
            agent_pid=os.getpid(),
            agent_start=process_start(os.getpid()) or "",
            status=status_file(folder_here, worker),
            control=control_file(folder_here),
            device=place.device,
            has_gpu=bool(place.device),
            environment=worker_environment(plan, place, folder_here, worker),
            cores=place.cores,
            share=shares[place.device],
        )
        if job.slurm_id is None:
            command = worker_command(plan, study.paths, worker)
        else:
            command = step_command(plan, study.paths, job.element, worker)
        path = study.paths.worker_log(job.element, worker)
        steps.append(Step(spec, place, folder_here, path, command, writes_own_log=job.slurm_id is not None))
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

    Raises:
        UserError: the folder holds no study.
    """
    for name, value in (environment or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    paths = StudyPaths(Path(folder))
    file = read_study_file(paths)  # before the log makes folders: where there is no study nothing is left behind
    # without a cluster there are no steps, also where somebody calls this by hand in a job
    job = Job.from_environment(os.environ if file.cluster else {**os.environ, "SUBMITIT_EXECUTOR": "local"})
    token = secrets.token_hex(8)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with logging_to(paths.node_log(job.element)):
        try:
            with node_folder() as folder_here:
                code, requeue = _run(paths, job, folder_here, token)
        except UnfitNodeError as error:
            log.error("%s", error)
            report = new_report(job, token)
            report.state, report.message = "ended", str(error)
            report.write(paths)
            code, requeue = EXIT_UNFIT, False
        if requeue:
            # the last thing to do: Slurm ends this run of the element with it
            job.requeue()
    if code:
        # not an Exception: submitit would print a traceback over the message
        sys.exit(code)
    return code


def forget_namesake(study: OpenStudy, job: Job) -> None:
    """Slurm gives a number anew, after its largest one or with a new state folder: put what such a job left in order.

    Its file tells of more runs than this element has had, and would be taken for that of a later run elsewhere.
    """
    former = read_node(study.paths.node_file(job.element))
    if job.slurm_id is None or former is None or former.run <= job.restarts:
        return
    try:
        if slurm_control.restarts(job.slurm_id) > job.restarts:
            return  # it is a later run
    except slurm_control.SlurmUnavailableError as error:
        log.warning("whose file %s is cannot be told: %s", study.paths.node_file(job.element), error)
        return
    log.warning("Slurm has used the number of %s before; what that job left goes on", job.element)
    study.paths.node_file(job.element).unlink(missing_ok=True)
    for trial in study.trials((TrialState.RUNNING,)):
        owner = Owner.from_dict(trial.user_attrs.get(OWNER))
        if owner is not None and owner.element == job.element and owner.run > job.restarts:
            failure = Failure(FailureClass.NODE, f"an older job of the number {job.element} has ended")
            recover(study, trial._trial_id, owner.token, failure)


def _run(paths: StudyPaths, job: Job, folder_here: Path, token: str) -> tuple[int, bool]:
    """The exit code, and whether the element is to be queued again."""
    study = open_study(paths)
    forget_namesake(study, job)
    plan = make_plan(study.file, local_cores=len(os.sched_getaffinity(0)))
    log.info("node agent of %s on %s, run %d of this element", job.element, node_name(), job.restarts + 1)
    check_mode(plan)
    steps = make_steps(study, plan, job, folder_here, token)
    on_gpus = [step.report().device for step in steps if step.report().device]
    devices = set(on_gpus)
    where = counted(len(devices), "logical GPU") if devices else "CPU cores alone"
    log.info("%s on %s", counted(len(steps), "worker"), where)
    shared = mps.shared_gpus(folder_here) if len(on_gpus) > len(devices) else contextlib.nullcontext(False)
    with shared as with_mps, _journal_server(paths, folder_here / "journal.socket"):
        if with_mps:
            log.info("workers on one GPU share it through MPS")
        agent = NodeAgent(study, plan, job, folder_here, steps, token)
        return agent.run(), agent.wants_requeue


@contextlib.contextmanager
def _journal_server(paths: StudyPaths, socket_path: Path) -> Iterator[None]:
    """Append for all workers of this node together. Workers that cannot reach the server append by themselves."""
    try:
        server = serve(paths, socket_path)
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
