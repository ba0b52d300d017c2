"""What one worker of a throughput experiment measures: real training, with one batch size in one precision."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from autospeed_model.accelerator import prepare_process
from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import from_flat_mapping
from autospeed_model.metrics import Figures
from autospeed_model.packed import PackedDataset
from autospeed_model.runtime import Runtime
from autospeed_model.trainer import Callback, Trainer

OBJECTIVE = "autospeed_model.objective:train_trial"
# Updates before a window: kernels are compiled and chosen, graphs of both halves of a step captured.
WARM_UP_UPDATES = 6
# The host runs ahead of the device by at most this share of a window, so that windows end together.
RUN_AHEAD = 0.02


class Window(Protocol):
    """A stretch of time that all workers of a node have in common."""

    @property
    def over(self) -> bool: ...

    def add(self, images: int) -> None: ...

    def close(self) -> None: ...


class Context(Protocol):
    """What an experiment gives to a measuring function. ``window`` waits for the other workers."""

    batch_size: int
    precision: str
    settings: Mapping[str, Any]
    data: Path | None
    device: str
    window_s: float

    def window(self, name: str) -> Window: ...


class _OverError(Exception):
    """Ends :meth:`Trainer.train_epoch` between two updates; the trainer can go on."""


class _Clock(Callback):
    """Counts images into a window and ends the training with it."""

    def __init__(self, trainer: Trainer, window: Window, run_ahead_s: float, step_s: float) -> None:
        self._window = window
        self._updates_ahead = max(1, round(run_ahead_s / max(step_s * trainer.accumulated, 1e-6)))
        self._updates = 0
        self._seen = _steps(trainer)

    def on_update(self, trainer: Trainer) -> None:
        self._window.add((_steps(trainer) - self._seen) * trainer.batch_size)
        self._seen = _steps(trainer)
        self._updates += 1
        if self._updates % self._updates_ahead == 0:
            trainer.runtime.wait()
        if self._window.over:
            raise _OverError


class _Updates(Callback):
    """Ends the training after so many updates."""

    def __init__(self, updates: int) -> None:
        self._left = updates

    def on_update(self, trainer: Trainer) -> None:
        self._left -= 1
        if self._left == 0:
            raise _OverError


def _steps(trainer: Trainer) -> int:
    return trainer.epoch * trainer.steps_per_epoch + trainer.step


def measure(context: Context) -> dict[str, Any]:
    """Two windows: ``end_to_end``, training with everything that feeds it but without evaluation, and ``compute_only``,
    the same steps on one batch that stays on the device.

    :raises UserError: without a dataset, or with fewer images than a batch.
    :raises torch.OutOfMemoryError: when the batch does not fit.
    """
    prepare_process()
    trainer = _trainer(context)
    runtime = trainer.runtime
    if runtime.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        _train(trainer, _Updates(WARM_UP_UPDATES))
        runtime.wait()
        step_s = _step_seconds(trainer)
        run_ahead_s = RUN_AHEAD * context.window_s
        window = context.window("end_to_end")
        _train(trainer, _Clock(trainer, window, run_ahead_s, step_s))
        runtime.wait()
        window.close()
        _compute_only(trainer, context, max(1, round(run_ahead_s / step_s)))
        gpu_memory = torch.cuda.max_memory_reserved() / 2**30 if runtime.on_gpu else None
    finally:
        # Every batch size is compiled anew, and PyTorch gives up on a function after a few shapes.
        torch.compiler.reset()
    return {
        "objective": OBJECTIVE,
        "runtime": str(runtime),
        "images": len(trainer.batches.split),
        "step_s": round(step_s, 6),
        "memory_gb": None if gpu_memory is None else round(gpu_memory, 3),
    }


def _trainer(context: Context) -> Trainer:
    if context.data is None:
        raise UserError("training needs a dataset: give --data a folder made by autospeed_model.prepare")
    values = {**context.settings, "batch_size": context.batch_size, "precision": context.precision, "epochs": 100_000}
    hyperparameters, options, runtime = from_flat_mapping(values, "throughput")
    data = PackedDataset(context.data)
    train = data.split("train")
    if len(train) < context.batch_size:
        raise UserError(
            f"{context.data}: {len(train)} images to train on, fewer than a batch of {context.batch_size}; render or "
            "prepare more"
        )
    return Trainer(train, data.split("tune_val"), hyperparameters, options, Runtime.of(runtime, context.device))


def _train(trainer: Trainer, end: Callback) -> None:
    """Epoch after epoch, without evaluation, until ``end`` ends it."""
    with contextlib.suppress(_OverError):
        while True:
            trainer.train_epoch(end)
            trainer.finish_epoch(Figures())


def _step_seconds(trainer: Trainer) -> float:
    """Mean seconds of a step when the host keeps up."""
    before, started = _steps(trainer), time.monotonic()
    _train(trainer, _Updates(2))
    trainer.runtime.wait()
    return (time.monotonic() - started) / (_steps(trainer) - before)


def _compute_only(trainer: Trainer, context: Context, steps_ahead: int) -> None:
    batches = trainer.batches.of_epoch(0)
    _, batch = next(batches)
    batches.close()  # type: ignore[attr-defined]
    window = context.window("compute_only")
    step = 0
    while not window.over:
        trainer.training_step.accumulate(*batch)
        step += 1
        if step % trainer.accumulated == 0:
            trainer.training_step.update(1e-6)
        if step % steps_ahead == 0:
            trainer.runtime.wait()
        window.add(trainer.batch_size)
    trainer.runtime.wait()
    window.close()
