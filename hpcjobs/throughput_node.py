"""Runs on the node of one job of a throughput experiment: all set-ups of its mode, cell after cell."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcjobs import mps
from hpcjobs.config import PartitionMode
from hpcjobs.cores import allowed_cpus
from hpcjobs.devices import places
from hpcjobs.job import Job
from hpcjobs.logical_gpu import NodeDevices
from hpcjobs.node_folder import node_folder
from hpcjobs.owners import node_name
from hpcjobs.partition import discover
from hpcjobs.paths import write_atomically
from hpcjobs.placement import DeviceList, UnfitNodeError, check_mode
from hpcjobs.pressure import HostWatch, busy_devices, on_cpus_alone
from hpcjobs.text import counted
from hpcjobs.throughput_crew import Crew, JobEndsError, make_crew
from hpcjobs.throughput_plan import Cell, Setup, ThroughputFile, ThroughputPaths, read_file
from hpcjobs.throughput_protocol import Protocol

log = logging.getLogger("hpcjobs.throughput")

EXIT_UNFIT = 3
TICK_S = 0.05
SAMPLE_S = 1.0

OnCell = Callable[[Setup, Cell, str], None]


def run_job(folder: str, mode: PartitionMode | None, on_cell: OnCell = lambda setup, cell, status: None) -> int:
    """Measure what is left of one mode's cells; returns the exit code.

    A cell that has a file is not measured again, so that a job that was cut goes on where it stopped: with a code that
    stands for a signal the batch script queues it again.
    """
    paths, token = ThroughputPaths(Path(folder)), secrets.token_hex(8)
    file = read_file(paths.folder)
    # without a cluster there are no steps, also where somebody calls this by hand in a job
    job = Job.from_environment(os.environ if file.cluster else {**os.environ, "SUBMITIT_EXECUTOR": "local"})
    before = _done(file, paths, mode)
    with _logging_to(paths.node_log(job.element)):
        try:
            for setup in file.setups(mode):
                _run_setup(file, paths, setup, job, token, on_cell)
        except UnfitNodeError as error:
            log.error("%s", error)
            write_atomically(paths.problem(mode), str(error))
            return EXIT_UNFIT
        except JobEndsError as error:
            log.warning("%s; what is measured is kept", error)
            if _done(file, paths, mode) > before:
                return 128 + signal.SIGTERM
            # again and again would bring nothing either
            write_atomically(paths.problem(mode), _TOO_SHORT)
            return EXIT_UNFIT
    paths.problem(mode).unlink(missing_ok=True)
    return 0


_TOO_SHORT = (
    "the job ended before it had measured a cell; go on with --resume FOLDER --timeout-min MIN, with more of them"
)


def _done(file: ThroughputFile, paths: ThroughputPaths, mode: PartitionMode | None) -> int:
    return sum(paths.cell(setup, cell).exists() for setup in file.setups(mode) for cell in file.cells)


def run_in_job(folder: str, mode: PartitionMode | None) -> int:
    """:func:`run_job` as submitit calls it on a node."""
    # what Slurm tells the steps shows by their ends; here only the workers are to be ended before this process is
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    code = run_job(folder, mode)
    if code:
        sys.exit(code)
    return code


def _run_setup(
    file: ThroughputFile, paths: ThroughputPaths, setup: Setup, job: Job, token: str, on_cell: OnCell
) -> None:
    if all(paths.cell(setup, cell).exists() for cell in file.cells):
        return
    cpus = allowed_cpus()
    plan = file.plan(setup, len(cpus))
    check_mode(plan)
    devices = discover(plan.cluster.gpu_vendor if plan.cluster else None)
    if plan.cluster and plan.cluster.gpus_per_node and plan.cluster.gpu_vendor != "none" and not devices.gpus:
        raise UnfitNodeError(f"{node_name()}: no GPU was found ({devices.note}); see python -m hpcjobs.partition show")
    if devices.missing:
        log.warning("%d logical GPUs of mode %s are missing on this node", devices.missing, devices.mode)
    found = places(plan, devices.gpus, cpus)
    with node_folder() as folder:
        DeviceList.of(devices.gpus).write(folder)
        wanted = setup.per_gpu > 1 and devices.vendor == "nvidia"
        with mps.shared_gpus(folder) if wanted else contextlib.nullcontext(False) as with_mps:
            crew = make_crew(plan, paths, setup, job, token, found, Protocol(folder))
            workers, gpus = counted(len(found), "worker"), counted(len(devices.gpus), "logical GPU")
            log.info("%s: %s on %s", setup.name, workers, gpus)
            facts = _facts(devices, len(cpus), with_mps)
            watched = [cpu.number for cpu in cpus]
            conductor = _Conductor(file, paths, setup, crew, Protocol(folder), facts, watched, devices.vendor)
            try:
                conductor.run(on_cell)
            finally:
                crew.kill()


def _facts(devices: NodeDevices, cores: int, with_mps: bool) -> dict[str, Any]:
    return {
        "node": node_name(),
        "gpu": devices.model,
        "gpus": len(devices.gpus),
        "missing": devices.missing,
        "gpu_memory_gb": devices.gpus[0].memory_gib if devices.gpus else None,
        "cores": cores,
        "mps": with_mps,
    }


class _Conductor:
    """Gives the crew one cell after another, begins its windows, and writes down what came out."""

    def __init__(
        self,
        file: ThroughputFile,
        paths: ThroughputPaths,
        setup: Setup,
        crew: Crew,
        protocol: Protocol,
        facts: dict[str, Any],
        cpus: Sequence[int],
        vendor: str,
    ) -> None:
        self._file, self._paths, self._setup = file, paths, setup
        self._crew, self._protocol, self._facts = crew, protocol, facts
        self._cpus, self._device_busy = cpus, busy_devices(vendor)

    def run(self, on_cell: OnCell) -> None:
        exhausted: set[str] = set()  # precisions in which memory ran out: a larger batch needs more
        for index, cell in enumerate(self._file.cells):
            path = self._paths.cell(self._setup, cell)
            done = json.loads(path.read_bytes())["status"] if path.exists() else None
            if done is None and cell.precision in exhausted:
                done = "not tried"
                self._write(cell, done, [], {})
            self._protocol.order(index, "skip" if done else "measure")
            status = done or self._measure(index, cell)
            if status == "oom":
                exhausted.add(cell.precision)
            log.info("%s, %s: %s", self._setup.name, cell.name, status)
            on_cell(self._setup, cell, status)

    def _measure(self, index: int, cell: Cell) -> str:
        window, deadline = 0, time.monotonic() + self._file.patience_s
        pressure: dict[str, Any] = {}
        while waiting := self._waiting(index):
            late = [m for m in waiting if not self._protocol.ready_file(index, window, m.index).exists()]
            if not late:
                pressure[str(window)] = self._watch(self._protocol.release(index, window, self._file.window_s))
                window, deadline = window + 1, time.monotonic() + self._file.patience_s
            elif time.monotonic() > deadline:
                for member in late:
                    self._failed(index, member.index, f"not ready after {self._file.patience_s:g} s")
                    member.kill()
                    member.retry("it was not ready in time")
            time.sleep(TICK_S)
        results = [self._protocol.result(index, member.index) or {} for member in self._crew.members]
        states = {result.get("status") for result in results}
        status = "oom" if "oom" in states else "ok" if states == {"ok"} else "failed"
        self._write(cell, status, results, pressure)
        return status

    def _waiting(self, index: int) -> list[Any]:
        """Who has no result of this cell yet; the dead have failed in it."""
        for worker, why in self._crew.tend():
            if self._protocol.result(index, worker) is None:
                self._failed(index, worker, why)
        members = self._crew.members
        if all(member.out for member in members):
            raise UnfitNodeError(f"{node_name()}: no worker can measure: {members[0].out}")
        for member in members:
            if member.out and self._protocol.result(index, member.index) is None:
                self._failed(index, member.index, member.out)
        return [member for member in members if self._protocol.result(index, member.index) is None]

    def _failed(self, index: int, worker: int, why: str) -> None:
        self._protocol.write_result(index, worker, {"worker": worker, "status": "failed", "message": why})

    def _watch(self, start: float) -> dict[str, Any]:
        """Look at the host while the workers measure."""
        time.sleep(max(0.0, start - time.monotonic()))
        watch = HostWatch(self._cpus, self._device_busy)
        while (left := start + self._file.window_s - time.monotonic()) > 0:
            time.sleep(min(SAMPLE_S, left))
            watch.sample()
        pressure = watch.end()
        if not self._facts["gpus"]:
            pressure = on_cpus_alone(pressure)
        return {**pressure.as_dict(), "limit": pressure.limit}

    def _write(self, cell: Cell, status: str, results: list[dict[str, Any]], pressure: dict[str, Any]) -> None:
        data = {
            "setup": {"mode": self._setup.mode, "per_gpu": self._setup.per_gpu},
            "cell": {"batch_size": cell.batch_size, "precision": cell.precision},
            "status": status,
            "workers": len(self._crew.members),
            "window_s": self._file.window_s,
            **self._facts,
            "pressure": pressure,
            "results": results,
        }
        write_atomically(self._paths.cell(self._setup, cell), json.dumps(data, indent=1))


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    log.info("process %d on %s", os.getpid(), node_name())
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
