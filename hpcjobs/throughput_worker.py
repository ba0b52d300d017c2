"""Measures on one logical GPU: one cell after the other, together with the other workers of its node."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcjobs.errors import UserError, run_entry
from hpcjobs.failures import EXIT_UNUSABLE, FailureClass, classify
from hpcjobs.owners import process_gone
from hpcjobs.paths import write_atomically
from hpcjobs.placement import PlacementError, check_place, load_objective, take_place
from hpcjobs.spec import NODE_FOLDER, WorkerSpec, spec_file
from hpcjobs.throughput_plan import Cell, ThroughputFile, read_file
from hpcjobs.throughput_protocol import Measurement, Protocol
from hpcjobs.throughput_table import END_TO_END

log = logging.getLogger("hpcjobs.throughput")

Measure = Callable[[Measurement], dict[str, Any]]


def work(spec: WorkerSpec, file: ThroughputFile, protocol: Protocol) -> int:
    """Take the place that ``spec`` names, prove it, measure all cells; returns the exit code."""
    try:
        take_place(spec)
        measure = load_objective(file.measure, file.working_folder)
        check_place(spec, protocol.folder)
    except (PlacementError, ImportError, UserError) as error:
        log.error("%s", error)
        write_atomically(protocol.problem_file(spec.worker), json.dumps({"message": str(error)}), durable=False)
        return EXIT_UNUSABLE
    protocol.up_file(spec.worker).touch()
    for index, cell in enumerate(file.cells):
        if protocol.result(index, spec.worker) is None:
            action = protocol.wait_for_order(index, lambda: _node_lives(spec))
            result = _measured(spec, file, protocol, index, cell, measure) if action == "measure" else {}
            protocol.write_result(index, spec.worker, {"status": "skipped", **result})
    return 0


def _node_lives(spec: WorkerSpec) -> bool:
    return not process_gone(spec.agent_pid, spec.agent_start)


def _measured(
    spec: WorkerSpec, file: ThroughputFile, protocol: Protocol, index: int, cell: Cell, measure: Measure
) -> dict[str, Any]:
    """The result of one cell, whatever happens in it: memory that runs out is one too."""
    context = Measurement(
        batch_size=cell.batch_size,
        precision=cell.precision,
        settings=dict(file.settings),
        data=file.data,
        device="cuda:0" if spec.has_gpu else "cpu",
        window_s=file.window_s,
        open_window=lambda window: protocol.wait_for_start(index, window, spec.worker, lambda: _node_lives(spec)),
    )
    begun = time.monotonic()
    result: dict[str, Any] = {"worker": spec.worker, "device": spec.device}
    try:
        figures = _checked(measure(context), file.measure)
        windows = {name: window.as_dict() for name, window in context.windows.items()}
        if END_TO_END not in windows:
            raise UserError(
                f"{file.measure}: found {', '.join(windows) or 'no window'}; allowed: a window named {END_TO_END!r}, "
                "as context.window opens it, and others beside it"
            )
        result |= {"status": "ok", "windows": windows, "figures": figures}
    except Exception as error:  # noqa: BLE001  # whatever a measuring function raises is this cell's failure
        failure = classify(error)
        status = "oom" if failure.kind == FailureClass.GPU_MEMORY else "failed"
        result |= {"status": status, "message": failure.message}
        (log.info if status == "oom" else log.error)("%s: %s\n%s", cell.name, failure.message, failure.details)
    result |= {"seconds": round(time.monotonic() - begun, 2), "host_memory_gb": _host_memory_gb()}
    log.info("%s: %s after %.1f s", cell.name, result["status"], result["seconds"])
    # the traceback of a failure holds on to its tensors
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return result


def _checked(figures: Any, measure: str) -> dict[str, Any]:
    """What a measuring function returned, which has to go into a file.

    Raises:
        UserError: it is no mapping, or holds what JSON cannot.
    """
    if not isinstance(figures, dict):
        raise UserError(f"{measure}: found {type(figures).__name__} returned; allowed: a dict of further figures")
    try:
        json.dumps(figures)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{measure}: found figures that no JSON can hold ({error}); allowed: numbers and text"
        ) from None
    return figures


def _host_memory_gb() -> float | None:
    """Memory of this process in GiB; pages that it shares with others count in part."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((round(int(line.split()[1]) / 2**20, 3) for line in lines if line.startswith("Pss:")), None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.throughput_worker", description="Started by the node agent of an experiment only."
    )
    parser.add_argument("folder", type=Path, help="the experiment's folder")
    parser.add_argument("--worker", type=int, required=True, help="number of the worker on its node, from 0")
    options = parser.parse_args(arguments)
    if NODE_FOLDER not in os.environ:
        raise UserError("a worker is started by its node agent: run python -m hpcjobs.throughput instead")
    node_folder = Path(os.environ[NODE_FOLDER])
    spec = WorkerSpec.read(spec_file(node_folder, options.worker))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.info("worker %d of %s, process %d, device %s", spec.worker, spec.element, os.getpid(), spec.device or "cpu")
    return work(spec, read_file(options.folder), Protocol(node_folder))


if __name__ == "__main__":
    sys.exit(run_entry(main))
