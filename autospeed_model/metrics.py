"""Average precision over IoU 0.50 to 0.95, on the host in NumPy.

Shapes: D detections and G boxes of an image, T thresholds, N detections of all images, nc classes that have boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
POINTS = 101  # of the precision-recall curve
CURVE = np.linspace(0, 1, 1000)  # confidences at which precision and recall are read
SMOOTHING = 0.1  # width of the window over the F1 curve, fraction of its length
EPSILON = 1e-16


@dataclass(frozen=True)
class Figures:
    """Quality of a detector on a split. Zero where there is nothing to measure."""

    precision: float = 0.0
    recall: float = 0.0
    map50: float = 0.0
    map: float = 0.0

    def to_mapping(self) -> dict[str, float]:
        return {"precision": self.precision, "recall": self.recall, "map50": self.map50, "map": self.map}


@dataclass
class DetectionMetrics:
    """Collects images, then gives their figures."""

    _correct: list[np.ndarray] = field(default_factory=list)
    _confidence: list[np.ndarray] = field(default_factory=list)
    _detected: list[np.ndarray] = field(default_factory=list)
    _labels: list[np.ndarray] = field(default_factory=list)

    def add(self, detections: np.ndarray, boxes: np.ndarray) -> None:
        """Add an image.

        :param detections: (D, 6) rows x1, y1, x2, y2, confidence, class, best first
        :param boxes: (G, 5) rows class, x1, y1, x2, y2
        """
        self._correct.append(match(detections, boxes))
        self._confidence.append(detections[:, 4])
        self._detected.append(detections[:, 5])
        self._labels.append(boxes[:, 0])

    def figures(self) -> Figures:
        """Figures over all images added: means over the classes that have boxes."""
        if not self._labels:
            return Figures()
        return detection_figures(
            np.concatenate(self._correct),
            np.concatenate(self._confidence),
            np.concatenate(self._detected),
            np.concatenate(self._labels),
        )


def match(detections: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Which detections are right at which threshold: bool (D, T).

    A detection speaks for the box of its class that it overlaps most; a box is found by the best of its detections.
    """
    correct = np.zeros((len(detections), len(THRESHOLDS)), dtype=bool)
    if len(detections) == 0 or len(boxes) == 0:
        return correct
    overlap = _pairwise_iou(detections[:, :4], boxes[:, 1:]) * (detections[:, 5:6] == boxes[:, 0])
    best = overlap.argmax(axis=1)
    reached = overlap[np.arange(len(detections)), best]
    for column, threshold in enumerate(THRESHOLDS):
        candidates = np.flatnonzero(reached >= threshold)
        _, first = np.unique(best[candidates], return_index=True)
        correct[candidates[first], column] = True
    return correct


def detection_figures(correct: np.ndarray, confidence: np.ndarray, detected: np.ndarray, labels: np.ndarray) -> Figures:
    """Precision and recall at the confidence of the best smoothed F1, and average precision.

    :param correct: bool (N, T)
    :param confidence: (N,)
    :param detected: (N,) class of each detection
    :param labels: class of every box there is
    """
    order = np.argsort(-confidence, kind="stable")
    correct, confidence, detected = correct[order], confidence[order], detected[order]
    classes, totals = np.unique(labels, return_counts=True)
    if len(classes) == 0:
        return Figures()
    precision, recall = np.zeros((2, len(classes), len(CURVE)))
    average = np.zeros((len(classes), len(THRESHOLDS)))
    for row, (label, total) in enumerate(zip(classes, totals, strict=True)):
        chosen = detected == label
        if not chosen.any():
            continue
        hits = correct[chosen].cumsum(axis=0)
        recalls = hits / (total + EPSILON)
        precisions = hits / np.arange(1, len(hits) + 1)[:, None]
        recall[row] = np.interp(-CURVE, -confidence[chosen], recalls[:, 0], left=0)
        precision[row] = np.interp(-CURVE, -confidence[chosen], precisions[:, 0], left=1)
        average[row] = [
            average_precision(recalls[:, column], precisions[:, column]) for column in range(len(THRESHOLDS))
        ]
    f1 = 2 * precision * recall / (precision + recall + EPSILON)
    best = _smooth(f1.mean(axis=0)).argmax()
    return Figures(
        precision=float(precision[:, best].mean()),
        recall=float(recall[:, best].mean()),
        map50=float(average[:, 0].mean()),
        map=float(average.mean()),
    )


def average_precision(recall: np.ndarray, precision: np.ndarray) -> float:
    """Area under the precision envelope, read at 101 recalls; both inputs (N,) in order of falling confidence."""
    recall = np.concatenate(([0.0], recall, [1.0]))
    precision = np.concatenate(([1.0], precision, [0.0]))
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    points = np.linspace(0, 1, POINTS)
    values = np.interp(points, recall, envelope)
    return float((np.diff(points) * (values[1:] + values[:-1]) / 2).sum())


def _smooth(curve: np.ndarray) -> np.ndarray:
    """Moving average over an odd window, the ends continued."""
    half = round(len(curve) * SMOOTHING / 2)
    padded = np.concatenate((np.full(half, curve[0]), curve, np.full(half, curve[-1])))
    return np.convolve(padded, np.ones(2 * half + 1) / (2 * half + 1), mode="valid")


def _pairwise_iou(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(N, 4) and (M, 4) -> (N, M)."""
    extent = np.minimum(first[:, None, 2:], second[None, :, 2:]) - np.maximum(first[:, None, :2], second[None, :, :2])
    intersection = extent.clip(min=0).prod(axis=2)
    areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (first, second)]
    return np.asarray(intersection / (areas[0][:, None] + areas[1] - intersection + 1e-7))
