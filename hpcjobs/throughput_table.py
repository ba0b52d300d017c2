"""What an experiment found, as one value: read from its cells, kept as JSON for ``--mode auto``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcjobs.config import PartitionMode
from hpcjobs.errors import UserError
from hpcjobs.load import find_cluster
from hpcjobs.throughput_plan import Setup, ThroughputFile, ThroughputPaths

Status = Literal["ok", "oom", "failed", "not tried"]
END_TO_END, COMPUTE_ONLY = "end_to_end", "compute_only"


@dataclass(frozen=True)
class Row:
    """One cell in one set-up. Speeds are images/s summed over the workers of a node.

    Attributes:
        spread: standard deviation over mean of the workers' end-to-end speeds.
        memory_gb: of the device, the most that one worker held; ``host_memory_gb`` likewise of the host.
        cores_busy: CPU seconds a second of all workers in the end-to-end window.
        host_limit: what the host lacked in that window, with figures.
    """

    mode: PartitionMode | None
    per_gpu: int
    batch_size: int
    precision: str
    status: Status
    workers: int
    gpus: int
    end_to_end: float | None = None
    compute_only: float | None = None
    spread: float | None = None
    memory_gb: float | None = None
    host_memory_gb: float | None = None
    cores_busy: float | None = None
    device_busy: float | None = None
    host_limit: str | None = None
    message: str = ""

    @property
    def setup(self) -> Setup:
        return Setup(self.mode, self.per_gpu)

    def speed(self, window: str) -> float | None:
        return self.end_to_end if window == END_TO_END else self.compute_only


@dataclass(frozen=True)
class ThroughputTable:
    """All rows of an experiment, and what they are true of.

    Attributes:
        cluster: the profile's name, or None for one machine.
        objective: whose trainings were measured, as the measuring function says; empty if it does not.
        settings: what was the same in all cells.
        node: facts of the nodes, such as the GPU's name, cores, MPS.
    """

    name: str
    cluster: str | None
    measure: str
    objective: str
    settings: dict[str, Any]
    node: dict[str, Any]
    window_s: float
    rows: tuple[Row, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> ThroughputTable:
        """Raises UserError: there is no such file, or it is no table."""
        try:
            data = json.loads(path.read_bytes())
            return cls(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})
        except FileNotFoundError:
            raise UserError(
                f"{path}: no such file; allowed: results/throughput.json of python -m hpcjobs.throughput"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: found no table of an experiment ({error}); allowed: results/throughput.json of "
                "python -m hpcjobs.throughput, of this version"
            ) from None

    @property
    def setups(self) -> list[Setup]:
        """From the coarsest to the finest."""
        known = {row.setup: row.workers for row in self.rows}
        return sorted(known, key=lambda setup: (known[setup], setup.per_gpu))

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({row.batch_size for row in self.rows})

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(row.precision for row in self.rows))

    def row(self, setup: Setup, batch_size: int, precision: str) -> Row | None:
        wanted = (setup, batch_size, precision)
        return next((row for row in self.rows if (row.setup, row.batch_size, row.precision) == wanted), None)

    def best(self, setup: Setup, batch_size: int, window: str = END_TO_END) -> Row | None:
        """The precision that is fastest in a cell of the printed tables; a row without a speed if none has one."""
        found = [row for p in self.precisions if (row := self.row(setup, batch_size, p)) is not None]
        return max(found, key=lambda row: row.speed(window) or 0.0, default=None)


def beside_profile(name: str) -> Path:
    """Where the table of a cluster is looked for: ``NAME.throughput.json`` beside its profile ``NAME.yaml``."""
    profile = find_cluster(name)
    return profile.with_name(f"{profile.stem}.throughput.json")


def gather(paths: ThroughputPaths, file: ThroughputFile) -> ThroughputTable:
    """The cells that are done so far."""
    rows, facts, objective = [], {}, ""
    for setup in (setup for mode in file.jobs for setup in file.setups(mode)):
        for cell in file.cells:
            path = paths.cell(setup, cell)
            if path.exists():
                data, row = _read_cell(path)
                rows.append(row)
                facts = {key: data[key] for key in ("gpu", "gpu_memory_gb", "cores")}
                facts["mps"] = data["mps"] or facts.get("mps", False)
                objective = next(
                    (o for r in data["results"] if (o := r.get("figures", {}).get("objective"))), objective
                )
    found = {str(mode or "as-is"): paths.problem(mode) for mode in file.jobs}
    return ThroughputTable(
        name=file.name,
        cluster=file.cluster.name if file.cluster else None,
        measure=file.measure,
        objective=objective,
        settings=dict(file.settings),
        node=facts,
        window_s=file.window_s,
        rows=tuple(rows),
        problems={mode: path.read_text() for mode, path in found.items() if path.exists()},
    )


def _read_cell(path: Path) -> tuple[dict[str, Any], Row]:
    """Raises UserError: the file was damaged."""
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        return data, make_row(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: found no measurement of a cell ({type(error).__name__}: {error}); allowed: what a job wrote "
            "there; remove the file, and --resume measures the cell again"
        ) from None


def make_row(data: Mapping[str, Any]) -> Row:
    """One cell's file as a row: speeds are summed only if every worker of the node has measured."""
    results: list[dict[str, Any]] = data["results"]
    messages = [result["message"] for result in results if result.get("message")]
    row: dict[str, Any] = {
        **data["setup"],
        **data["cell"],
        "status": data["status"],
        "workers": data["workers"],
        "gpus": data["gpus"],
        "memory_gb": _most(result.get("figures", {}).get("memory_gb") for result in results),
        "host_memory_gb": _most(result.get("host_memory_gb") for result in results),
        "message": messages[0] if messages else "",
    }
    if data["status"] == "ok":
        for window in (END_TO_END, COMPUTE_ONLY):
            speeds = [result["windows"][window]["images_per_s"] for result in results if window in result["windows"]]
            row[window] = round(sum(speeds), 2) if len(speeds) == len(results) else None
        speeds = [result["windows"][END_TO_END]["images_per_s"] for result in results]
        mean = statistics.fmean(speeds)
        row["spread"] = round(statistics.pstdev(speeds) / mean, 4) if mean else None
        used = [result["windows"][END_TO_END] for result in results]
        row["cores_busy"] = round(sum(window["cpu_s"] / window["seconds"] for window in used), 2)
        index = list(results[0]["windows"]).index(END_TO_END)
        pressure = data["pressure"].get(str(index), {})
        row["device_busy"], row["host_limit"] = pressure.get("device_busy"), pressure.get("limit")
    return Row(**row)


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
