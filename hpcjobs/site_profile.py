"""From what a machine is to a first profile, and to a table of what is right, doubtful and wrong there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpcjobs.doctor_quota import Room
from hpcjobs.site import Site, SlurmPartition
from hpcjobs.text import counted

Verdict = Literal["right", "doubtful", "wrong"]
# a study's own files: a few for each worker and trial, in the tens of thousands for the largest
FEW_FILES = 100_000
OLDEST_SLURM = (21, 8)


@dataclass(frozen=True)
class Finding:
    """One row of the table. ``remedy`` is empty where nothing is to be done."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def profile_text(site: Site, name: str) -> str:
    """A profile in YAML with comments, complete enough to submit with. What is not known is left to its default."""
    partition = site.best_partition()
    lines = [
        f"# {name}: a first profile, written by hpcjobs.doctor from what Slurm says. Check the lines marked with ?."
    ]
    lines += [f"name: {json.dumps(name)}"]
    if len(site.accounts) == 1:
        lines.append(f"account: {json.dumps(site.accounts[0])}")
    elif site.accounts:
        lines.append(f"account: null                # ? yours are: {', '.join(site.accounts)}")
    else:
        lines.append("account: null                # ? none is known to Slurm's accounting; some sites demand one")
    if partition is None:
        return "\n".join([*lines, "cores_per_node: 1            # ? no Slurm partition was found"]) + "\n"
    others = sorted({p.name for p in site.partitions if p.name != partition.name and p.gpus})
    note = f"  # ? others with GPUs: {', '.join(others)}" if others else ""
    lines.append(f"slurm_partition: {json.dumps(partition.name)}{note}")
    lines += _time_lines(partition)
    lines += [f"gpu_vendor: {partition.vendor}", f"gpus_per_node: {partition.gpus}"]
    if partition.gpus:
        kind = partition.gpu_types[0] if len(partition.gpu_types) == 1 else None
        lines.append(f"gres: {f'gpu:{kind}:{partition.gpus}' if kind else f'gpu:{partition.gpus}'}")
    lines.append(f"cores_per_node: {partition.cores}           # what Slurm counts: hardware threads on some sites (?)")
    lines.append("mem_gb_per_node: null        # no --mem: the site's own rule; the nodes have "
                 f"{partition.mem_gb} GB")  # fmt: skip
    if partition.modes:
        lines += ["# the nodes' features name partition modes, so a job can ask for one"]
        lines += ["mode:", "  by: constraint", f"  modes: [{', '.join(partition.modes)}]"]
    if site.max_array:
        lines.append(f"max_array_size: {max(1, site.max_array - 1)}")
    modules = ", ".join(site.gpu_modules[:6])
    lines.append(
        f"modules: []                  # {f'? some that are here: {modules}' if modules else 'none were found'}"
    )
    image = f"[{site.container}, exec, {'--rocm' if partition.vendor == 'amd' else '--nv'}, image.sif]"
    lines.append(
        f"container: []                # {image if site.container else 'no Apptainer or Singularity was found'}"
    )
    return "\n".join(lines) + "\n"


def _time_lines(partition: SlurmPartition) -> list[str]:
    limit = partition.time_min
    chosen = min(limit, 720) if limit else 720
    told = f"the partition's limit is {limit}" if limit else "the partition has no limit"
    return [f"timeout_min: {chosen}             # {told}", f"signal_delay_s: {min(300, chosen * 15)}"]


def findings(
    site: Site, rooms: Iterable[Room], lock: tuple[str, str], *, one_node_alone: bool = False
) -> list[Finding]:
    """The table: the worst first. ``rooms``: of the filesystem and of quotas; ``lock``: which one, and why.

    ``one_node_alone``: the filesystem is one that other nodes do not see, as far as its type tells.
    """
    rows = [*_of_slurm(site), *_of_nodes(site), *_of_software(site)]
    kind, reason = lock
    remedy = "" if kind == "kernel" else "slower, and as safe; another filesystem may have kernel locks"
    if one_node_alone:
        remedy = "if they do not, make studies of several nodes in a folder that all of them see"
    rows.append(Finding("lock of a study", "doubtful" if remedy else "right", f"{kind}: {reason}", remedy))
    for room in rooms:
        rows += _of_room(room)
    rows += [Finding("question", "doubtful", problem, "ask the site, or pass over it") for problem in site.problems]
    return sorted(rows, key=lambda row: ("wrong", "doubtful", "right").index(row.verdict))


def _of_room(room: Room) -> list[Finding]:
    rows = []
    if room.free_gb is not None:
        verdict: Verdict = "right" if room.free_gb > 50 else "doubtful" if room.free_gb > 5 else "wrong"
        remedy = "" if verdict == "right" else "use another filesystem, or make room"
        rows.append(Finding(f"space {room.whose}", verdict, f"{room.free_gb:,.0f} GB free", remedy))
    if room.free_files is not None:
        few = room.free_files < FEW_FILES
        verdict, remedy = ("doubtful", "python -m hpcjobs.clean old studies, or ask for more") if few else ("right", "")
        rows.append(Finding(f"files {room.whose}", verdict, f"{room.free_files:,} more", remedy))
    return rows


def _of_slurm(site: Site) -> list[Finding]:
    if site.slurm is None:
        remedy = "run this on a login node of the cluster"
        if site.silence:
            remedy += "; if this is one, export SLURM_CONF=... to its file, or ask the site whether Slurm is up"
        return [Finding("Slurm", "wrong", site.silence or "sbatch is not here, or does not answer", remedy)]
    version = tuple(int(part) for part in site.slurm.split(".")[:2])
    old = version < OLDEST_SLURM
    rows = [Finding("Slurm", "doubtful" if old else "right", site.slurm, "tested with 22.05 and newer" if old else "")]
    rows.append(
        Finding("accounting", "right", "sacct answers")
        if site.accounting
        else Finding("accounting", "wrong", "none", "submit needs sacct: ask for accounting_storage/slurmdbd")
    )
    rows.append(
        Finding("accounts", "right", ", ".join(site.accounts))
        if site.accounts
        else Finding(
            "accounts", "doubtful", "none of yours is known", "where jobs need one: account: ... in the profile"
        )
    )
    prolog = site.settings.get("Prolog", "(null)")
    flags = site.settings.get("PrologFlags", "(null)")
    if prolog not in ("(null)", "") and "Alloc" not in flags:
        rows.append(
            Finding("prolog", "doubtful", f"PrologFlags={flags}", "modes on several nodes need PrologFlags=Alloc")
        )
    if site.max_array is not None:
        rows.append(Finding("job arrays", "right", f"up to {site.max_array - 1} nodes in one array; more are split"))
    return rows


def _of_nodes(site: Site) -> list[Finding]:
    partition = site.best_partition()
    if site.slurm is None:
        return []
    if partition is None:
        return [Finding("Slurm partitions", "wrong", "none is up", "ask the site, or look again later")]
    rows = []
    if partition.gpus:
        kinds = ", ".join(partition.gpu_types) or "of unnamed type"
        found = f"{counted(partition.nodes, 'node')} of {counted(partition.gpus, 'GPU')} ({kinds}) in {partition.name}"
        rows.append(Finding("GPUs", "right", found))
    else:
        rows.append(Finding("GPUs", "doubtful", "Slurm counts none", "workers will run on CPUs; is GresTypes=gpu set?"))
    if partition.vendor == "amd":
        rows.append(
            Finding("partition modes", "right", f"jobs can ask for {', '.join(partition.modes)}")
            if partition.modes
            else Finding("partition modes", "right", "jobs cannot choose; the mode that a node has is used")
        )
    return rows


def _of_rocm(site: Site) -> list[Finding]:
    """The release of ROCm, if this machine has one, and that of ``amdsmi``, which must be the same."""
    partition = site.best_partition()
    if partition is None or partition.vendor != "amd":
        return []
    here = site.rocm or "not on this machine"
    pinned = "amdsmi==" + ".".join(site.rocm.split(".")[:2]) + ".*" if site.rocm else "amdsmi==RELEASE.*"
    found = f"{here}; the package amdsmi is {site.amdsmi or 'not installed'}"
    fits = site.amdsmi is not None and (site.rocm is None or site.amdsmi.split(".")[:2] == site.rocm.split(".")[:2])
    remedy = "" if fits else f"pip install '{pinned}' (that of the nodes' ROCm; workers find their GPUs with it)"
    return [Finding("ROCm", "right" if fits else "doubtful", found, remedy)]


def _of_software(site: Site) -> list[Finding]:
    rows = [Finding("Python", "right", site.python)]
    rows += _of_rocm(site)
    if site.torch is None:
        remedy = "load the site's module, or name a container; the compute nodes need it, this node does not"
        rows.append(Finding("PyTorch", "doubtful", "this Python has none", remedy))
    else:
        partition = site.best_partition()
        wanted = {"amd": "rocm", "nvidia": "cu"}.get(partition.vendor if partition else "none", "")
        fits = wanted in site.torch
        remedy = "" if fits else f"a build for {'ROCm' if wanted == 'rocm' else 'CUDA'} is needed where trials run"
        rows.append(Finding("PyTorch", "right" if fits else "doubtful", site.torch, remedy))
    rows.append(
        Finding("modules", "right", f"{len(site.gpu_modules)} of interest" if site.modules else "no module command")
    )
    rows.append(Finding("containers", "right", site.container or "no Apptainer, no Singularity"))
    return rows
