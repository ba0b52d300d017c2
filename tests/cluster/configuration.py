"""The configuration files of the emulated cluster. Pure text: see emulator.py for what runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GPUS_PER_NODE = 8
CPUS_PER_NODE = 64


@dataclass(frozen=True)
class Layout:
    """Where the parts of one emulated cluster are, and their ports on 127.0.0.1.

    ``slurmd_port`` is the first of ``nodes`` consecutive ports.
    """

    folder: Path
    host: str
    nodes: int
    slurmctld_port: int
    slurmdbd_port: int
    slurmd_port: int

    @property
    def etc(self) -> Path:
        return self.folder / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def database_socket(self) -> Path:
        return self.folder / "database.socket"

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def gpus(self) -> Path:
        """State and log of the emulated GPUs of each node."""
        return self.folder / "gpus"

    @property
    def rocm(self) -> Path:
        return self.folder / "rocm"

    @property
    def mode_log(self) -> Path:
        """What prolog and epilog did, of all nodes."""
        return self.logs / "partition-mode.log"


def slurm_conf(at: Layout) -> str:
    """Compared with a production file: short delays, no cgroups, since a container may have none, and sizes of nodes
    that are taken from here instead of from the hardware (``config_overrides``)."""
    last = at.nodes - 1
    return f"""\
ClusterName=emulated
SlurmctldHost={at.host}(127.0.0.1)
SlurmctldPort={at.slurmctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits as long as a credential lives: 120 s by default
AuthInfo=socket={at.munge_socket},cred_expire=20
StateSaveLocation={at.folder}/state
SlurmdSpoolDir={at.folder}/spool/%n
SlurmctldPidFile={at.folder}/slurmctld.pid
SlurmdPidFile={at.folder}/slurmd-%n.pid
SlurmctldLogFile={at.logs}/slurmctld.log
SlurmdLogFile={at.logs}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides

SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=5,nohold_on_prolog_fail
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=5
MessageTimeout=60
SlurmdTimeout=30
SlurmctldTimeout=30
UnkillableStepTimeout=60

PrologFlags=Alloc,DeferBatch
Prolog={at.etc}/prolog.d/*
Epilog={at.etc}/epilog.d/*

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={at.slurmdbd_port}
AccountingStoragePass={at.munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/none

NodeName=gpu[1-{at.nodes}] NodeAddr=127.0.0.1 NodeHostname={at.host} Port=[{at.slurmd_port}-{at.slurmd_port + last}] \\
  CPUs={CPUS_PER_NODE} Sockets=2 CoresPerSocket={CPUS_PER_NODE // 2} ThreadsPerCore=1 RealMemory=1500000 \\
  Gres=gpu:mi300x:{GPUS_PER_NODE} Feature=mi300x,spx,dpx,qpx,cpx
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
# jobs here preempt those of `gpu`
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def gres_conf(at: Layout) -> str:
    files = f"{at.folder}/dev/gpu[0-{GPUS_PER_NODE - 1}]"
    return f"NodeName=gpu[1-{at.nodes}] Name=gpu Type=mi300x File={files} Flags=amd_gpu_env\n"


def slurmdbd_conf(at: Layout) -> str:
    return f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={at.slurmdbd_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={at.munge_socket}
PidFile={at.folder}/slurmdbd.pid
LogFile={at.logs}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def partition_mode_conf(at: Layout, python: str) -> str:
    """What an administrator writes to /etc/slurm/partition-mode.conf (see slurm/README.md)."""
    return f"""\
python={python}
rocm={at.rocm}
default_mode=spx
allowed_modes="spx dpx qpx cpx"
gpus={GPUS_PER_NODE}
patience_s=120
limit_s=240
log={at.mode_log}
"""
