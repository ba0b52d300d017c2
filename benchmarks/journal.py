"""The journal side by side with stock Optuna's, in one run.

Every worker is a process that asks (reading the history, as TPE does), suggests one parameter, reports five times and
tells. ``grouped`` has one journal server per 8 workers, as on nodes; ``direct`` is the same storage without servers.
Compare columns within one run only: the machine is shared, and its absolute speed says nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import journal_latency
import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import TrialState
from rich import box
from rich.console import Console
from rich.table import Table

from hpcjobs.journal import open_storage
from hpcjobs.journal_records import encode
from hpcjobs.journal_server import serve
from hpcjobs.paths import StudyPaths

GROUP = 8
HISTORY = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
REPORTS = 5


class HistorySampler(optuna.samplers.RandomSampler):
    """Random values, after a look at the whole history as TPE takes it."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        study._get_trials(deepcopy=False, states=HISTORY, use_cache=False)
        return super().sample_independent(study, trial, name, distribution)


def open_study(system: str, folder: Path, group: int = 0) -> optuna.Study:
    storage: JournalStorage
    if system == "stock":
        storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    else:
        storage = open_storage(
            StudyPaths(folder), socket=str(folder / f"s{group}") if system == "grouped" else "", deadline_s=120
        )
    return optuna.load_study(study_name="s", storage=storage, sampler=HistorySampler())


def create_study(folder: Path) -> None:
    optuna.create_study(study_name="s", storage=JournalStorage(JournalFileBackend(str(folder / "journal.log"))))


def warm_up() -> None:
    """A trial without a journal: imports, and in a forked worker the first use of every page, are not measured."""
    study = optuna.create_study(sampler=HistorySampler())
    for _ in range(2):
        trial = study.ask()
        trial.suggest_float("x", 0.0, 1.0)
        trial.report(0.5, 0)
        study.tell(trial, 0.5)
    gc.collect()
    gc.freeze()


def spawn(function: Callable[[], None]) -> int:
    """Run in a forked child, so that 128 of them need one import."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        function()
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        os._exit(status)


@dataclass(frozen=True)
class Load:
    """What the workers of one measurement do."""

    workers: int
    seconds: float
    latency: bool = False
    trials_per_s: float | None = None  # offered; None: as fast as it goes
    trial_s: float = 0.0  # how long a trial computes, in equal parts before its reports and its end


def work(system: str, folder: Path, load: Load, worker: int, start: float) -> None:
    """One worker; writes its latencies and processor time as JSON."""
    if load.latency:
        journal_latency.install()
    warm_up()
    study = open_study(system, folder, worker // GROUP)
    period = load.workers / load.trials_per_s if load.trials_per_s else 0.0
    calls: dict[str, list[float]] = {"ask": [], "report": [], "tell": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        before = time.monotonic()
        value = call()
        calls[name].append(time.monotonic() - before)
        return value

    def ask() -> optuna.Trial:
        trial = study.ask()
        trial.suggest_float("x", 0.0, 1.0)
        return trial

    time.sleep(max(0.0, start - time.monotonic()))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime
    next_start = start + period * worker / load.workers
    in_time = 0
    while time.monotonic() < start + load.seconds:
        if period:
            time.sleep(max(0.0, next_start - time.monotonic()))
            next_start += period
        trial = timed("ask", ask)
        for step in range(REPORTS):
            time.sleep(load.trial_s / (REPORTS + 1))
            timed("report", partial(trial.report, 0.5, step))
        time.sleep(load.trial_s / (REPORTS + 1))
        timed("tell", partial(study.tell, trial, 0.5))
        in_time += time.monotonic() < start + load.seconds
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu = usage.ru_utime + usage.ru_stime - cpu
    result = {"calls": calls, "cpu": cpu, "end": time.monotonic() - start, "in_time": in_time}
    (folder / f"worker{worker}.json").write_text(json.dumps(result))


def serve_group(folder: Path, group: int, latency: bool) -> None:
    if latency:
        journal_latency.install()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    serve(StudyPaths(folder), folder / f"s{group}")
    while True:
        signal.pause()


@dataclass(frozen=True)
class Measured:
    system: str
    workers: int
    latency: bool
    trials_per_s: float
    ask_p50: float
    ask_p99: float
    report_p99: float
    tell_p99: float
    longest: float
    cpu_ms_per_trial: float
    share: float  # of the time of a trial that calls take


def measure(system: str, load: Load, scratch: Path) -> Measured:
    """Run one load on one system and check that no trial was numbered twice or lost."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    create_study(folder)
    servers = []
    if system == "grouped":
        groups = (load.workers + GROUP - 1) // GROUP
        servers = [spawn(lambda g=g: serve_group(folder, g, load.latency)) for g in range(groups)]
    start = time.monotonic() + 1.0 + 0.05 * load.workers
    pids = [spawn(lambda w=w: work(system, folder, load, w, start)) for w in range(load.workers)]
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    server_cpu = stop(servers)
    if failed:
        raise RuntimeError(f"{failed} workers of {system} failed")
    results = [json.loads((folder / f"worker{worker}.json").read_text()) for worker in range(load.workers)]
    calls = {name: np.array([s for r in results for s in r["calls"][name]]) for name in results[0]["calls"]}
    check(folder, finished=len(calls["tell"]))
    shutil.rmtree(folder)
    cpu = sum(result["cpu"] for result in results) + server_cpu
    waited = float(sum(call.sum() for call in calls.values()))
    return Measured(
        system,
        load.workers,
        load.latency,
        trials_per_s=sum(result["in_time"] for result in results) / load.seconds,
        ask_p50=float(np.quantile(calls["ask"], 0.5)),
        ask_p99=float(np.quantile(calls["ask"], 0.99)),
        report_p99=float(np.quantile(calls["report"], 0.99)),
        tell_p99=float(np.quantile(calls["tell"], 0.99)),
        longest=float(max(call.max() for call in calls.values())),
        cpu_ms_per_trial=1000 * cpu / len(calls["tell"]),
        share=waited / (waited + len(calls["tell"]) * load.trial_s),
    )


def stop(pids: list[int]) -> float:
    """End servers; their processor seconds."""
    seconds = 0.0
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        usage = os.wait4(pid, 0)[2]
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


def check(folder: Path, finished: int) -> None:
    trials = open_study("stock", folder).get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert len(complete) == finished, f"{finished} trials were told, {len(complete)} are in the journal"
    assert all(len(trial.intermediate_values) == REPORTS for trial in complete), "a report is missing"


def killed_holder(system: str, scratch: Path) -> float:
    """Seconds of the next call after a holder of the lock was killed with -9."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    create_study(folder)

    def hold() -> None:
        if system == "stock":
            JournalFileSymlinkLock(str(folder / "journal.log")).acquire()
        else:
            with open_storage(StudyPaths(folder)).exclusive():
                (folder / "held").touch()
                signal.pause()
        (folder / "held").touch()
        signal.pause()

    study = open_study(system, folder)
    pid = spawn(hold)
    while not (folder / "held").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    before = time.monotonic()
    study.ask()
    return time.monotonic() - before


def write_history(folder: Path, trials: int) -> None:
    """A journal of finished trials, one parameter and five reports each, which both storages read."""
    create_study(folder)
    floats = {"name": "FloatDistribution", "attributes": {"step": None, "low": 0, "high": 1, "log": False}}
    now = "2026-01-01T12:00:00.000000+00:00"
    value = np.random.default_rng(0).random
    with (folder / "journal.log").open("ab") as file:
        for trial in range(trials):
            param = {"param_name": "x", "param_value_internal": value(), "distribution": json.dumps(floats)}
            records: list[dict[str, Any]] = [
                {"op_code": 4, "study_id": 0, "datetime_start": now},
                {"op_code": 5, "trial_id": trial, **param},
                *({"op_code": 7, "trial_id": trial, "step": s, "intermediate_value": value()} for s in range(REPORTS)),
                {"op_code": 6, "trial_id": trial, "state": 1, "values": [value()], "datetime_complete": now},
            ]
            for number, record in enumerate(records):
                head = {"op_code": record.pop("op_code"), "worker_id": "0123456789abcdef-139988998486912"}
                file.write(encode({**head, **record}, 10 * trial + number))


def opening(system: str, folder: Path) -> tuple[float, float]:
    """Seconds and MB to open a study and read all its trials, in a process of its own."""

    def measure_opening() -> None:
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = time.monotonic()
        study = open_study(system, folder)
        count = len(study.get_trials(deepcopy=False))
        seconds = time.monotonic() - before
        megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 1024
        (folder / "opened.json").write_text(json.dumps([seconds, megabytes, count]))

    os.waitpid(spawn(measure_opening), 0)
    seconds, megabytes, _ = json.loads((folder / "opened.json").read_text())
    return seconds, megabytes


def print_rates(console: Console, title: str, rows: list[Measured]) -> None:
    table = Table(
        "workers",
        "system",
        "trials/s",
        "x stock",
        "ask p50",
        "ask p99",
        "report p99",
        "tell p99",
        "longest",
        "CPU ms/trial",
        "share",
        title=title,
        box=box.MARKDOWN,
    )
    stock = {row.workers: row.trials_per_s for row in rows if row.system == "stock"}
    for row in rows:
        times = [
            f"{1000 * value:.0f} ms" for value in (row.ask_p50, row.ask_p99, row.report_p99, row.tell_p99, row.longest)
        ]
        ratio = f"{row.trials_per_s / stock[row.workers]:.1f}" if row.workers in stock else ""
        table.add_row(
            str(row.workers),
            row.system,
            f"{row.trials_per_s:.1f}",
            ratio,
            *times,
            f"{row.cpu_ms_per_trial:.1f}",
            f"{100 * row.share:.2f} %",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/journal.py --parts rate latency --workers 128 --seconds 20",
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 8, 64, 128])
    parser.add_argument("--systems", nargs="*", default=["stock", "direct", "grouped"])
    parser.add_argument("--parts", nargs="*", default=["rate", "latency", "offered", "killed", "open"])
    parser.add_argument("--short", action="store_true", help="two minutes: 8 and 128 workers, 5 s each")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--offered", type=float, default=40.0, help="trials/s offered by the most workers")
    parser.add_argument("--trials", type=int, nargs="*", default=[1000, 10000, 30000], help="histories to open")
    parser.add_argument("--scratch", type=Path, default=None, help="where studies are made (the filesystem measured)")
    parser.add_argument("--output", type=Path, default=None, help="write all figures there as JSON")
    options = parser.parse_args()
    if options.short:
        options.workers, options.seconds, options.trials = [8, 128], 5.0, [1000, 30000]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warm_up()
    console = Console(width=None if sys.stdout.isatty() else 150)
    scratch = Path(tempfile.mkdtemp(prefix="journal-", dir=options.scratch))
    figures: dict[str, Any] = {}

    def rates(title: str, loads: list[Load]) -> list[dict[str, Any]]:
        rows = [measure(system, load, scratch) for load in loads for system in options.systems]
        print_rates(console, title, rows)
        return [asdict(row) for row in rows]

    most = max(options.workers, default=128)
    for part in options.parts:
        if part == "rate":
            figures[part] = rates("as fast as it goes", [Load(n, options.seconds) for n in options.workers])
        elif part == "latency":
            loads = [Load(n, options.seconds, latency=True) for n in options.workers]
            figures[part] = rates("with the latency model: 0.5 ms a lock or metadata call, 3 ms a sync", loads)
        elif part == "offered":
            load = Load(most, options.seconds, trials_per_s=options.offered)
            figures[part] = rates(f"{options.offered:g} trials/s offered", [load])
        elif part == "coordination":
            load = Load(256, 60.0, latency=True, trials_per_s=256 / 60, trial_s=60.0)
            figures[part] = rates("256 workers, trials of 60 s, latency model", [load])
        elif part == "killed":
            figures[part] = {s: killed_holder(s, scratch) for s in options.systems if s != "grouped"}
            console.print("next call after a killed holder, s:", figures[part])
        elif part == "open":
            figures[part] = []
            table = Table("trials", "system", "seconds", "MB", title="open and read all trials", box=box.MARKDOWN)
            for trials in options.trials:
                folder = Path(tempfile.mkdtemp(dir=scratch))
                write_history(folder, trials)
                for name, system in [("stock", "stock"), ("first opening", "direct"), ("later opening", "direct")]:
                    seconds, megabytes = opening(system, folder)
                    figures[part].append({"trials": trials, "system": name, "seconds": seconds, "megabytes": megabytes})
                    table.add_row(str(trials), name, f"{seconds:.3f}", f"{megabytes:.0f}")
                shutil.rmtree(folder)
            console.print(table)
    shutil.rmtree(scratch)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
