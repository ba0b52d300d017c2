"""A light objective whose result proves that its state was never broken, and a diary independent of the journal.

Each step draws its learning rate from a schedule and advances a chain of hashes with it. The value reported after an
epoch follows from the chain, so a lost, doubled or reordered step, a schedule that began anew or a checkpoint of
another trial gives another value. ``expected`` computes the undisturbed run.

The diary (one file per process, synced line by line, outside the study folder) holds what the journal has acknowledged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 5  # of an epoch
DIARY = "CHAOS_DIARY"


class Schedule:
    """Linear warm-up over a tenth of the steps, then a cosine: its state is the step that it has reached."""

    def __init__(self, base: float, steps: int, step: int = 0) -> None:
        self._base, self._steps, self.step = base, steps, step

    def next(self) -> float:
        """The learning rate of this step; goes on to the next."""
        warm_up = max(1, self._steps // 10)
        rate = 0.5 * self._base * (1 + math.cos(math.pi * self.step / self._steps))
        rate *= min(1.0, (self.step + 1) / warm_up)
        self.step += 1
        return rate


def advance(state: str, rate: float) -> str:
    return hashlib.sha256(f"{state} {rate!r}".encode()).hexdigest()[:16]


def value_of(state: str, x: float) -> float:
    return (x - 0.7) ** 2 + int(state[:8], 16) / 2**32 / 100


def ending(x: float) -> str:
    """How a trial ends, from its parameter: a tenth is pruned, a twentieth fails by its own fault."""
    return "pruned" if x < 0.1 else "failed" if x < 0.15 else "complete"


def expected(params: dict[str, Any], epochs: int) -> tuple[list[float], list[float]]:
    """Learning rates of all steps and values of all epochs of an undisturbed run."""
    schedule, state = Schedule(params["base"], epochs * STEPS), f"{params['x']!r}"
    rates, values = [], []
    for _ in range(epochs):
        for _ in range(STEPS):
            rates.append(schedule.next())
            state = advance(state, rates[-1])
        values.append(value_of(state, params["x"]))
    return rates, values


def write_down(what: str, **more: Any) -> None:
    """One line of the diary, on the disk when this returns."""
    line = {"what": what, "t": time.monotonic(), "pid": os.getpid(), "host": socket.gethostname(), **more}
    file = _diary()
    os.write(file, json.dumps(line).encode() + b"\n")
    os.fsync(file)


@functools.cache
def _diary() -> int:
    path = Path(os.environ[DIARY], f"{os.getpid()}-{time.monotonic_ns()}.jsonl")
    return os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)


def _write_down_acknowledgements() -> None:
    """Put a line into the diary each time that the worker's ``finish`` has returned."""
    worker = sys.modules["__main__"]
    finish = getattr(worker, "finish", None)
    if finish is None:
        return

    def finish_and_write_down(study: Any, trial_id: int, token: str, state: Any, **more: Any) -> Any:
        trial = finish(study, trial_id, token, state, **more)
        write_down("finished", number=trial.number, state=state.name, value=more.get("value"))
        return trial

    worker.finish = finish_and_write_down  # type: ignore[attr-defined]


_write_down_acknowledgements()


def train(params: dict[str, Any], context: Any) -> float:
    """Goes on from the checkpoint, which it also writes in the middle of an epoch when it is told to stop."""
    steps = context.epochs * STEPS
    saved = json.loads(context.checkpoint.read_text()) if context.checkpoint.exists() else None
    state, rates = (saved["state"], saved["rates"]) if saved else (f"{params['x']!r}", [])
    schedule = Schedule(params["base"], steps, saved["step"] if saved else 0)
    clock = time.time() - time.monotonic()
    write_down("begin", number=context.number, step=schedule.step, clock=clock, job=os.environ.get("SLURM_JOB_ID"))
    if schedule.step and schedule.step % STEPS == 0:  # the run before may have died between checkpoint and report
        _report(context, schedule.step // STEPS, value_of(state, params["x"]))
        _end_early(params["x"], schedule.step // STEPS)
    while schedule.step < steps:
        if context.stop_requested:
            _save(context.checkpoint, schedule.step, state, rates)
            write_down("stopped", number=context.number, step=schedule.step)
            context.hand_back()
        time.sleep(params["step_s"])
        rate = schedule.next()
        rates.append(rate)
        state = advance(state, rate)
        epoch, rest = divmod(schedule.step, STEPS)
        if rest == 0:
            _save(context.checkpoint, schedule.step, state, rates)
            _report(context, epoch, value_of(state, params["x"]))
            _end_early(params["x"], epoch)
    return value_of(state, params["x"])


def _report(context: Any, epoch: int, value: float) -> None:
    try:
        context.report(epoch, value)
    except BaseException as stop:
        write_down("stopped", number=context.number, epoch=epoch, why=type(stop).__name__)
        raise
    write_down("reported", number=context.number, epoch=epoch, value=value)


def _end_early(x: float, epoch: int) -> None:
    if epoch != 2 or ending(x) == "complete":
        return
    if ending(x) == "failed":
        raise ValueError("this x fails by its own fault")
    import optuna

    raise optuna.TrialPruned


def _save(path: Path, step: int, state: str, rates: list[float]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"step": step, "state": state, "rates": rates}))
    partial.replace(path)


train.parameters = {  # type: ignore[attr-defined]
    "x": {"type": "float", "min": 0.0, "max": 1.0},
    "base": {"type": "float", "min": 0.0},
    "step_s": {"type": "float", "min": 0.0},
}
