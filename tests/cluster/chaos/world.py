"""A study on the emulated cluster for faults to hit: its folders, its processes, and how it is kept going."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from hpcjobs.filesystem import decide_lock
from hpcjobs.heartbeat import NodeReport, WorkerStatus, read_nodes
from hpcjobs.journal_lock import read_owner
from hpcjobs.owners import process_alive
from hpcjobs.paths import StudyPaths
from tests.cluster.chaos import chaos_objective
from tests.cluster.chaos.ledger import Ledger
from tests.cluster.daemons import ClusterError, wait_until
from tests.cluster.emulator import Cluster

HERE = Path(__file__).parent
DISK_MB = 64

# before every node agent: a clock that is wrong on some nodes, and an srun that can be told to fail
_SETUP = """\
export PATH={folder}/bin:$PATH
if [ -e {folder}/skew-$SLURMD_NODENAME ]; then . {folder}/skew-$SLURMD_NODENAME; fi
"""
_SRUN = """\
#!/bin/sh
if [ -e "{folder}/no-steps-$SLURMD_NODENAME" ]; then
  echo "srun: error: Unable to create step for job $SLURM_JOB_ID: injected" >&2
  echo "$SLURMD_NODENAME $(date +%s.%N)" >>"{folder}/refused-steps"
  exit 1
fi
exec /usr/bin/srun "$@"
"""


@dataclass
class World:
    cluster: Cluster
    folder: Path  # of this run: the study on a small filesystem, the diary and all else beside it
    rng: random.Random
    nodes: int
    workers: int
    epochs: int = 6
    step_s: float = 0.1
    timeout_min: int = 4
    budget: int = 0
    disk_full: bool = False
    busy_nodes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.disk = self.folder / "disk"
        self.paths = StudyPaths(self.disk / "study")
        self.diary = self.folder / "diary"
        self.clock = self.folder / "skewed_clock.so"
        self._ledger: Ledger | None = None

    # ---- begin and end ----

    def begin(self, trials: int, lock: str) -> None:
        """Mount the small filesystem and submit the study."""
        for folder in (self.disk, self.diary, self.folder / "bin"):
            folder.mkdir(parents=True)
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", self.clock, HERE / "skewed_clock.c"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", self.disk], check=True)
        (self.folder / "setup.sh").write_text(_SETUP.format(folder=self.folder))
        srun = self.folder / "bin" / "srun"
        srun.write_text(_SRUN.format(folder=self.folder))
        srun.chmod(0o755)
        profile = {
            "name": "chaos", "slurm_partition": "gpu", "timeout_min": self.timeout_min, "signal_delay_s": 20,
            "cores_per_node": 64, "gpus_per_node": 0, "gpu_vendor": "none", "workers_per_node": self.workers,
            "setup": [f". {self.folder}/setup.sh"],
            "environment": {chaos_objective.DIARY: str(self.diary), "OMP_NUM_THREADS": "1"},
        }  # fmt: skip
        study = {
            "objective": "chaos_objective:train", "direction": "minimize", "trials": trials, "epochs": self.epochs,
            "parameters": {"x": {"type": "uniform", "min": 0.0, "max": 1.0}},
            "fixed": {"base": 0.1, "step_s": self.step_s}, "sampler": {"name": "random"},
            "seed": self.rng.randrange(1 << 30),
        }  # fmt: skip
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(profile))
        (self.folder / "study.yaml").write_text(yaml.safe_dump(study))
        files = ["--study", str(self.folder / "study.yaml"), "--cluster", str(self.folder / "cluster.yaml")]
        self.submit(*files, "--nodes", str(self.nodes), "--folder", str(self.paths.folder), "--prepare")
        if lock == "soft":  # what is decided on a filesystem without kernel locks between nodes
            self.paths.journal.with_suffix(".locking").unlink(missing_ok=True)
            decide_lock(self.paths.journal, "soft", "chosen for this run")
        self.budget = trials
        self.submit("--resume", str(self.paths.folder), "--nodes", str(self.nodes))

    def end(self) -> None:
        """Take the study's jobs away, keep a copy of the journal, give the filesystem back.

        Before, somebody collects the results: damage that was done after the last process of the study had ended is
        repaired by whoever opens it next.
        """
        self.cluster.reset()
        self.cluster.run(sys.executable, "-m", "hpcjobs.collect", str(self.paths.folder), check=False, cwd=HERE)
        for file in self.paths.folder.glob("journal*"):
            if file.is_file():
                (self.folder / file.name).write_bytes(file.read_bytes())
        subprocess.run(["umount", "-l", self.disk], check=True)

    # ---- the user ----

    def submit(self, *options: str) -> None:
        self.cluster.run(sys.executable, "-m", "hpcjobs.submit", *options, cwd=HERE)

    def submit_in_background(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hpcjobs.submit", *options]
        log = (self.folder / "submit.log").open("ab")
        with log:
            return subprocess.Popen(command, cwd=HERE, env=self.cluster.env, stdout=log, stderr=log)

    def keep_going(self, spare: int) -> int:
        """What a user does in the morning: more nodes where elements were lost. And more trials, so that the faults
        do not outlast the study; returns how many."""
        missing = self.nodes - len(self.queue())
        more = 0
        if spare and len(self.ledger.left) < spare:
            more = spare
        if not (missing > 0 or more) or self.disk_full:
            return 0
        trials = ["--trials", f"+{more}"] if more else []
        self.submit("--resume", str(self.paths.folder), "--nodes", str(max(1, missing)), *trials)
        self.budget += more
        return more

    # ---- what is there ----

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None or self._ledger.is_replaced():
            self._ledger = Ledger(self.paths.journal)
        self._ledger.read()
        return self._ledger

    def queue(self) -> dict[str, tuple[str, str, str]]:
        """Elements in Slurm's queue: state, node, reason."""
        text = self.cluster.run("squeue", "--noheader", "--array", "-o", "%i|%T|%N|%r", check=False).stdout
        fields = [line.split("|") for line in text.splitlines()]
        return {element: (state, node, reason) for element, state, node, reason in fields}

    def agents(self) -> list[NodeReport]:
        return [each for each in read_nodes(self.paths) if process_alive(each.pid, each.start)]

    def live_workers(self) -> list[tuple[NodeReport, WorkerStatus]]:
        """Workers whose process lives, also those of a dead agent."""
        return [
            (node, worker)
            for node in read_nodes(self.paths)
            for worker in node.workers
            if worker.pid and process_alive(worker.pid, worker.start)
        ]

    def holder(self, patience_s: float = 3.0) -> int | None:
        """Stop a process at a moment at which it holds the journal's lock; its id, or None if none was caught."""
        ours = {each.pid for each in self.agents()} | {worker.pid for _, worker in self.live_workers()}
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            pid = self.lock_holder()
            if pid is not None and pid in ours:
                if stop(pid) and self.lock_holder() == pid:
                    return pid
                go_on_with(pid)
            time.sleep(0.0005)
        return None

    def stand_still(self, pids: list[int]) -> list[int]:
        """Stop these processes, none of them while it holds the journal's lock: a filesystem takes locks from a node
        that it does not hear. Returns those that stand still."""
        stopped = [pid for pid in pids if stop(pid)]
        while (holder := self.lock_holder()) is not None and holder in stopped:
            go_on_with(holder)
            time.sleep(0.01)
            if not stop(holder):
                stopped.remove(holder)
        return stopped

    def lock_holder(self) -> int | None:
        status = self.paths.journal.stat()
        soft = self.paths.journal.with_name(f"journal.lock.{status.st_ino}")
        if soft.exists():
            owner = read_owner(soft)
            return owner.pid if owner else None
        major, minor = os.major(status.st_dev), os.minor(status.st_dev)
        pattern = rf"^\d+: FLOCK +ADVISORY +WRITE (\d+) {major:02x}:{minor:02x}:{status.st_ino} "
        found = re.search(pattern, Path("/proc/locks").read_text(), re.MULTILINE)
        return int(found.group(1)) if found else None

    def is_prolog_running(self, node: str) -> bool:
        """Slurm 22.05 loses a job for good whose slurmd dies meanwhile."""
        return any(where == node and reason == "Prolog" for _, where, reason in self.queue().values())


def process_state(pid: int) -> str:
    """One letter of /proc, such as R, S, T (stopped), Z; empty when there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stop(pid: int) -> bool:
    """SIGSTOP, and wait until it has worked; False if it did not, and then the process goes on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        with contextlib.suppress(ClusterError):
            wait_until(lambda: process_state(pid) == "T", f"process {pid} to stop", 5)
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def go_on_with(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> bool:
    """SIGKILL, and wait until it has worked; False if the process was gone before."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    wait_until(lambda: process_state(pid) in ("", "Z"), f"the end of process {pid}")
    return True


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
