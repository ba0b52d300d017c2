"""The training that follows a study: on all training images, tested once on images that no trial has seen."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np

from autospeed_model import checkpoint
from autospeed_model.contact_sheet import COLOURS, draw_boxes
from autospeed_model.evaluation import Evaluator
from autospeed_model.hyperparameters import Hyperparameters, RuntimeOptions, TrainingOptions
from autospeed_model.images import as_tensor
from autospeed_model.joined import join
from autospeed_model.logs import CsvLog
from autospeed_model.objective import Context
from autospeed_model.packed import PackedDataset, PackedSplit
from autospeed_model.runtime import Runtime
from autospeed_model.trainer import Record, Trainer
from autospeed_model.trial import TrialCallback, begin_or_go_on

SAMPLES = 12
SHOWN_CONFIDENCE = 0.25


def run_final(
    hyperparameters: Hyperparameters, options: TrainingOptions, runtime: RuntimeOptions, folder: Path, context: Context
) -> float:
    """Train, or go on training, on ``train`` and ``tune_val`` together; returns the mAP on ``evaluation``.

    Leaves in the trial's folder the weights (``final.pt``), the losses (``metrics.csv``) and pictures of samples.
    """
    data = PackedDataset(folder)
    where = Runtime.of(runtime, context.device)
    evaluation = data.split("evaluation")
    images = join([data.split("train"), data.split("tune_val")])
    trainer = begin_or_go_on(lambda: Trainer(images, None, hyperparameters, options, where), context.checkpoint)
    _report(context, trainer)
    own = context.checkpoint.parent
    if not trainer.finished:
        trainer.fit(FinalCallback(context), CsvLog(own / "metrics.csv"))

    def stop_if_asked() -> None:
        if context.stop_requested:
            context.hand_back()

    evaluator = Evaluator(trainer.average.network, evaluation, trainer.batch_size, where)
    figures = evaluator.run(stop_if_asked).to_mapping()
    checkpoint.save_weights(own / "final.pt", trainer.average.network, figures)
    write_samples(evaluator, evaluation, own / "samples.png")
    (own / "evaluation.json").write_text(json.dumps({"images": len(evaluation), **figures}) + "\n", encoding="utf-8")
    rate = trainer.history[-1]["images_per_s"]
    context.report(options.epochs, figures["map"], images_per_s=rate, **figures)
    return figures["map"]


class FinalCallback(TrialCallback):
    """A trial's, but an epoch has no figures: nothing is evaluated before the end."""

    def on_epoch(self, trainer: Trainer, record: Record) -> None:
        self._save(trainer)
        _report(self.context, trainer)


def _report(context: Context, trainer: Trainer) -> None:
    """The training loss without its gains, negative so that more is better, as it is in the value that ends the trial
    and is the last epoch's report."""
    if trainer.history and not trainer.finished:
        record = trainer.history[-1]
        context.report(trainer.epoch, -record["plain_loss"], images_per_s=record["images_per_s"])


def write_samples(evaluator: Evaluator, split: PackedSplit, path: Path, count: int = SAMPLES) -> None:
    """Images spread evenly over a split as one picture of two columns: on the left of each pair the true boxes, on the
    right the detections with their confidence."""
    chosen = np.unique(np.linspace(0, len(split) - 1, min(count, len(split))).astype(int))
    enlarged = max(1, 320 // split.height)  # small pictures of tests and demos: else labels cover them
    pairs = []
    for index in chosen:
        image = np.ascontiguousarray(split.images[index])
        detections = evaluator.detect(as_tensor(image[None]).to(evaluator.runtime.device))
        rows = detections.rows[0, : int(detections.counts[0])].float().cpu().numpy()
        truth = np.repeat(np.repeat(image, enlarged, axis=0), enlarged, axis=1)
        found = truth.copy()
        draw_boxes(truth, split.boxes_of(int(index)) * [1, enlarged, enlarged, enlarged, enlarged])
        rows[:, :4] *= enlarged
        for x1, y1, x2, y2, confidence, number in rows[(rows[:, 4] >= SHOWN_CONFIDENCE) & (rows[:, 5] > 0)]:
            draw_boxes(found, np.array([[number, x1, y1, x2, y2]]))
            place = round(float(x1)) + 2, round(float(y2)) - 3
            cv2.putText(found, f"{confidence:.2f}", place, cv2.FONT_HERSHEY_SIMPLEX, 0.35, COLOURS[int(number)])
        pairs.append(np.concatenate([truth, np.full((len(truth), 4, 3), 255, np.uint8), found], axis=1))
    if len(pairs) % 2:
        pairs.append(np.full_like(pairs[0], 255))
    gap = np.full((len(pairs[0]), 12, 3), 255, np.uint8)
    lines = [np.concatenate([a, gap, b], axis=1) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    picture = cv2.cvtColor(np.concatenate(lines, axis=0), cv2.COLOR_RGB2BGR)
    path.write_bytes(cv2.imencode(".png", picture)[1].tobytes())
