"""What ``hpcjobs.status`` costs on a study of ten thousand trials on four nodes that runs.

    python benchmarks/status.py

The study has 64 workers on each node; they report 13 epochs a second together, and the nodes write their files every
two seconds, all from this process. Times are those of a process that starts when another one has read the same files
before, beside ``import optuna`` and beside reading the same journal with stock Optuna.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import optuna
from rich import box
from rich.console import Console
from rich.table import Table

from hpcjobs.budget import claim
from hpcjobs.heartbeat import BEAT_S, NodeReport, WorkerStatus
from hpcjobs.owners import Owner
from hpcjobs.study import OpenStudy, extend, open_study
from tests.hpcjobs.night import make_night

ROOT = Path(__file__).resolve().parents[1]
NODES, WORKERS = 4, 64
REPORTS_A_BEAT = 26
STOCK = """
import sys, optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
storage = JournalStorage(JournalFileBackend(sys.argv[1]))
optuna.load_study(study_name=storage.get_all_studies()[0].study_name, storage=storage).get_trials(deepcopy=False)
"""


class RunningStudy:
    """Plays the nodes and workers of a study from a thread."""

    def __init__(self, folder: Path, trials: int) -> None:
        self.study: OpenStudy = open_study(make_night(folder, nodes=NODES, workers=WORKERS, trials=trials))
        extend(self.study, 2 * NODES * WORKERS)
        owner = Owner.of_this_process(element="4711_0", agent="a", worker=0, token="t")
        claimed = [claim(self.study, owner) for _ in range(NODES * WORKERS)]
        self._trials = [trial_id for trial_id in claimed if trial_id is not None]
        self.study.storage.save_snapshot()
        self._ended = threading.Event()
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        for node in range(NODES):
            workers = [
                WorkerStatus(
                    w, "t", 1, "x", "running", self._beats, str(w), 10_000 + w, 3, 15, 0.5, 610.0 + w, 21.0, 39
                )
                for w in range(WORKERS)
            ]
            report = NodeReport(f"4712_{node}", "a", "elsewhere", f"nid{node:06d}", 1, "x", 0, "running", self._beats)
            report.mode, report.gpus, report.time_left_s, report.workers = "cpx", WORKERS, 9000.0, workers
            report.write(self.study.paths)
        with self.study.storage.batch():
            for place in range(REPORTS_A_BEAT):
                trial_id = self._trials[(self._beats * REPORTS_A_BEAT + place) % len(self._trials)]
                self.study.storage.set_trial_intermediate_value(trial_id, self._beats, 0.5)


def processor_s(pid: int) -> float:
    """Processor time of a process until now, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(*command: str) -> tuple[float, float]:
    """Wall time and processor time of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def watch(folder: Path, seconds: float) -> tuple[float, float, float]:
    """Run the live view in a terminal: wall and processor time to the first picture, then the share of a core."""
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="140", LINES="40", TERM="xterm-256color")
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "hpcjobs.status", str(folder)])
    shown = b""
    while b"images/s" not in shown:
        shown += os.read(terminal, 65536)
    first, first_cpu = time.monotonic() - began, processor_s(pid)
    settled = time.monotonic() + BEAT_S
    start, begun = 0.0, 0.0
    while not begun or time.monotonic() < begun + seconds:
        if select.select([terminal], [], [], 0.2)[0]:
            os.read(terminal, 65536)
        if not begun and time.monotonic() > settled:
            start, begun = processor_s(pid), time.monotonic()
    share = (processor_s(pid) - start) / (time.monotonic() - begun)
    os.kill(pid, 15)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return first, first_cpu, share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="that have ended (default: 10000)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the live view is watched (default: 30)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, of which the median is shown (default: 3)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        running = RunningStudy(Path(folder) / "study", options.trials)
        journal = str(running.study.paths.journal)
        try:
            imports = [run("-c", "import optuna") for _ in range(options.rounds)]
            stock = [run("-c", STOCK, journal) for _ in range(options.rounds)]
            views = [watch(running.study.paths.folder, options.seconds) for _ in range(options.rounds)]
        finally:
            running.end()
    middle = options.rounds // 2
    table = Table("", "wall (s)", "processor (s)", box=box.MARKDOWN)
    for name, times in (
        ("import optuna", imports),
        ("stock Optuna reads all trials", stock),
        ("status, first picture", [view[:2] for view in views]),
    ):
        wall, cpu = (sorted(column)[middle] for column in zip(*times, strict=True))
        table.add_row(name, f"{wall:.2f}", f"{cpu:.2f}")
    console = Console()
    console.print(table)
    console.print(f"status afterwards: {sorted(view[2] for view in views)[middle]:.1%} of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
