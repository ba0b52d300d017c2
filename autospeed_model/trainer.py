"""The training of one network: what ``train``, a study's objective and the benchmarks share.

Randomness is a function of (seed, epoch, step), so that these three numbers are the whole random state, and a training
that goes on from a checkpoint takes the very steps it would have taken.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from autospeed_model import checkpoint
from autospeed_model.batches import TrainingBatches
from autospeed_model.ema import WeightAverage
from autospeed_model.errors import DivergedError, UserError
from autospeed_model.evaluation import Evaluator
from autospeed_model.graphs import GraphPool
from autospeed_model.hyperparameters import Hyperparameters, TrainingOptions
from autospeed_model.loss import DetectionLoss
from autospeed_model.metrics import Figures
from autospeed_model.network import AutoSpeed
from autospeed_model.optimiser import accumulated_steps, make_optimiser, restore_momentum
from autospeed_model.packed import CLASSES, PackedSplit
from autospeed_model.runtime import Runtime
from autospeed_model.schedule import LinearSchedule, warmup_steps
from autospeed_model.step import TrainingStep

LOSSES = ("box_loss", "cls_loss", "dfl_loss")  # with their gains, as they are trained on
# Steps between two looks at the loss, each of which waits for the device.
CHECK_STEPS = 20

Record = dict[str, float]


class Callback:
    """What others do while a network trains. A method may end the training by raising."""

    def on_update(self, trainer: Trainer) -> None:
        """After every update of the weights; :meth:`Trainer.save` is exact here."""

    def on_validation_batch(self, trainer: Trainer) -> None:
        """Before every batch of the evaluation; :meth:`Trainer.save` is exact here."""

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        """After an epoch and its evaluation; ``record`` is the last of :attr:`Trainer.history`."""


class Trainer:
    """Trains ``network`` on ``train``; evaluates its averaged weights on ``validation``, if there is one, after every
    epoch."""

    def __init__(
        self,
        train: PackedSplit,
        validation: PackedSplit | None,
        hyperparameters: Hyperparameters,
        options: TrainingOptions,
        runtime: Runtime,
    ) -> None:
        """:raises UserError: when there is nothing to train on, or the images' size does not suit the network."""
        if runtime.on_gpu:
            # Shapes never change, so that trying the algorithms of each convolution once pays.
            torch.backends.cudnn.benchmark = True
        if not len(train):
            raise UserError(f"the split '{train.name}' has no image: nothing to train on")
        self.hyperparameters, self.options, self.runtime = hyperparameters, options, runtime
        # A dataset smaller than a batch makes the batch smaller, so that every step has the same shape.
        self.batch_size = min(hyperparameters.batch_size, len(train))
        self.network = _make_network(train.height, train.width, options, runtime)  # first: it chooses the GPU
        self.batches = TrainingBatches(train, hyperparameters, self.batch_size, options.seed, runtime)
        self.average = WeightAverage(self.network)
        self.loss = DetectionLoss(train.height, train.width, hyperparameters).to(runtime.device)
        self.optimiser = make_optimiser(self.network, hyperparameters, self.batch_size)
        pool = GraphPool(runtime.device) if runtime.graphs else None
        self.training_step = TrainingStep(
            self.network, self.loss, self.optimiser, self.average, runtime, pool, hyperparameters.clip_norm
        )
        self.evaluator = (
            None if validation is None else Evaluator(self.average.network, validation, self.batch_size, runtime, pool)
        )
        self.accumulated = accumulated_steps(hyperparameters, self.batch_size)
        self.schedule = LinearSchedule(
            hyperparameters.min_lr,
            hyperparameters.max_lr,
            warmup_steps(hyperparameters.warmup_epochs, self.steps_per_epoch),
            options.epochs * self.steps_per_epoch,
        )
        self.epoch = 0  # epochs that are finished, evaluation included
        self.step = 0  # steps of the current epoch that are finished
        self.seconds = 0.0  # spent in them
        self.history: list[Record] = []

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps_per_epoch

    @property
    def finished(self) -> bool:
        return self.epoch >= self.options.epochs

    def fit(self, *callbacks: Callback) -> Record:
        """Train what is left of the epochs; returns the last epoch's record.

        :raises DivergedError: when the loss is no longer finite.
        """
        while not self.finished:
            self.train_epoch(*callbacks)
            figures = self._evaluate(callbacks)
            self.finish_epoch(figures)
            for callback in callbacks:
                callback.on_epoch(self, self.history[-1])
        return self.history[-1]

    def train_epoch(self, *callbacks: Callback) -> None:
        """Take the steps that are left of the current epoch."""
        self.network.train()
        started = time.monotonic() - self.seconds
        for step, batch in self.batches.of_epoch(self.epoch, self.step):
            self.training_step.accumulate(*batch)
            done = step + 1
            if done % CHECK_STEPS == 0 or done == self.steps_per_epoch:
                self._check_finite(done)
            if done % self.accumulated and done < self.steps_per_epoch:
                continue
            self.training_step.update(self.schedule.at(self.epoch * self.steps_per_epoch + step))
            self.step, self.seconds = done, time.monotonic() - started
            for callback in callbacks:
                callback.on_update(self)

    def _check_finite(self, done: int) -> None:
        self.runtime.wait()
        sums = self.training_step.sums.tolist()
        if not all(abs(value) < float("inf") for value in sums):
            means = ", ".join(f"{name} {value / done:g}" for name, value in zip(LOSSES, sums, strict=True))
            raise DivergedError(f"epoch {self.epoch + 1}, step {done}: the loss is not finite ({means})")

    def _evaluate(self, callbacks: tuple[Callback, ...]) -> Figures | None:
        if self.evaluator is None:
            return None

        def on_batch() -> None:
            for callback in callbacks:
                callback.on_validation_batch(self)

        return self.evaluator.run(on_batch)

    def finish_epoch(self, figures: Figures | None) -> None:
        """Write down an epoch whose steps and evaluation, if any, are done, and begin the next one."""
        steps = self.steps_per_epoch
        self.epoch += 1
        plain = [value / steps for value in self.training_step.sums.tolist()]
        means = [value * gain for value, gain in zip(plain, self.loss.gains.tolist(), strict=True)]
        self.history.append(
            {
                "epoch": self.epoch,
                "lr": self.schedule.at(self.epoch * steps - 1),
                **dict(zip(LOSSES, means, strict=True)),
                "plain_loss": sum(plain),  # without the gains, which are among the parameters that a study compares
                **(figures.to_mapping() if figures is not None else {}),
                "images_per_s": steps * self.batch_size / max(self.seconds, 1e-9),
                "train_s": self.seconds,
            }
        )
        self.step, self.seconds = 0, 0.0
        self.training_step.sums.zero_()

    def save(self, path: Path) -> None:
        """Write everything a later :meth:`restore` needs. Call it from a callback: between updates nothing is pending.

        :raises DivergedError: instead of saving weights that are no numbers.
        """
        self._check_finite(max(self.step, 1))
        content = {
            "network": checkpoint.describe(self.network),
            "hyperparameters": self.hyperparameters.to_mapping(),
            "options": self.options.to_mapping(),
            "data": self._data,
            "weights": self.network.state_dict(),
            "average": self.average.network.state_dict(),
            "updates": self.average.updates,
            "momentum": self.optimiser.state_dict()["state"],
            "scaler": self.training_step.scaler.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "plain_sums": self.training_step.sums,
            "history": self.history,
        }
        checkpoint.save(path, checkpoint.TRAINING, content)

    def start_from(self, path: Path) -> None:
        """Take the first weights from a file of weights or a checkpoint.

        :raises UserError: when its network is of another shape.
        """
        network = checkpoint.load_network(path)
        theirs, mine = checkpoint.describe(network), checkpoint.describe(self.network)
        if theirs != mine:
            raise UserError(f"{path}: its network has {_difference(theirs, mine)}")
        self.network.load_state_dict(network.state_dict())
        self.average.network.load_state_dict(network.state_dict())

    def restore(self, path: Path) -> None:
        """Go on where :meth:`save` was called.

        :raises UserError: when the file is no checkpoint, or of a training with other data or parameters.
        """
        content = checkpoint.load(path, checkpoint.TRAINING)
        mine: dict[str, Any] = {
            "network": checkpoint.describe(self.network),
            "hyperparameters": self.hyperparameters.to_mapping(),
            "options": self.options.to_mapping(),
            "data": self._data,
        }
        with checkpoint.reading(path):
            for key, value in mine.items():
                if content[key] != value:
                    raise UserError(f"{path}: made with {key} {_difference(content[key], value)}; start a new training")
            self.network.load_state_dict(content["weights"])
            self.average.network.load_state_dict(content["average"])
            self.average.updates = content["updates"]
            restore_momentum(self.optimiser, content["momentum"])
            self.training_step.reset()
            if content["scaler"] and self.training_step.scaler.is_enabled():
                self.training_step.scaler.load_state_dict(content["scaler"])
            self.training_step.sums.copy_(content["plain_sums"])
            self.epoch, self.step, self.seconds = content["epoch"], content["step"], content["seconds"]
            self.history = content["history"]

    @property
    def _data(self) -> dict[str, Any]:
        return {"images": self.batches.count, "labels_sha256": self.batches.split.labels_sha256}


def _make_network(height: int, width: int, options: TrainingOptions, runtime: Runtime) -> AutoSpeed:
    """The network with its first weights, which are the same on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        network = AutoSpeed(height, width, options.size, len(CLASSES))
    return runtime.place(network)


def _difference(theirs: Any, ours: Any) -> str:
    if not isinstance(theirs, dict):
        return f"{theirs}, not {ours}"
    keys = [key for key in ours if theirs.get(key) != ours[key]]
    return ", ".join(f"{key} {theirs.get(key)}, not {ours[key]}" for key in keys)
