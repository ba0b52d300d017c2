from typing import Any

import numpy as np
import pytest
import torch

from autospeed_model.errors import UserError
from autospeed_model.layers import Context
from autospeed_model.network import BINS, SIZES, STRIDES, AutoSpeed, distances, flatten_maps, make_anchors
from autospeed_model.packed import VARIANTS


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_the_public_ones_without_the_dead_taps(
    variant: str, size: str, upstream: dict[str, Any]
) -> None:
    with torch.device("meta"):
        network = AutoSpeed(*VARIANTS[variant], size)
    ours = sum(parameter.numel() for parameter in network.parameters())
    # The public Context has three taps a weight where one sees data.
    dead = sum(2 * module.spread.weight.numel() for module in network.modules() if isinstance(module, Context))
    # Its head carries the bins 0 .. 15 as a frozen convolution, which it counts as parameters.
    frozen = BINS
    assert dead > 0
    assert ours == upstream[f"{variant}/{size}"]["parameters"] - dead - frozen


def test_inference_output_is_the_golden_one(golden_case: Any) -> None:
    network, expected = golden_case.network.eval(), golden_case.expected
    with torch.no_grad():
        output = network(golden_case.images).numpy()
    np.testing.assert_allclose(output[:, :, expected["anchor_index"]], expected["eval_output"], rtol=1e-4)
    np.testing.assert_allclose(output.mean(axis=(0, 2), dtype=np.float64), expected["eval_mean"], rtol=1e-4)


def test_training_maps_are_the_golden_ones(golden_case: Any) -> None:
    network, expected = golden_case.network.train(), golden_case.expected
    statistics = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        maps = network(golden_case.images)
    network.load_state_dict(statistics)
    for level, found in enumerate(maps):
        values = found.flatten().numpy()[expected[f"train_map{level}_index"]]
        np.testing.assert_allclose(values, expected[f"train_map{level}_values"], rtol=1e-4, atol=1e-4)
        assert found.std().item() == pytest.approx(float(expected[f"train_map{level}_std"]), rel=1e-4)


def test_anchors_lie_in_the_centres_of_the_cells_in_the_order_of_the_maps() -> None:
    anchors, strides = make_anchors(64, 96)
    maps = [torch.zeros(1, 4 * BINS + 2, 64 // stride, 96 // stride) for stride in STRIDES]
    for found, stride in zip(maps, STRIDES, strict=True):
        rows, columns = torch.meshgrid(
            torch.arange(found.shape[2]) + 0.5, torch.arange(found.shape[3]) + 0.5, indexing="ij"
        )
        found[0, -2], found[0, -1] = columns * stride, rows * stride
    _, pixels = flatten_maps(maps)
    torch.testing.assert_close(anchors * strides, pixels[0])


def test_distance_is_the_mean_of_the_distribution() -> None:
    sides = torch.full((1, 4, BINS, 1), -1e4)
    sides[0, 0, 3] = 0  # all on bin 3
    sides[0, 1, 4] = sides[0, 1, 5] = 0  # half on 4, half on 5
    sides[0, 2] = 0  # even
    sides[0, 3, 15] = 0
    found = distances(sides.view(1, 4 * BINS, 1))
    torch.testing.assert_close(found.flatten(), torch.tensor([3.0, 4.5, 7.5, 15.0]))


def test_a_new_network_expects_few_objects() -> None:
    network = AutoSpeed(64, 96).eval()
    probability = network(torch.rand(2, 3, 64, 96))[:, 4:]
    assert probability.mean(dim=(0, 1)).sum().item() == pytest.approx(3 * 5 / 4, rel=0.5)  # 5 / nc at each stride


@pytest.mark.parametrize(("height", "width"), [(100, 128), (64, 100), (32, 64), (0, 64)])
def test_an_input_that_cannot_be_halved_five_times_is_refused(height: int, width: int) -> None:
    with pytest.raises(UserError, match="multiples of 32"):
        AutoSpeed(height, width)


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(UserError, match="allowed are n, s, m, l, x"):
        AutoSpeed(64, 64, "q")
