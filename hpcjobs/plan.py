"""Pure: configuration -> what will run where. No file, no process and no device is looked at here."""

from __future__ import annotations

from dataclasses import dataclass

from hpcjobs.config import LOGICAL_GPUS, ClusterConfig, PartitionMode, RunConfig, StudyFile
from hpcjobs.errors import UserError
from hpcjobs.text import counted

# Workers of a node for each of its cores, and what is allowed on any node: each is a process with all its libraries.
# Eight on each logical GPU of a node with eight MI300X in mode CPX are 512, which 32 cores would be enough for.
MOST_PER_CORE = 16
ALWAYS_ALLOWED = 64


@dataclass(frozen=True)
class Plan:
    """What a submission will do, as a value that can be printed and compared.

    Attributes:
        arrays: the number of elements of each job array; an element is one node.
        workers_per_node: workers that a node is expected to run.
        workers_by_devices: the node starts ``workers_per_gpu`` workers per logical GPU that it really finds, and
            ``workers_per_node`` only where it finds none.
        cores_per_worker: CPU cores of one worker.
        mem_gb_per_worker: host memory of one worker in GB, or None where the site does not meter it.
        mode: partition mode that the node must be in, or None for whatever it has.
        signal_delay_s: seconds before its end at which a job is told.
        environment: the profile's variables; they win over the thread counts that follow from a worker's cores.
    """

    name: str
    nodes: int
    arrays: tuple[int, ...]
    workers_per_node: int
    workers_by_devices: bool
    workers_per_gpu: int
    cores_per_worker: int
    mem_gb_per_worker: float | None
    mode: PartitionMode | None
    constraint: str | None
    comment: str | None
    timeout_min: int | None
    signal_delay_s: int
    environment: dict[str, str]
    cluster: ClusterConfig | None

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node


def make_plan(file: StudyFile, *, local_cores: int = 1) -> Plan:
    """Plan a submission. ``local_cores``: cores of this machine, for a study without a cluster.

    Raises:
        UserError: a mode that the cluster does not offer, several nodes without a cluster, or too many workers.
    """
    if file.cluster is None:
        return local_plan(file.name, file.run, local_cores)
    return cluster_plan(file.name, file.run, file.cluster)


def local_plan(name: str, run: RunConfig, cores: int) -> Plan:
    """The plan of something that runs on this machine, which has so many ``cores``."""
    if run.nodes > 1:
        raise UserError(
            f"--nodes: found {run.nodes}; allowed: 1 without --cluster, which runs on this "
            "machine; name a cluster profile"
        )
    if run.mode is not None:
        raise UserError(
            f"--mode: found {run.mode!r}; allowed: no mode without --cluster, since a job's prolog sets it; "
            "set it with python -m hpcjobs.partition (as root), or leave --mode out"
        )
    # two cores for a worker without a GPU: one computes, one loads data
    workers = run.workers_per_node or max(1, cores // 2)
    _check_workers(max(workers, run.workers_per_gpu or 1), cores, run, "this machine")
    cores_per_worker = max(1, cores // workers)
    return Plan(
        name=name,
        nodes=1,
        arrays=(1,),
        workers_per_node=workers,
        workers_by_devices=run.workers_per_node is None,
        workers_per_gpu=run.workers_per_gpu or 1,
        cores_per_worker=cores_per_worker,
        mem_gb_per_worker=None,
        mode=None,
        constraint=None,
        comment=None,
        timeout_min=None,
        signal_delay_s=0,
        environment={},
        cluster=None,
    )


def cluster_plan(name: str, run: RunConfig, cluster: ClusterConfig) -> Plan:
    """The plan of something that runs in jobs of ``cluster``, one array element a node."""
    mode = requested_mode(run, cluster)
    fixed = run.workers_per_node or (None if run.workers_per_gpu else cluster.workers_per_node)
    per_gpu = run.workers_per_gpu or 1
    workers = fixed or max(1, per_gpu * cluster.gpus_per_node * (LOGICAL_GPUS[mode] if mode else 1))
    _check_workers(workers, cluster.cores_per_node, run, f"a node of cluster {cluster.name}")
    cores = max(1, cluster.cores_per_node // workers)
    memory = cluster.mem_gb_per_node
    return Plan(
        name=name,
        nodes=run.nodes,
        arrays=split(run.nodes, cluster.max_array_size),
        workers_per_node=workers,
        workers_by_devices=fixed is None,
        workers_per_gpu=per_gpu,
        cores_per_worker=cores,
        mem_gb_per_worker=None if memory is None else memory / workers,
        mode=mode,
        constraint=_constraint(cluster, mode),
        comment=mode if cluster.mode.by == "comment" else None,
        timeout_min=cluster.timeout_min,
        # a short job still spends most of its time on trials
        signal_delay_s=min(cluster.signal_delay_s, cluster.timeout_min * 60 // 4),
        environment=dict(cluster.environment),
        cluster=cluster,
    )


def _check_workers(workers: int, cores: int, run: RunConfig, where: str) -> None:
    most = max(ALWAYS_ALLOWED, MOST_PER_CORE * cores)
    if workers > most:
        option = "--workers" if run.workers_per_node else "--workers-per-gpu" if run.workers_per_gpu else "the profile"
        raise UserError(
            f"{option}: found {workers} workers for {where}; allowed: at most {most}, {MOST_PER_CORE} for each of its "
            f"{counted(cores, 'core')} and never fewer than {ALWAYS_ALLOWED}, since each is a process with all its "
            "libraries; start fewer"
        )


def requested_mode(run: RunConfig, cluster: ClusterConfig) -> PartitionMode | None:
    """The mode to ask for: the submission's, else the profile's default.

    Raises:
        UserError: the cluster does not offer it.
    """
    mode = run.mode or cluster.mode.default
    if mode is not None and mode not in cluster.mode.modes:
        offered = ", ".join(cluster.mode.modes)
        raise UserError(
            f"--mode: found {mode!r}; allowed on cluster {cluster.name}: {offered}"
            if offered
            else f"--mode: found {mode!r}; allowed on cluster {cluster.name}: none, its jobs cannot choose a partition "
            "mode; leave --mode out (the nodes' own mode is used), or add to the profile "
            "'mode: {by: constraint, modes: [...]}'"
        )
    return mode


def split(nodes: int, largest: int) -> tuple[int, ...]:
    """``nodes`` elements in as few arrays as the site's MaxArraySize allows, of about equal size."""
    count = -(-nodes // largest)
    return tuple(nodes // count + (index < nodes % count) for index in range(count))


def _constraint(cluster: ClusterConfig, mode: PartitionMode | None) -> str | None:
    own = cluster.constraint
    if mode is None or cluster.mode.by != "constraint":
        return own
    if own is None:
        return mode
    return f"({own})&{mode}" if "|" in own else f"{own}&{mode}"
