"""Callbacks that show and keep what a training does."""

from __future__ import annotations

import csv
import io
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from autospeed_model import checkpoint
from autospeed_model.errors import UserError
from autospeed_model.trainer import Callback, Record, Trainer

# where there is no terminal, a long epoch says so often how far it is
SILENT_S = 60.0


class ProgressBar(Callback):
    """A bar over the steps of an epoch where there is a terminal, else a line a minute; a line an epoch everywhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.said = time.monotonic()
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps  {task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def on_update(self, trainer: Trainer) -> None:
        rate = f"{trainer.step * trainer.batch_size / max(trainer.seconds, 1e-9):.1f} images/s"
        self._show(trainer, rate)
        if not self.console.is_terminal and time.monotonic() - self.said > SILENT_S:
            epoch = f"{trainer.epoch + 1}/{trainer.options.epochs}"
            self._say(f"epoch {epoch}  {trainer.step}/{trainer.steps_per_epoch} steps  {rate}")

    def on_validation_batch(self, trainer: Trainer) -> None:
        self._show(trainer, "evaluating")

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        losses = "  ".join(
            f"{name.removesuffix('_loss')} {record[name]:.3f}" for name in ("box_loss", "cls_loss", "dfl_loss")
        )
        figures = "  ".join(f"{name} {record[name]:.4f}" for name in ("precision", "recall", "map50", "map"))
        epoch, rate = f"{trainer.epoch}/{trainer.options.epochs}", f"{record['images_per_s']:.1f} images/s"
        self._say(f"epoch {epoch}  {losses}  {figures}  {rate}")

    def _say(self, line: str) -> None:
        self.said = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=True)

    def _show(self, trainer: Trainer, note: str) -> None:
        fields: dict[str, Any] = {"epoch": f"{trainer.epoch + 1}/{trainer.options.epochs}", "note": note}
        if self.task is None:
            self.task = self.progress.add_task("", total=trainer.steps_per_epoch, **fields)
        self.progress.update(self.task, completed=trainer.step, **fields)


class CsvLog(Callback):
    """The whole history as a table, written anew after every epoch: right also after a resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(record), lineterminator="\n")
        writer.writeheader()
        for row in trainer.history:
            writer.writerow({name: f"{value:.6g}" for name, value in row.items()})
        checkpoint.write_atomically(self.path, lambda file: file.write(text.getvalue().encode()))


class TensorBoardLog(Callback):
    """Losses, figures and learning rate for TensorBoard.

    :raises UserError: when the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
        self.writer = SummaryWriter(str(folder))

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        for name, value in record.items():
            group = "loss" if name.endswith("_loss") else "figures"
            self.writer.add_scalar(f"{group}/{name}", value, trainer.epoch)
        self.writer.flush()


class Checkpoints(Callback):
    """Keeps ``checkpoint.pt`` to go on from, the last weights as ``last.pt``, those of the best mAP as ``best.pt``."""

    def __init__(self, folder: Path, every_s: float = 600.0) -> None:
        self.folder, self.every_s = folder, every_s
        self.saved = time.monotonic()

    @property
    def path(self) -> Path:
        return self.folder / "checkpoint.pt"

    def on_update(self, trainer: Trainer) -> None:
        if time.monotonic() - self.saved >= self.every_s:
            self.save(trainer)

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        self.save(trainer)
        figures = {name: record[name] for name in ("precision", "recall", "map50", "map")}
        checkpoint.save_weights(self.folder / "last.pt", trainer.average.network, figures)
        if record["map"] >= max(row["map"] for row in trainer.history):
            checkpoint.save_weights(self.folder / "best.pt", trainer.average.network, figures)

    def save(self, trainer: Trainer) -> None:
        trainer.save(self.path)
        self.saved = time.monotonic()


class Stopped(BaseException):
    """A signal ended the training after its checkpoint was written. No Exception: nothing on the way may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopOnSignal(Callback):
    """Ends the training at the next update, after ``save``, when one of ``SIGNALS`` arrives."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)

    def __init__(self, save: Callable[[Trainer], None]) -> None:
        self.save = save
        self.received: int | None = None

    def install(self) -> None:
        for number in self.SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once

    def on_update(self, trainer: Trainer) -> None:
        if self.received is not None:
            self.save(trainer)
            raise Stopped(self.received)

    def on_validation_batch(self, trainer: Trainer) -> None:
        self.on_update(trainer)
