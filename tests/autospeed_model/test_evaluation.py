import dataclasses
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from autospeed_model.ahead import ahead
from autospeed_model.evaluation import Evaluator
from autospeed_model.metrics import DetectionMetrics
from autospeed_model.network import AutoSpeed
from autospeed_model.nms import suppress
from autospeed_model.packed import PackedSplit
from autospeed_model.runtime import Runtime

Squares = Callable[..., PackedSplit]


def network() -> AutoSpeed:
    torch.manual_seed(0)
    return AutoSpeed(64, 96).eval()


def detections(model: AutoSpeed, image: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        outputs = model(torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float() / 255)
    found = suppress(outputs)
    return found.rows[0, : found.counts[0]].numpy()


def with_boxes_that_are_found(split: PackedSplit, model: AutoSpeed) -> PackedSplit:
    """An untrained network finds nothing that is there. Every other of its detections becomes a box, a bit off."""
    rows = [detections(model, image)[:20:2] for image in split.images]
    boxes = [np.concatenate((found[:, 5:], found[:, :4] + [0, 0, 1, 1]), axis=1) for found in rows]
    offsets = np.cumsum([0, *(len(found) for found in boxes)])
    return dataclasses.replace(split, boxes=np.concatenate(boxes).astype(np.float32), offsets=offsets)


def test_figures_do_not_depend_on_the_batch_size_and_are_those_of_single_images(squares: Squares) -> None:
    model = network()
    split = with_boxes_that_are_found(squares("tune_val", 5), model)
    metrics = DetectionMetrics()
    for index, image in enumerate(split.images):
        metrics.add(detections(model, image), split.boxes_of(index))
    expected = metrics.figures()
    assert all(0 < value < 1 for value in (expected.precision, expected.map50, expected.map))
    for batch_size in (1, 2, 8):
        found_figures = Evaluator(model, split, batch_size, Runtime()).run()
        assert found_figures.to_mapping() == pytest.approx(expected.to_mapping(), abs=1e-4)


def test_an_evaluator_measures_the_weights_of_the_moment(squares: Squares) -> None:
    model = network()
    evaluator = Evaluator(model, squares("tune_val", 3), 2, Runtime())
    first = evaluator.detect(torch.from_numpy(evaluator.split.images[:2]))
    with torch.no_grad():
        model.get_parameter("head.cls.0.4.bias").add_(3.0)
    second = evaluator.detect(torch.from_numpy(evaluator.split.images[:2]))
    assert not torch.equal(first.rows, second.rows)


def test_a_callback_may_end_an_evaluation_and_no_thread_is_left(squares: Squares) -> None:
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Evaluator(network(), squares("tune_val", 6), 2, Runtime()).run(stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("metrics", "_read"))]


def test_ahead_keeps_the_order_and_makes_the_next_result_meanwhile() -> None:
    begun = [threading.Event() for _ in range(4)]

    def square(number: int) -> int:
        begun[number].set()
        return number * number

    found = []
    for result in ahead(square, range(4)):
        found.append(result)
        assert begun[min(len(found), 3)].wait(300), "the next one is not begun while this one is used"
    assert found == [0, 1, 4, 9]
    assert list(ahead(square, [])) == []


def test_ahead_passes_an_error_in_its_turn() -> None:
    def invert(number: int) -> float:
        return 1 / number

    results = ahead(invert, [1, 2, 0])
    assert [next(results), next(results)] == [1.0, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs")
def test_a_graph_measures_what_single_launches_do(squares: Squares) -> None:
    from autospeed_model.graphs import GraphPool

    runtime = Runtime("cuda", channels_last=True, graphs=True)
    split = with_boxes_that_are_found(squares("tune_val", 7), network())
    model = runtime.place(network())
    plain = Evaluator(model, split, 2, runtime).run()
    graphed = Evaluator(model, split, 2, runtime, GraphPool("cuda"))
    for _ in range(3):
        assert graphed.run().to_mapping() == pytest.approx(plain.to_mapping(), abs=1e-3)
