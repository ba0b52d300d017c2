from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from autospeed_model.batches import TrainingBatches, most_boxes
from autospeed_model.ema import WeightAverage
from autospeed_model.graphs import WARM_UP_CALLS, GraphPool
from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.loss import DetectionLoss
from autospeed_model.network import AutoSpeed
from autospeed_model.optimiser import make_optimiser
from autospeed_model.packed import PackedSplit
from autospeed_model.runtime import Runtime
from autospeed_model.step import TrainingStep

Squares = Callable[..., PackedSplit]
HEIGHT, WIDTH, BATCH = 64, 96, 2
HYPERPARAMETERS = Hyperparameters(batch_size=BATCH)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs, streams, synchronisation")


def make_step(runtime: Runtime) -> TrainingStep:
    torch.manual_seed(0)
    network = runtime.place(AutoSpeed(HEIGHT, WIDTH)).train()
    loss = DetectionLoss(HEIGHT, WIDTH, HYPERPARAMETERS).to(runtime.device)
    optimiser = make_optimiser(network, HYPERPARAMETERS, BATCH)
    pool = GraphPool(runtime.device) if runtime.graphs else None
    return TrainingStep(network, loss, optimiser, WeightAverage(network), runtime, pool)


def batches(device: str = "cpu", count: int = 8) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.rand(BATCH, 3, HEIGHT, WIDTH, generator=generator)
        corner = torch.rand(BATCH, 3, 2, generator=generator) * 30
        label = torch.randint(1, 4, (BATCH, 3, 1), generator=generator)
        boxes = torch.cat((label, corner, corner + 30), dim=2)
        real = torch.tensor([[True, True, True], [True, False, False]])
        yield images.to(device), boxes.to(device), real.to(device)


def test_two_batches_and_an_update_are_what_autograd_and_sgd_make_of_them() -> None:
    step, plain = make_step(Runtime()), make_step(Runtime())
    network = plain.network
    optimiser = make_optimiser(network, HYPERPARAMETERS, BATCH)
    for parameter in network.parameters():
        parameter.grad = None
    expected = torch.zeros(3)
    for images, boxes, real in batches(count=2):
        step.accumulate(images, boxes, real)
        found = plain.loss(network(images), boxes, real)
        ((7.5 * found[0] + 0.5 * found[1] + 1.5 * found[2]) * BATCH).backward()
        expected += found.detach()
    step.update(0.01)
    for group in optimiser.param_groups:
        group["lr"] = 0.01
    optimiser.step()
    torch.testing.assert_close(step.sums, expected)
    for mine, theirs in zip(step.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert all(not parameter.grad.any() for parameter in step.network.parameters() if parameter.grad is not None)


def test_gradients_stay_where_they_are() -> None:
    step = make_step(Runtime())
    before = [parameter.grad for parameter in step.network.parameters()]
    for batch in batches(count=2):
        step.accumulate(*batch)
        step.update(1e-3)
    after = [parameter.grad for parameter in step.network.parameters()]
    assert all(one is not None and one is other for one, other in zip(before, after, strict=True))


def test_no_drawn_sample_has_more_boxes_than_the_shape_that_is_compiled_for(squares: Squares) -> None:
    split = squares("train", 7)
    assert most_boxes(split, Hyperparameters(mosaic=0.0)) == 32
    hyperparameters = Hyperparameters(mix_up=0.5, scale=0.5)
    assert most_boxes(split, hyperparameters) == 32  # 3 boxes, 4 images, 2 layers
    crowded = squares("train", 3, boxes_each=3)
    longest = max(
        int(real.sum(dim=1).max())
        for epoch in range(3)
        for _, (_, _, real) in TrainingBatches(crowded, hyperparameters, 3, 0, Runtime()).of_epoch(epoch)
    )
    assert longest <= most_boxes(crowded, hyperparameters)


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_never_waits_for_the_device(precision: str, graphs: bool) -> None:
    runtime = Runtime("cuda", precision, channels_last=True, graphs=graphs)
    step = make_step(runtime)
    given = list(batches("cuda"))
    step.accumulate(*given[0])  # loads kernels
    step.update(1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in given[1:WARM_UP_CALLS]:
            step.accumulate(*batch)
            step.update(1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_graphs_train_as_single_launches_do(precision: str) -> None:
    found = []
    for graphs in (False, True):
        step = make_step(Runtime("cuda", precision, channels_last=True, graphs=graphs))
        for number, batch in enumerate(batches("cuda", count=4 * WARM_UP_CALLS)):
            step.accumulate(*batch)
            if number % 2:
                step.update(1e-4 * (number + 1))
        found.append([step.sums, *step.average.network.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@needs_gpu
@pytest.mark.parametrize("images", ["device", "host"])
def test_batches_on_a_gpu_are_those_of_the_reference(squares: Squares, images: str) -> None:
    from autospeed_model.augment import PixelTable, augment_reference
    from autospeed_model.batches import epoch_order, step_generator
    from autospeed_model.draw import draw_table

    split = squares("train", 9)
    made = TrainingBatches(split, HYPERPARAMETERS, BATCH, 0, Runtime("cuda", channels_last=True, images=images))
    order = epoch_order(0, 0, len(split), BATCH)
    for step, (pixels, boxes, real) in made.of_epoch(0):
        table = draw_table(step_generator(0, 0, step), order[step], split, HYPERPARAMETERS)
        expected = augment_reference(torch.from_numpy(split.images), PixelTable.of(table))
        # A gain on the hue parts shades of red that differ by rounding alone: 0 and 6 sixths of the circle meet.
        differs = (pixels.cpu().float() - expected).abs() > 2e-3
        assert differs.float().mean() < 1e-3
        torch.testing.assert_close(boxes.cpu(), torch.from_numpy(table.boxes))
        assert torch.equal(real.cpu(), torch.from_numpy(table.real))


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step.network.head.requires_grad_(False),
        lambda step: step.network.backbone.p1.norm.eval(),
        lambda step: setattr(step.network.backbone.p1, "activation", torch.nn.ReLU()),
        lambda step: step.network.to(memory_format=torch.channels_last),
        lambda step: setattr(step, "_batch", tuple(value[:1] for value in step._batch)),
    ],
    ids=["frozen", "norm in evaluation mode", "activation", "order in memory", "batch"],
)
def test_the_name_of_compiled_code_follows_what_was_traced(change: Callable[[TrainingStep], object]) -> None:
    step = make_step(Runtime())
    step._batch = next(batches())
    before = step._key()
    step.loss.gains.mul_(2)
    step.network.backbone.p1.norm.running_mean.add_(1)
    assert step._key() == before  # values are arguments
    change(step)
    assert step._key() != before
