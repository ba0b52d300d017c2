"""Pure: which partition mode, and how many workers. From a measured table if one fits, else by a rule from known facts.

A study of T trials on N nodes with w workers each takes about ``rounds = ceil(T / (N w))`` trainings one after another,
each of which takes ``w / s`` per image where ``s`` is the node's summed speed. The least ``rounds * w / s`` is chosen:
64 slow workers are the wrong answer for 70 trials, since the second round would leave most of them idle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcjobs.config import LOGICAL_GPUS, MODES, Categorical, ClusterConfig, Int, PartitionMode, StudyConfig
from hpcjobs.text import counted
from hpcjobs.throughput_plan import Setup
from hpcjobs.throughput_table import Row, ThroughputTable

# set-ups whose estimates differ by less are equal: the one with fewer workers searches better
EQUAL = 0.03
# trials per worker below which a model-based sampler has little to learn from
FEW_ROUNDS = 3
# with less of a core than this, workers wait for one another
CORES_PER_WORKER = 1.0
BATCH_SIZE, PRECISION = "batch_size", "precision"


@dataclass(frozen=True)
class Need:
    """What the study asks of a node.

    Attributes:
        batch_sizes: all that a trial may have.
        memory_gb: device memory of a training with the largest of them, if the objective says; likewise for the host.
    """

    trials: int
    nodes: int
    batch_sizes: tuple[int, ...]
    precision: str
    objective: str
    settings: Mapping[str, Any]
    memory_gb: float | None = None
    host_memory_gb: float | None = None


@dataclass(frozen=True)
class Choice:
    """The answer. ``reason`` says from what it follows; ``notes`` what the user may want to decide otherwise."""

    setup: Setup
    workers: int
    reason: str
    notes: tuple[str, ...] = ()
    some_idle: bool = False  # the set-up has more logical GPUs than these workers


def need_of(study: StudyConfig, nodes: int, defaults: Mapping[str, Any], memory: Mapping[str, Any] | None) -> Need:
    """Read off a study what matters here.

    Args:
        defaults: the objective's, for what the study neither searches nor fixes.
        memory: what the objective declares: ``device_fixed_gb``, ``device_gb_per_image``, ``host_gb``, and for which
            ``settings``; in a study that has or searches others the need is not known.
    """
    values = {**defaults, **study.fixed}
    batches = _values_of(study, BATCH_SIZE, values)
    memory = memory or {}
    if any(values.get(name) != value for name, value in memory.get("settings", {}).items()):
        memory = {}
    device = None
    if batches and "device_gb_per_image" in memory:
        device = memory.get("device_fixed_gb", 0.0) + memory["device_gb_per_image"] * max(batches)
    return Need(
        trials=study.trials,
        nodes=nodes,
        batch_sizes=batches,
        precision=str(values.get(PRECISION, "auto")),
        objective=study.objective,
        settings=values,
        memory_gb=device,
        host_memory_gb=memory.get("host_gb"),
    )


def _values_of(study: StudyConfig, name: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    searched = study.parameters.get(name)
    if isinstance(searched, Categorical):
        return tuple(sorted(value for value in searched.values if isinstance(value, int)))
    if isinstance(searched, Int):
        return (searched.min, searched.max)
    value = values.get(name)
    return (value,) if isinstance(value, int) else ()


def choose(need: Need, cluster: ClusterConfig | None, table: ThroughputTable | None, devices: int = 1) -> Choice:
    """The set-up for a study; ``devices`` of this machine count where there is no cluster."""
    misfit = "there is no table of measurements" if table is None else does_not_fit(table, need, cluster)
    if table is not None and misfit is None:
        return by_table(table, need)
    return by_rule(need, cluster, devices, misfit or "")


def does_not_fit(table: ThroughputTable, need: Need, cluster: ClusterConfig | None) -> str | None:
    """Why a table says nothing about a study, or None if it does."""
    where = cluster.name if cluster else None
    if table.cluster != where:
        return (
            f"the table was measured on {table.cluster or 'one machine'}, the study runs on {where or 'this machine'}"
        )
    if table.objective and table.objective != need.objective:
        return f"the table measured {table.objective}, the study runs {need.objective}"
    for name, measured in table.settings.items():
        if name in need.settings and need.settings[name] != measured:
            return f"the table was measured with {name}={measured}, the study has {name}={need.settings[name]}"
    if not need.batch_sizes:
        return "the study's batch size is not known"
    missing = [b for b in need.batch_sizes if not any(_row(table, setup, b, need) for setup in table.setups)]
    if missing:
        sizes, measured = ", ".join(map(str, missing)), ", ".join(map(str, table.batch_sizes))
        return f"batch size {sizes} in precision {need.precision} is not in the table (it has {measured})"
    return None


def _row(table: ThroughputTable, setup: Setup, batch_size: int, need: Need) -> Row | None:
    return table.row(setup, batch_size, need.precision)


@dataclass(frozen=True)
class _Candidate:
    setup: Setup
    workers: int
    speed: float  # images/s of a node; harmonic mean over the batch sizes
    cost: float


def by_table(table: ThroughputTable, need: Need) -> Choice:
    """The measured set-up in which the study ends first."""
    candidates = []
    excluded = []
    for setup in table.setups:
        rows = [_row(table, setup, batch_size, need) for batch_size in need.batch_sizes]
        speeds = [row.end_to_end for row in rows if row and row.status == "ok" and row.end_to_end]
        if len(speeds) < len(rows):
            excluded.append(setup.name)
            continue
        workers = next(row.workers for row in rows if row)
        speed = len(speeds) / sum(1 / value for value in speeds)
        candidates.append(_Candidate(setup, workers, speed, _cost(need, workers, speed)))
    sizes = ", ".join(map(str, need.batch_sizes))
    if not candidates:
        return Choice(
            table.setups[0], 0, f"table {table.name}: no measured set-up runs batch size {sizes}; the coarsest is taken"
        )
    best = min(candidates, key=lambda c: c.cost)
    chosen = min((c for c in candidates if c.cost <= best.cost * (1 + EQUAL)), key=lambda c: c.workers)
    rounds = _rounds(need, chosen.workers)
    others = "; ".join(
        f"{c.setup.name} {c.speed:,.0f} images/s, {counted(_rounds(need, c.workers), 'round')}, "
        f"{c.cost / chosen.cost:.2f} times the time"
        for c in candidates
        if c is not chosen
    )
    reason = (
        f"measured (table {table.name}): at batch size {sizes}, precision {need.precision}, {chosen.setup.name} trains "
        f"{chosen.speed:,.0f} images/s a node with {counted(chosen.workers, 'worker')}; "
        f"{counted(need.trials, 'trial')} on {counted(need.nodes, 'node')} take {counted(rounds, 'round')}"
        f"{'. Others: ' + others if others else ''}"
    )
    if excluded:
        reason += f". Out of memory or not measured: {', '.join(excluded)}"
    notes = [*_sampler_notes(need, chosen.workers, candidates), *_table_notes(table, need, chosen)]
    return Choice(chosen.setup, chosen.workers, reason, tuple(notes))


def _rounds(need: Need, workers: int) -> int:
    return math.ceil(need.trials / (need.nodes * workers))


def _cost(need: Need, workers: int, speed: float) -> float:
    """Seconds per image of one training, times the trainings that follow one another."""
    return _rounds(need, workers) * workers / speed


def _sampler_notes(need: Need, workers: int, candidates: Sequence[_Candidate] = ()) -> list[str]:
    rounds = need.trials / (need.nodes * workers)
    if rounds >= FEW_ROUNDS or workers == 1:
        return []
    fewer = max(1, need.trials // (FEW_ROUNDS * need.nodes))
    note = (
        f"{counted(need.trials, 'trial')} for {need.nodes * workers} workers: the sampler has {rounds:.1f} trials per "
        f"worker to learn from; --workers {fewer} a node would search better, and take longer"
    )
    mine = next((c.cost for c in candidates if c.workers == workers), None)
    coarser = [c for c in candidates if c.workers < workers]
    if coarser and mine:
        other = min(coarser, key=lambda c: c.cost)
        text = f"{other.setup.name}: {counted(other.workers, 'worker')}, {other.cost / mine:.2f} times the time"
        note += f" (as would {text})"
    return [note]


def _table_notes(table: ThroughputTable, need: Need, chosen: _Candidate) -> list[str]:
    notes = []
    rows = [row for b in need.batch_sizes if (row := _row(table, chosen.setup, b, need))]
    limits = {row.host_limit for row in rows if row.host_limit}
    if limits:
        notes.append(f"the host was the limit while this was measured: {'; '.join(sorted(limits))}")
    for row in rows:
        best = table.best(chosen.setup, row.batch_size)
        if best and best.end_to_end and row.end_to_end and best.end_to_end > 1.05 * row.end_to_end:
            gain = best.end_to_end / row.end_to_end
            notes.append(f"at batch size {row.batch_size}, precision {best.precision} is {gain:.2f} times as fast")
    return notes


def by_rule(need: Need, cluster: ClusterConfig | None, devices: int, why: str) -> Choice:
    """The finest mode in which every worker has the memory and the cores that it needs.

    Finer modes train small batches faster, as was published of this detector on MI300X, until a worker's memory or the
    host is used up; more workers than trials are of no use.
    """
    if cluster is None:
        reason = f"rule, since {why}: one worker on each of {counted(devices, 'device')}"
        return Choice(Setup(None, 1), devices, reason, tuple(_sampler_notes(need, devices)))
    refused = []
    options: tuple[PartitionMode | None, ...] = tuple(reversed([m for m in MODES if m in cluster.mode.modes])) or (
        None,
    )
    chosen: PartitionMode | None = options[-1]
    for mode in options:
        problem = _problem(mode, need, cluster)
        if problem is None:
            chosen = mode
            break
        refused.append(problem)
    gpus = max(1, cluster.gpus_per_node * (LOGICAL_GPUS[chosen] if chosen else 1))
    # where the host is too small for one worker on every GPU of even the coarsest mode, some GPUs stay idle
    workers = min(gpus, math.ceil(need.trials / need.nodes), _host_bears(need, cluster))
    taken = chosen or "the nodes' own mode"
    reason = f"rule, since {why}: {taken} with {counted(workers, 'worker')} a node"
    reason += f"; {'; '.join(refused)}" if refused else _enough(chosen, need, cluster)
    if need.memory_gb is None and chosen:
        reason += "; how much memory a batch needs is not known, a trial may run out of it"
    notes = _sampler_notes(need, workers)
    notes.append("a table says more than a rule: python -m hpcjobs.throughput measures this cluster in minutes")
    return Choice(Setup(chosen, 1), workers, reason, tuple(notes), some_idle=workers < gpus)


def _host_bears(need: Need, cluster: ClusterConfig) -> int:
    """How many workers the cores and the memory of a node are enough for; at least 1."""
    bears = [cluster.cores_per_node / CORES_PER_WORKER]
    if cluster.mem_gb_per_node and need.host_memory_gb:
        bears.append(cluster.mem_gb_per_node / need.host_memory_gb)
    return max(1, math.floor(min(bears)))


def _problem(mode: PartitionMode | None, need: Need, cluster: ClusterConfig) -> str | None:
    """Why a mode will not do, with the figures."""
    parts = LOGICAL_GPUS[mode] if mode else 1
    workers = max(1, cluster.gpus_per_node * parts)
    # workers that have no trial need nothing
    busy = min(workers, math.ceil(need.trials / need.nodes))
    name = mode or "one worker a GPU"
    if cluster.gpu_memory_gb and need.memory_gb and cluster.gpu_memory_gb / parts < need.memory_gb:
        has = cluster.gpu_memory_gb / parts
        return f"{name} has {has:.0f} GB a logical GPU, batch size {max(need.batch_sizes)} needs {need.memory_gb:.0f}"
    if cluster.cores_per_node / busy < CORES_PER_WORKER:
        return (
            f"{name} would give {counted(busy, 'worker')} {counted(cluster.cores_per_node, 'core')}, less than one each"
        )
    memory = cluster.mem_gb_per_node
    if memory and need.host_memory_gb and memory / busy < need.host_memory_gb:
        return f"{name} would give a worker {memory / busy:.1f} GB of host memory, it needs {need.host_memory_gb:.1f}"
    if mode and workers > busy and parts > 1 and cluster.gpus_per_node * (parts // 2) >= busy:
        return f"{name} has {workers} logical GPUs a node for {counted(busy, 'trial')}"
    return None


def _enough(mode: PartitionMode | None, need: Need, cluster: ClusterConfig) -> str:
    parts = LOGICAL_GPUS[mode] if mode else 1
    workers = min(max(1, cluster.gpus_per_node * parts), math.ceil(need.trials / need.nodes))
    has = f"{cluster.cores_per_node / workers:.1f} cores a worker"
    if cluster.gpu_memory_gb and need.memory_gb:
        has += f", {cluster.gpu_memory_gb / parts:.0f} GB of device memory for the {need.memory_gb:.0f} it needs"
    return f" ({has})"
