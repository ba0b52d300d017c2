"""AutoSpeed's objective, beginning with given weights instead of new ones: so few updates show something.

The weights are ``first.pt`` in the folder of the prepared data. A trial begins with them as it goes on from a
checkpoint, one of no epoch; all else is :mod:`autospeed_model.objective`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autospeed_model import objective
from autospeed_model.accelerator import prepare_process
from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import from_flat_mapping
from autospeed_model.objective import Context

FIRST_WEIGHTS = "first.pt"
# Algorithms that cuDNN tries for a convolution, by its own guess the fastest first. A process that lives for a minute
# cannot try all of them.
CUDNN_TRIES = 4


def train_trial(params: Mapping[str, Any], context: Context) -> float:
    """As :func:`autospeed_model.objective.train_trial`, from the first weights."""
    _begin(params, context, "train")
    return objective.train_trial(params, context)


def train_final(params: Mapping[str, Any], context: Context) -> float:
    """As :func:`autospeed_model.objective.train_final`, from the first weights."""
    _begin(params, context, "train", "tune_val")
    return objective.train_final(params, context)


def try_few_algorithms() -> None:
    import torch

    torch.backends.cudnn.benchmark_limit = CUDNN_TRIES


def _begin(params: Mapping[str, Any], context: Context, *splits: str) -> None:
    """Leave a checkpoint of no epoch, unless the trial goes on from a later one."""
    prepare_process()
    try_few_algorithms()
    if context.checkpoint.exists():
        return
    from autospeed_model.joined import join
    from autospeed_model.packed import PackedDataset
    from autospeed_model.runtime import Runtime
    from autospeed_model.trainer import Trainer

    weights = Path(context.data or ".") / FIRST_WEIGHTS
    if context.data is None or not weights.is_file():
        raise UserError(f"{weights}: no first weights; copy best.pt of a training on other data there")
    hyperparameters, options, runtime = from_flat_mapping({**params, "epochs": context.epochs}, "trial")
    data = PackedDataset(context.data)
    where = Runtime.of(runtime, context.device)
    trainer = Trainer(join([data.split(name) for name in splits]), None, hyperparameters, options, where)
    trainer.start_from(weights)
    trainer.save(context.checkpoint)
    del trainer
    gc.collect()  # it is a circle, and holds memory of the device


vars(train_trial).update(vars(objective.train_trial))
vars(train_final).update(vars(objective.train_final))
train_trial.final = "benchmarks.first_weights:train_final"  # type: ignore[attr-defined]
