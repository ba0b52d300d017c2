"""From a job's start to the last worker's first trial, on the emulated cluster: ``python -m benchmarks.cluster_start``.

Workers begin a trial and keep it. Seconds depend on what else the machine does; CPU seconds by kind of process do less,
those of a worker until its first trial least of all.
Needs root and the packages of tests/cluster/install-packages.sh.
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.cluster.daemons import _belongs, _pids
from tests.cluster.emulator import Cluster

OBJECTIVE = """\
import time
def train(params, context):
    (context.folder / "cpu_s").write_text(str(time.process_time()))
    while not context.stop_requested:
        time.sleep(1)
    context.hand_back()
train.parameters = {"x": {"type": "float"}}
"""
STUDY = "objective: light_objective:train\nparameters: {x: {type: uniform, min: 0, max: 1}}\n"
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(folder: Path) -> dict[str, tuple[int, float]]:
    """Number and CPU seconds of the cluster's living processes: our agents and workers, and Slurm's by their name."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for pid in _pids():
        try:
            if not _belongs(pid, folder):
                continue
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if name.startswith("python"):
            name = "worker" if "hpcjobs.worker" in command else "agent"
        count, seconds = found[name]
        found[name] = count + 1, seconds + sum(map(int, fields.split()[11:13])) / TICKS
    return dict(found)


def import_seconds(times: int = 10) -> float:
    """CPU seconds of a process that only imports Optuna and ends: no worker that uses it takes less."""
    before = os.times()
    for _ in range(times):
        subprocess.run([sys.executable, "-c", "import optuna"], check=True)
    after = os.times()
    return (after.children_user + after.children_system - before.children_user - before.children_system) / times


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_start", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4, help="nodes of 64 logical GPUs (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=400, help="give up after so long (default: %(default)s)")
    options = parser.parse_args()
    workers = 64 * options.nodes
    floor = import_seconds()
    # as installing does it; an editable installation may have been kept from it
    compileall.compile_dir(Path(__file__).parents[1] / "hpcjobs", quiet=1)
    with tempfile.TemporaryDirectory() as temporary, Cluster(Path(temporary) / "cluster", options.nodes) as cluster:
        project = Path(temporary)
        (project / "light_objective.py").write_text(OBJECTIVE)
        (project / "study.yaml").write_text(STUDY)
        submit = ["-m", "hpcjobs.submit", "--study", "study.yaml", "--cluster", "emulated", "--mode", "cpx"]
        given = ["--nodes", str(options.nodes), "--trials", str(workers + 50), "--folder", "study"]
        cluster.run(sys.executable, *submit, *given, cwd=project)
        begun = _wait(lambda: any((project / "study/logs").glob("*/node.log")), options.limit_s)
        begins = project / "study/trials"
        asking = _wait(lambda: sum(1 for _ in begins.glob("*/cpu_s")) >= workers, options.limit_s)
        first = statistics.median(float(path.read_text() or "nan") for path in begins.glob("*/cpu_s"))
        used = cpu_seconds(cluster.at.folder)
        print(f"{workers} workers asked {asking - begun:.1f} s after the first agent began, ", end="")
        print(f"each after {first:.2f} CPU seconds (median); load {os.getloadavg()[0]:.1f}")
        for name, (count, seconds) in sorted(used.items(), key=lambda item: -item[1][1]):
            print(f"  {count:4} x {name:14} {seconds:7.1f} CPU seconds")
        print(f"  {sum(seconds for _, seconds in used.values()):.0f} CPU seconds in all")
        cores = len(os.sched_getaffinity(0))
        print(f"importing Optuna alone: {floor:.2f} CPU seconds each, {workers * floor / cores:.0f} s on {cores} cores")
    return 0


def _wait(condition: Callable[[], bool], limit_s: float) -> float:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"not after {limit_s:g} s")
        time.sleep(0.1)
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
