"""A training as a trial of a study: it saves, reports, and stops when the worker must."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import Hyperparameters, RuntimeOptions, TrainingOptions
from autospeed_model.objective import Context
from autospeed_model.packed import PackedDataset
from autospeed_model.runtime import Runtime
from autospeed_model.trainer import Callback, Record, Trainer

log = logging.getLogger("autospeed_model")

CHECKPOINT_S = 300.0  # at most so much work is lost with a node
FIGURES = ("precision", "recall", "map50", "images_per_s")


def run_trial(
    hyperparameters: Hyperparameters, options: TrainingOptions, runtime: RuntimeOptions, folder: Path, context: Context
) -> float:
    """Train, or go on training, on the dataset in ``folder``; returns the last epoch's mAP."""
    data = PackedDataset(folder)
    where = Runtime.of(runtime, context.device)

    def begin() -> Trainer:
        return Trainer(data.split("train"), data.split("tune_val"), hyperparameters, options, where)

    trainer = begin_or_go_on(begin, context.checkpoint)
    if trainer.history:
        # The run before may have ended between saving and reporting.
        _report(context, trainer.history[-1])
    if not trainer.finished:
        trainer.fit(TrialCallback(context))
    return trainer.history[-1]["map"]


def begin_or_go_on(begin: Callable[[], Trainer], path: Path) -> Trainer:
    """The trainer as it was saved at ``path``, or a new one: a trial is worth more than its checkpoint.

    What cannot be gone on from (damaged, of another trial, another dataset or an older version) is told in the log,
    and the next save replaces it.
    """
    trainer = begin()
    if not path.exists():
        return trainer
    try:
        trainer.restore(path)
        return trainer
    except UserError as error:
        log.warning("the training begins anew: %s", error)
    del trainer  # half restored, and there is memory for one only
    return begin()


class TrialCallback(Callback):
    """Saves after every epoch and every :data:`CHECKPOINT_S`, reports epochs, hands back when a stop is requested."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.saved = time.monotonic()

    def on_update(self, trainer: Trainer) -> None:
        if self.context.stop_requested:
            trainer.save(self.context.checkpoint)
            self.context.hand_back()
        if time.monotonic() - self.saved >= CHECKPOINT_S:
            self._save(trainer)

    def on_validation_batch(self, trainer: Trainer) -> None:
        self.on_update(trainer)

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        self._save(trainer)
        _report(self.context, record)

    def _save(self, trainer: Trainer) -> None:
        trainer.save(self.context.checkpoint)
        self.saved = time.monotonic()


def _report(context: Context, record: Record) -> None:
    context.report(int(record["epoch"]), record["map"], **{name: record[name] for name in FIGURES})
