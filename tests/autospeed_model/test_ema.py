import copy
import math

import pytest
import torch
from torch import nn

from autospeed_model.ema import WeightAverage


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def test_the_average_follows_its_definition_tensor_by_tensor() -> None:
    model = network()
    average = WeightAverage(model)
    expected = {name: value.clone().double() for name, value in model.state_dict().items()}
    for update in range(1, 6):
        model(torch.randn(2, 3, 5, 5))  # moves the batch statistics
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        average.update()
        decay = 0.9999 * (1 - math.exp(-update / 2000))
        for name, value in model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
    for name, value in average.network.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert value == model.state_dict()[name]


def test_the_average_shares_nothing_with_the_network_and_takes_no_gradients() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    average = WeightAverage(model)
    with torch.no_grad():
        for value in average.network.state_dict().values():
            value.zero_()
    torch.testing.assert_close(model.state_dict(), before)
    assert not average.network.training
    assert not any(parameter.requires_grad for parameter in average.network.parameters())


def test_small_steps_late_in_a_training_are_not_lost() -> None:
    model = network()
    average = WeightAverage(model)
    average.updates = 100_000
    weight = average.network.get_parameter("0.weight")
    before = weight.clone()
    with torch.no_grad():
        model.get_parameter("0.weight").add_(0.01)
    average.update()
    # One update moves the average by 1e-4 of 0.01, far below what half precision could keep.
    assert (weight - before).mean().item() == pytest.approx(1e-6, rel=0.05)
