"""How many trials a second a study of light workers gets through: claim, suggest, report, finish, all on the journal.

The same calls as :mod:`hpcjobs.worker` makes for a trial, without its process and folders, from many processes with a
journal server per 8 of them (as on nodes). ``search`` is the part that samples; its share grows with the history.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import journal_latency
import numpy as np
import optuna
from journal import GROUP, REPORTS, serve_group, spawn, stop, warm_up
from optuna.trial import TrialState
from rich import box
from rich.console import Console
from rich.table import Table

from hpcjobs.budget import claim, count, finish
from hpcjobs.config import NamedWithOptions, RunConfig, StudyConfig, StudyFile, Uniform
from hpcjobs.journal_client import SOCKET_VARIABLE
from hpcjobs.owners import Owner
from hpcjobs.paths import StudyPaths
from hpcjobs.sampling import suggest
from hpcjobs.study import create_study, open_study

TRIALS = 3000
RESULT = {"figures": {}, "timing": {}, "attempts": 1}
CALLS = ("claim", "search", "report", "finish")


def work(folder: Path, worker: int, seconds: float, latency: bool) -> None:
    """One worker; begins with all others and writes how long its calls took as JSON."""
    if latency:
        journal_latency.install()
    os.environ[SOCKET_VARIABLE] = str(folder / f"s{worker // GROUP}")
    study = open_study(StudyPaths(folder))
    owner = Owner.of_this_process(element="here_1", agent="benchmark", worker=worker, token=f"token {worker}")
    times: dict[str, list[float]] = {name: [] for name in CALLS}

    def timed(name: str, call: Callable[[], object]) -> object:
        before = time.monotonic()
        value = call()
        times[name].append(time.monotonic() - before)
        return value

    (folder / f"ready{worker}").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
    start = time.monotonic()
    before = time.process_time()
    done = 0
    while time.monotonic() < start + seconds:
        trial_id = timed("claim", lambda: claim(study, owner))
        assert isinstance(trial_id, int), f"more than {TRIALS} trials: measure for fewer seconds"
        trial = optuna.Trial(study.optuna_study(study.trial(trial_id).number), trial_id)

        def search(trial: optuna.Trial = trial) -> None:
            with study.storage.batch():
                suggest(trial, study.file.study)

        timed("search", search)
        for step in range(REPORTS):
            timed("report", partial(trial.report, 0.5, step))
        ended = partial(finish, study, trial_id, owner.token, TrialState.COMPLETE, value=0.5, result=RESULT)
        timed("finish", ended)
        done += 1
    found = {"times": times, "cpu": time.process_time() - before, "done": done}
    (folder / f"worker{worker}.json").write_text(json.dumps(found))


def measure(workers: int, seconds: float, latency: bool, scratch: Path | None, sampler: str) -> list[str]:
    """A row of the table."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    space = {"x": Uniform(type="uniform", min=0.0, max=1.0)}
    config = StudyConfig(
        objective="none:none", parameters=space, trials=TRIALS, epochs=REPORTS, sampler=NamedWithOptions(name=sampler)
    )
    create_study(StudyPaths(folder), StudyFile(name="s", study=config, run=RunConfig()))
    groups = (workers + GROUP - 1) // GROUP
    servers = [spawn(lambda g=g: serve_group(folder, g, latency)) for g in range(groups)]  # type: ignore[misc]
    pids = [spawn(lambda w=w: work(folder, w, seconds, latency)) for w in range(workers)]  # type: ignore[misc]
    while not all((folder / f"ready{worker}").exists() for worker in range(workers)):
        time.sleep(0.2)
    (folder / "go").touch()
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    server_cpu = stop(servers)
    if failed:
        raise RuntimeError(f"{failed} workers failed")
    found = [json.loads((folder / f"worker{worker}.json").read_text()) for worker in range(workers)]
    done = sum(each["done"] for each in found)
    counts = count(open_study(StudyPaths(folder)))
    assert (counts.completed, counts.running) == (done, 0), f"{done} trials ended, the journal has {counts}"
    shutil.rmtree(folder)
    cpu = server_cpu + sum(each["cpu"] for each in found)
    times = [np.array([t for each in found for t in each["times"][name]]) for name in CALLS]
    p99 = [f"{1000 * np.quantile(all_times, 0.99):.0f} ms" for all_times in times]
    longest = f"{1000 * max(all_times.max() for all_times in times):.0f} ms"
    return [str(workers), f"{done / seconds:.1f}", *p99, longest, f"{1000 * cpu / done:.1f}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/journal_budget.py --workers 64 256 --latency",
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--sampler", default="random", help="of the study; tpe shows what sampling costs")
    parser.add_argument("--latency", action="store_true", help="add the latencies of journal_latency.py")
    parser.add_argument("--scratch", type=Path, default=None, help="where studies are made (the filesystem measured)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warm_up()
    columns = [*(f"{name} p99" for name in CALLS), "longest", "CPU ms/trial"]
    table = Table("workers", "trials/s", *columns, box=box.MARKDOWN)
    for workers in options.workers:
        table.add_row(*measure(workers, options.seconds, options.latency, options.scratch, options.sampler))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
