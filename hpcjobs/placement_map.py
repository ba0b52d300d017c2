"""The map of a node: which worker is on which logical GPU and which CPUs. The agent writes it, status draws it."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hpcjobs.cores import allowed_cpus, format_cpu_list
from hpcjobs.devices import Place
from hpcjobs.logical_gpu import LogicalGpu
from hpcjobs.owners import node_name
from hpcjobs.paths import write_atomically
from hpcjobs.text import counted

CPUS_PER_LINE = 64
# a worker's character on the CPUs: all of 64 workers differ
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"
_COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "bright_green", "bright_cyan", "bright_yellow")


def write_map(path: Path, mode: str | None, gpus: Sequence[LogicalGpu], places: Sequence[Place]) -> None:
    """What the node's agent found and decided, once per start."""
    devices = {f"GPU {gpu.index}": gpu for gpu in gpus}
    workers = [
        {"worker": worker, "device": place.device, "cores": list(place.cores)} for worker, place in enumerate(places)
    ]
    gpu_rows = {name: {**dataclasses.asdict(gpu), "identity": gpu.identity} for name, gpu in devices.items()}
    numa = {str(cpu.number): cpu.numa_node for cpu in allowed_cpus()}
    data = {"node": node_name(), "mode": mode, "gpus": gpu_rows, "workers": workers, "numa_of_cpu": numa}
    write_atomically(path, json.dumps(data))


def read_map(path: Path) -> dict[str, Any] | None:
    """None for an element whose agent has not looked yet."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return found


def draw(placement: Mapping[str, Any], states: Mapping[int, tuple[str, str]]) -> Group:
    """The map as a picture: a row for each physical GPU, a cell for each of its parts; the CPUs by NUMA node; and the
    CPUs of each worker. The workers' CPUs have a list of their own, since eight of them do not fit into a line.

    Args:
        states: a worker's character and colour, by its number.
    """
    gpus, workers = placement["gpus"], placement["workers"]
    title = f"{placement['node']}: {counted(len(gpus), 'logical GPU')}, {counted(len(workers), 'worker')}"
    title += f", partition mode {placement['mode']}" if placement["mode"] else ""
    parts: list[Any] = [Text(title, style="bold")]
    if gpus:
        parts.append(_device_table(gpus, workers, states))
    parts.append(_cpus(workers, placement["numa_of_cpu"]))
    parts.append(Columns([_worker(worker, states) for worker in workers], padding=(0, 2), column_first=True))
    return Group(*parts, Text())


def _device_table(
    gpus: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], states: Mapping[int, tuple[str, str]]
) -> Table:
    on_device = defaultdict(list)
    for worker in workers:
        on_device[worker["device"]].append(worker)
    rows: dict[int, dict[int, tuple[str, Any]]] = defaultdict(dict)
    for name, gpu in gpus.items():
        rows[gpu["gpu"]][gpu["partition_id"]] = (name, gpu)
    width = max(max(parts) for parts in rows.values()) + 1
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("GPU", "NUMA", *(f"part {part}" for part in range(width))):
        table.add_column(column)
    for number, parts in sorted(rows.items()):
        numa = {gpu["numa_node"] for _, gpu in parts.values()} - {None}
        cells = [_device_cell(parts.get(part), on_device, states) for part in range(width)]
        table.add_row(str(number), ",".join(map(str, sorted(numa))) or "?", *cells)
    return table


def _device_cell(
    found: tuple[str, Any] | None, on_device: Mapping[str, Any], states: Mapping[int, tuple[str, str]]
) -> Text:
    if found is None:
        return Text("missing", style="red")
    held = on_device.get(found[0], [])
    if not held:
        return Text("free", style="dim")
    return Text(" ").join(_mark(worker, states) for worker in held)


def _mark(worker: Mapping[str, Any], states: Mapping[int, tuple[str, str]]) -> Text:
    mark, colour = states.get(worker["worker"], ("?", "red"))
    return Text(f"{mark}{worker['worker']:<2}", style=colour)


def _worker(worker: Mapping[str, Any], states: Mapping[int, tuple[str, str]]) -> Text:
    letter = Text(_letter(worker["worker"]), style=_colour(worker["worker"]))
    cpus = Text(format_cpu_list(worker["cores"]) or "any CPU", style="dim")
    return Text(" ").join([_mark(worker, states), letter, cpus])


def _letter(worker: int) -> str:
    return _LETTERS[worker % len(_LETTERS)]


def _colour(worker: int) -> str:
    return _COLOURS[worker % len(_COLOURS)]


def _cpus(workers: Sequence[Mapping[str, Any]], numa_of_cpu: Mapping[str, int | None]) -> Text:
    """One character a CPU: those with the same one belong to one worker, ``.`` to none, ``*`` to several."""
    holders = defaultdict(list)
    for worker in workers:
        for core in worker["cores"]:
            holders[core].append(worker["worker"])
    by_node: dict[Any, list[int]] = defaultdict(list)
    for number, node in numa_of_cpu.items():
        by_node[node].append(int(number))
    text = Text("CPUs (one letter per worker, as listed below; . free, * shared)\n", style="dim")
    for node, cpus in sorted(by_node.items(), key=lambda item: (item[0] is None, item[0])):
        for first in range(0, len(cpus), CPUS_PER_LINE):
            line = sorted(cpus)[first : first + CPUS_PER_LINE]
            text.append(f"NUMA {'?' if node is None else node}  {line[0]:>4} ", style="dim")
            for cpu in line:
                held = holders.get(cpu, [])
                letter = "." if not held else "*" if len(held) > 1 else _letter(held[0])
                text.append(letter, style=_colour(held[0]) if held else "dim")
            text.append("\n")
    return text
