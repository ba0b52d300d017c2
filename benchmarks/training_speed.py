"""How fast one process trains: ``python benchmarks/training_speed.py --data OUT --json result.json``.

Compute-only: steps on a batch that is on the device already. End to end: whole epochs, data loading included, the first
left out. With ``--barrier`` several processes begin to measure together (see ``several_trainings.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before torch is imported: a worker's first step waits for that, too
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import hip_kernels  # noqa: E402
from autospeed_model.accelerator import prepare_process  # noqa: E402
from autospeed_model.errors import UserError, run_entry  # noqa: E402
from autospeed_model.hyperparameters import Hyperparameters, RuntimeOptions, TrainingOptions  # noqa: E402
from autospeed_model.metrics import Figures  # noqa: E402
from autospeed_model.packed import PackedDataset  # noqa: E402
from autospeed_model.runtime import add_runtime_arguments, runtime_from  # noqa: E402
from autospeed_model.trainer import Callback, Trainer  # noqa: E402

WARM_UP_STEPS = 8


def cpu_seconds() -> float:
    """Used by this process and its children: a step's cost on the host, whatever runs it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class FirstStep(Callback):
    """When the first update was done, and how much the host had worked for it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_update(self, trainer: Trainer) -> None:
        if not self.seconds:
            trainer.runtime.wait()
            self.seconds = time.monotonic() - STARTED


def run_epoch(trainer: Trainer, *callbacks: Callback) -> None:
    """One epoch without its evaluation."""
    trainer.train_epoch(*callbacks)
    trainer.finish_epoch(Figures())


def compute_only(trainer: Trainer, steps: int) -> float:
    """Images a second of forward, backward and update on one batch that stays on the device."""
    _, batch = next(trainer.batches.of_epoch(0))

    def run(steps: int) -> None:
        for step in range(steps):
            trainer.training_step.accumulate(*batch)
            if (step + 1) % trainer.accumulated == 0:
                trainer.training_step.update(1e-6)
        trainer.runtime.wait()

    run(WARM_UP_STEPS)
    started = time.monotonic()
    run(steps)
    return steps * trainer.batch_size / (time.monotonic() - started)


def evaluation_speed(trainer: Trainer, seconds: float) -> float:
    """Images a second of whole evaluations: forward pass, suppression and metrics."""
    for _ in range(3):
        trainer.evaluator.run()
    started, images = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        trainer.evaluator.run()
        images += len(trainer.evaluator.split)
    return images / max(time.monotonic() - started, 1e-9)


def wait_for_others(folder: Path, processes: int) -> None:
    """Return when so many processes have called this."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < processes:
        time.sleep(0.02)


def device_memory_gb(device: str) -> float:
    """What this process holds of the device, the driver's own share included where NVML tells it."""
    if not device.startswith("cuda"):
        return 0.0
    try:
        used = {entry.pid: entry.usedGpuMemory for entry in _nvml_processes()}
        if os.getpid() in used and used[os.getpid()]:
            return float(used[os.getpid()]) / 2**30
    except ImportError:
        pass
    return torch.cuda.memory_reserved() / 2**30


def _nvml_processes() -> list[Any]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    return list(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Train as the arguments say; all figures of one process."""
    imported = time.monotonic() - STARTED
    data = PackedDataset(given.data)
    runtime = runtime_from(given, RuntimeOptions())
    # A rate at which no training from new weights diverges: the speed does not depend on it.
    hyperparameters = Hyperparameters(batch_size=given.batch_size, max_lr=1e-3)
    options = TrainingOptions(epochs=10**5, size=given.size)
    trainer = Trainer(data.split("train"), data.split("tune_val"), hyperparameters, options, runtime)
    first = FirstStep()
    ready = time.monotonic() - STARTED
    result: dict[str, Any] = {
        "batch_size": trainer.batch_size,
        "images": len(trainer.batches.split),
        "runtime": str(runtime),
        "boxes": trainer.batches.length,
        "kernels": hip_kernels.is_built(runtime.kind),
        "import_s": imported,
        "start_to_trainer_s": ready,
    }
    run_epoch(trainer, first)  # warm-up: compiles, chooses algorithms, captures
    result["start_to_first_step_s"] = first.seconds
    trainer.evaluator.run()
    if given.barrier is not None:
        wait_for_others(given.barrier, given.processes)
    runtime.wait()
    started, used, images = time.monotonic(), cpu_seconds(), 0
    while time.monotonic() - started < given.seconds:
        run_epoch(trainer)
        images += trainer.steps_per_epoch * trainer.batch_size
    runtime.wait()
    seconds = time.monotonic() - started
    result["end_to_end"] = images / seconds
    result["host_ms_per_image"] = (cpu_seconds() - used) / images * 1e3
    result["compute_only"] = compute_only(trainer, given.steps)
    result["evaluation"] = evaluation_speed(trainer, given.seconds / 4)
    result["memory_gb"] = device_memory_gb(runtime.device)
    if runtime.on_gpu:
        result["allocated_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        result["reserved_gb"] = torch.cuda.memory_reserved() / 2**30
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/training_speed.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", default="n", help="size of the network (default n)")
    parser.add_argument("--seconds", type=float, default=10.0, help="end-to-end time to measure (default 10)")
    parser.add_argument("--steps", type=int, default=60, help="compute-only steps to measure (default 60)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--barrier", type=Path, help="folder in which processes wait for each other")
    parser.add_argument("--processes", type=int, default=1, help="how many wait at --barrier")
    add_runtime_arguments(parser)
    given = parser.parse_args(arguments)
    if given.seconds <= 0 or given.steps < 1:
        raise UserError(f"found --seconds {given.seconds:g} --steps {given.steps}; allowed are numbers above 0")
    prepare_process()
    text = json.dumps(measure(given), indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
