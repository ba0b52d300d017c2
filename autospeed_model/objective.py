"""The objective of a study: one training with a trial's parameters. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from autospeed_model.accelerator import DECLARED, prepare_process
from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import PARAMETERS, from_flat_mapping


class Context(Protocol):
    """What a trial gives to its objective."""

    checkpoint: Path
    data: Path | None
    epochs: int
    device: str

    @property
    def stop_requested(self) -> bool: ...

    def hand_back(self) -> None: ...

    def report(self, epoch: int, value: float, **figures: float) -> None: ...


def train_trial(params: Mapping[str, Any], context: Context) -> float:
    """Train on the dataset's ``train`` split; returns the mAP on its ``tune_val`` split after the last epoch.

    Goes on from ``context.checkpoint`` if that exists. Reports every epoch, and hands the trial back after saving when
    the worker has to stop.

    :raises UserError: for a parameter that is unknown or out of range, or without a dataset.
    :raises DivergedError: when the loss is no longer finite.
    """
    if context.data is None:
        raise UserError("this objective needs a dataset: give --data a folder made by autospeed_model.prepare")
    parameters = from_flat_mapping({**params, "epochs": context.epochs}, "trial")

    prepare_process()
    from autospeed_model.trial import run_trial

    return run_trial(*parameters, context.data, context)


def train_final(params: Mapping[str, Any], context: Context) -> float:
    """Train on ``train`` and ``tune_val`` together, then test once on ``evaluation``; returns the mAP there.

    The study's own trials never see that split. Goes on and hands back like :func:`train_trial`; what it reports after
    every epoch but the last is the negative training loss.

    :raises UserError: for a parameter that is unknown or out of range, or without a dataset.
    :raises DivergedError: when the loss is no longer finite.
    """
    if context.data is None:
        raise UserError("this objective needs a dataset: give --data a folder made by autospeed_model.prepare")
    parameters = from_flat_mapping({**params, "epochs": context.epochs}, "final training")

    prepare_process()
    from autospeed_model.final import run_final

    return run_final(*parameters, context.data, context)


train_trial.parameters = PARAMETERS  # type: ignore[attr-defined]
train_trial.value_name = "mAP"  # type: ignore[attr-defined]
train_trial.needs_data = True  # type: ignore[attr-defined]
# One H200, size n at 512 x 1024 (docs/modes.md): 2.4, 5.0 and 15.4 GB at batch 8, 32 and 128. That is what PyTorch had
# reserved, 0.6 GB of images among it, and 0.75 GB of CUDA's context, measured at batch 32.
train_trial.memory = {  # type: ignore[attr-defined]
    "settings": {"size": "n"},
    "device_fixed_gb": 1.6,
    "device_gb_per_image": 0.108,
}
train_trial.imports = ("torch",)  # type: ignore[attr-defined]
train_trial.environment = DECLARED  # type: ignore[attr-defined]
vars(train_final).update(vars(train_trial))
train_trial.final = "autospeed_model.objective:train_final"  # type: ignore[attr-defined]
