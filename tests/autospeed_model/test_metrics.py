import warnings
from collections.abc import Callable

import numpy as np
import pytest

from autospeed_model.metrics import DetectionMetrics, Figures, average_precision, match

BOX = [10.0, 10, 30, 30]


def detections(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32).reshape(-1, 6)


def boxes(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32).reshape(-1, 5)


def test_figures_are_the_golden_ones(golden: Callable[[str], dict[str, np.ndarray]]) -> None:
    expected = golden("metrics")
    metrics = DetectionMetrics()
    for image in range(int(expected["n_images"])):
        metrics.add(expected[f"det{image:02d}"], expected[f"gt{image:02d}"])
    for name, value in metrics.figures().to_mapping().items():
        assert value == pytest.approx(float(expected[name]), abs=1e-6)


def test_a_perfect_detector_scores_one() -> None:
    metrics = DetectionMetrics()
    for label in (0, 1, 2):
        metrics.add(detections([*BOX, 0.9, label]), boxes([label, *BOX]))
    figures = metrics.figures()
    assert figures.map50 == pytest.approx(0.995, abs=6e-3)  # the curve ends at recall 1, precision 0
    assert figures.map == pytest.approx(figures.map50)
    assert figures.precision == pytest.approx(1) and figures.recall == pytest.approx(1)


@pytest.mark.parametrize("found", [detections(), detections([*BOX, 0.5, 1])])
def test_without_a_single_box_figures_are_zero_and_nothing_warns(found: np.ndarray) -> None:
    metrics = DetectionMetrics()
    metrics.add(found, boxes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metrics.figures() == Figures()
        assert DetectionMetrics().figures() == Figures()


def test_without_a_detection_figures_are_zero_and_nothing_warns() -> None:
    metrics = DetectionMetrics()
    metrics.add(detections(), boxes([1, *BOX]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metrics.figures() == Figures()


def test_a_box_is_found_once_by_its_most_confident_detection() -> None:
    found = match(detections([*BOX, 0.9, 1], [*BOX, 0.8, 1], [*BOX, 0.7, 2]), boxes([1, *BOX]))
    assert found.all(axis=1).tolist() == [True, False, False]


def test_a_detection_counts_at_the_thresholds_that_its_overlap_reaches() -> None:
    part = [10.0, 10, 30, 24.4]  # IoU 0.72 with BOX
    found = match(detections([*part, 0.9, 1]), boxes([1, *BOX]))
    assert found[0].tolist() == [True] * 5 + [False] * 5


def test_precision_between_recalls_is_the_best_to_the_right() -> None:
    # Right, wrong, right of two boxes: precision 1 to recall 0.5, then 2/3, then the line down to the end.
    recall, precision = np.array([0.5, 0.5, 1.0]), np.array([1.0, 0.5, 2 / 3])
    assert average_precision(recall, precision) == pytest.approx(0.5 + 0.5 * 2 / 3, abs=0.01)
