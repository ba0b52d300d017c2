"""A real Slurm on this machine: munged, MariaDB, slurmdbd, slurmctld and one slurmd per node of eight emulated MI300X.

Everything lives in one folder and on 127.0.0.1, and ends with the object or the process that started it. Needs root and
Debian's ``slurm-wlm slurmdbd munge mariadb-server gcc``. To play with it::

    make cluster
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tests.cluster import configuration
from tests.cluster.amdsmi.library import EmulatedGpus, build
from tests.cluster.daemons import ClusterError, end_abandoned, end_processes, free_ports, start_daemon, wait_until

SITE_FILES = Path(__file__).parents[2] / "slurm"
PROGRAMS = {
    "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "slurmdbd": "slurmdbd", "munged": "munge",
    "mariadbd": "mariadb-server", "gcc": "gcc",
}  # fmt: skip

# docs/my-cluster.md with AutoSpeed: its trials need the two --set where GPUs are not real
EXAMPLE = """\
  python -m autospeed_model.render runs/emulated/openlane --segments 5 --validation-segments 2 --frames 6
  python -m autospeed_model.prepare runs/emulated/openlane runs/emulated/packed --height 64 --width 128
  python -m hpcjobs.doctor --profile runs/emulated/site.yaml
  python -m hpcjobs.submit --cluster runs/emulated/site.yaml --set gpu_vendor=none --set 'mode={by: none}' \\
      --study configs/studies/demo.yaml --data runs/emulated/packed --nodes 2 --workers 2 --trials 4 --epochs 1 \\
      --folder runs/emulated/study --wait"""


def why_not_here() -> str | None:
    """What keeps the cluster from running on this machine and how to get it, or None."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None})
    if os.geteuid() != 0:
        return "the emulated cluster needs root: run as root on Debian, `sudo make test`"
    if missing:
        return (
            f"the emulated cluster needs {' '.join(missing)}: run tests/cluster/install-packages.sh as root on Debian"
        )
    return None


class Cluster:
    """An emulated cluster with nodes ``gpu1`` to ``gpuN``; a context manager.

    ``env`` is the environment for Slurm's clients (SLURM_CONF) and for amdsmi (ROCM_PATH).
    """

    def __init__(self, folder: Path, nodes: int = 4) -> None:
        first = free_ports(nodes + 2)
        self.at = configuration.Layout(folder.absolute(), socket.gethostname(), nodes, first, first + 1, first + 2)
        self.nodes = [f"gpu{number}" for number in range(1, nodes + 1)]
        self.env = {**os.environ, "SLURM_CONF": str(self.at.slurm_conf), "ROCM_PATH": str(self.at.rocm)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        reason = why_not_here()
        if reason:
            raise ClusterError(reason)
        end_abandoned()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every daemon, step and task of this cluster. The folder stays, with its logs."""
        for daemon in self._daemons.values():
            daemon.kill()
        end_processes(self.at.folder)
        for daemon in self._daemons.values():
            daemon.wait()
        self._daemons.clear()

    # ---- what tests do with it ----

    def run(
        self, *arguments: str, check: bool = True, timeout_s: float = 600.0, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's environment, by default in its folder; with ``check`` a failure raises."""
        done = subprocess.run(
            arguments,
            env={**self.env, **env},
            cwd=cwd or self.at.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            raise ClusterError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def gpus(self, node: str) -> EmulatedGpus:
        """The emulated GPUs of a node: their modes, their log, and faults to inject."""
        return EmulatedGpus(self.at.gpus, node)

    def sacct(self, job: str, *fields: str) -> list[dict[str, str]]:
        """Accounting records of a job and its steps: one mapping of ``fields`` each."""
        text = self.run("sacct", "--noheader", "--parsable2", "--duplicates", "-j", job, "-o", ",".join(fields)).stdout
        return [dict(zip(fields, line.split("|"), strict=True)) for line in text.splitlines()]

    def state_of(self, node: str) -> str:
        """Slurm's state of a node, such as ``idle``, ``alloc``, ``drain*``."""
        # asked for one node by name, sinfo 22.05 may show a state from before the last change
        text = self.run("sinfo", "--noheader", "--Node", "--partition=gpu", "-o", "%N %T").stdout
        return dict(line.split() for line in text.splitlines())[node]

    def wait_for_job(self, job: str, timeout_s: float = 400.0) -> list[str]:
        """Wait until accounting shows an end for the job (all elements of an array); the states."""
        going_on = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING")

        def ended() -> bool:
            records = self.sacct(job, "JobID", "State")
            # accounting hears of each element by itself and late, slurmctld keeps ended ones for minutes
            elements = self._elements(job)
            return (
                bool(elements)
                and elements.keys() <= {record["JobID"] for record in records}
                and not any(state.startswith(going_on) for state in elements.values())
                and not any(record["State"].startswith(going_on) for record in records)
            )

        wait_until(ended, f"the end of job {job}", timeout_s)
        return [record["State"] for record in self.sacct(job, "JobID", "State") if "." not in record["JobID"]]

    def _elements(self, job: str) -> dict[str, str]:
        """State of each element of a job, ended ones too, as slurmctld has it."""
        text = self.run("squeue", "--noheader", "--array", "--states=all", "-j", job, "-o", "%i|%T", check=False).stdout
        return dict(line.strip().split("|") for line in text.splitlines())

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL to a node's slurmd. Its steps go on, as they do on a real node."""
        daemon = self._daemons.pop(f"slurmd-{node}")
        daemon.kill()
        daemon.wait()

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd under a host name of its own: else everything would take all nodes for one host."""
        slurmd = ["slurmd", "-D", "-N", node, "-f", str(self.at.slurm_conf)]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node, *slurmd]
        self._start_daemon(f"slurmd-{node}", named)

    def kill_slurmctld(self) -> None:
        """SIGKILL to slurmctld. It saves its state every 5 s: what changed since then is lost, as on a real cluster."""
        daemon = self._daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def start_slurmctld(self) -> None:
        self._start_daemon("slurmctld", ["slurmctld", "-D", "-f", str(self.at.slurm_conf)])
        wait_until(lambda: "UP" in self.run("scontrol", "ping", check=False).stdout, "slurmctld")

    def restart_slurmctld(self) -> None:
        """End slurmctld in order, as ``systemctl restart`` does, then start one that reads the saved state."""
        daemon = self._daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait(timeout=240)
        self.start_slurmctld()

    def down(self, node: str) -> None:
        """Tell Slurm that a node has failed: its jobs are requeued or ended."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def resume(self, node: str) -> None:
        """Bring a node back that was drained or down, and wait until it is usable."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        usable = ("idle", "mixed", "allocated")
        wait_until(lambda: self.state_of(node) in usable, f"{node} to come back")

    def reset(self) -> None:
        """No jobs, all daemons up, all nodes idle, all GPUs in SPX without faults."""
        self.run("scancel", "--user=root")
        self.run("scancel", "--user=root", "--signal=KILL", check=False)
        for node in self.nodes:
            daemon = self._daemons.get(f"slurmd-{node}")
            if daemon is None or daemon.poll() is not None:
                self.start_slurmd(node)
        wait_until(lambda: not self.run("squeue", "--noheader").stdout.strip(), "all jobs to end")
        for node in self.nodes:
            self.resume(node)
            self.gpus(node).reset()
        wait_until(lambda: all(self.state_of(node) == "idle" for node in self.nodes), "all nodes to be idle")
        self.at.mode_log.unlink(missing_ok=True)

    # ---- start ----

    def _start(self) -> None:
        at = self.at
        for folder in (
            at.etc,
            at.logs,
            at.gpus,
            at.folder / "munge",
            at.folder / "state",
            at.folder / "database",
            at.folder / "dev",
        ):
            folder.mkdir(parents=True, exist_ok=True)
        for node in self.nodes:
            (at.folder / "spool" / node).mkdir(parents=True, exist_ok=True)
            self.gpus(node).reset()
        for gpu in range(configuration.GPUS_PER_NODE):
            device = at.folder / "dev" / f"gpu{gpu}"
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        build(at.rocm, at.gpus)
        self._write_configuration()
        self._start_munge_and_database()
        self._start_slurm()

    def _write_configuration(self) -> None:
        at = self.at
        at.slurm_conf.write_text(configuration.slurm_conf(at))
        (at.etc / "gres.conf").write_text(configuration.gres_conf(at))
        (at.etc / "slurmdbd.conf").write_text(configuration.slurmdbd_conf(at))
        (at.etc / "slurmdbd.conf").chmod(0o600)
        (at.etc / "partition-mode.conf").write_text(configuration.partition_mode_conf(at, sys.executable))
        shutil.copy(SITE_FILES / "partition-mode.sh", at.etc)
        for name in ("prolog.d", "epilog.d"):
            shutil.copytree(SITE_FILES / name, at.etc / name, dirs_exist_ok=True)

    def _start_munge_and_database(self) -> None:
        at = self.at
        key = at.folder / "munge" / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        files = [f"--{name}-file={at.folder}/munge/{name}" for name in ("key", "pid", "seed", "log")]
        self._start_daemon(
            "munged", ["munged", "--foreground", "--force", "--num-threads=4", f"--socket={at.munge_socket}", *files]
        )
        # Without grant tables MariaDB starts on an empty folder at once; who may enter the folder reaches its socket.
        self._start_daemon("mariadbd", [
            "mariadbd", "--no-defaults", "--user=root", f"--datadir={at.folder}/database",
            f"--socket={at.database_socket}", f"--pid-file={at.folder}/mariadbd.pid", "--skip-networking",
            "--skip-grant-tables", "--skip-log-bin", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M",
            "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900", "--performance-schema=OFF",
        ])  # fmt: skip
        wait_until(
            lambda: at.munge_socket.exists() and at.database_socket.exists(), f"munged and mariadbd, see {at.logs}"
        )

    def _start_slurm(self) -> None:
        self._start_daemon("slurmdbd", ["slurmdbd", "-D"])
        for node in self.nodes:
            self.start_slurmd(node)
        add = ("sacctmgr", "--immediate", "add", "cluster", "emulated")
        wait_until(lambda: self.run(*add, check=False).returncode == 0, f"slurmdbd, see {self.at.logs}")
        self.start_slurmctld()
        wait_until(lambda: all(self.state_of(node) == "idle" for node in self.nodes), f"the nodes, see {self.at.logs}")

    def _start_daemon(self, name: str, arguments: list[str]) -> None:
        database = {"MYSQL_UNIX_PORT": str(self.at.database_socket), "MARIADB_UNIX_PORT": str(self.at.database_socket)}
        extra = {"SLURM_CONF": str(self.at.slurm_conf), **(database if name == "slurmdbd" else {})}
        self._daemons[name] = start_daemon(arguments, self.at.folder, self.at.logs / f"{name}.out", extra)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.emulator", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4, help="nodes of eight MI300X (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="where its files go (default: a temporary folder, removed at the end)"
    )
    arguments = parser.parse_args()
    reason = why_not_here()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="emulated-cluster-"))
    begin = time.monotonic()
    try:
        with Cluster(folder, arguments.nodes) as cluster:
            print(f"{arguments.nodes} nodes up after {time.monotonic() - begin:.1f} s. In another terminal:\n")
            print(f"  source {shlex.quote(str(Path(sys.prefix) / 'bin/activate'))}")
            print(f"  export SLURM_CONF={cluster.env['SLURM_CONF']} ROCM_PATH={cluster.env['ROCM_PATH']}")
            print("  sinfo; srun --constraint=cpx --exclusive --gres=gpu:8 python -m hpcjobs.partition show\n")
            print(
                "The GPUs are not real and cannot compute: trainings need gpu_vendor=none, and mode={by: none} with it."
            )
            print(f"A study of AutoSpeed on the CPUs, about a minute:\n\n{EXAMPLE}\n")
            print(f"Logs: {cluster.at.logs}\nCtrl-C ends it.", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print("ended")
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
