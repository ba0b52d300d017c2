import pytest
import torch

from autospeed_model.hyperparameters import Hyperparameters
from autospeed_model.network import AutoSpeed
from autospeed_model.optimiser import accumulated_steps, make_optimiser


@pytest.mark.parametrize(("batch", "steps"), [(1, 64), (8, 8), (24, 3), (32, 2), (48, 1), (64, 1), (512, 1)])
def test_steps_accumulate_to_about_64_images(batch: int, steps: int) -> None:
    assert accumulated_steps(Hyperparameters(), batch) == steps


def test_an_update_may_take_fewer_images_and_then_decays_less() -> None:
    hyperparameters = Hyperparameters(update_images=8, weight_decay=8e-4)
    assert accumulated_steps(hyperparameters, 8) == 1
    decayed, _ = make_optimiser(torch.nn.Linear(2, 1), hyperparameters, 8).param_groups
    assert decayed["weight_decay"] == pytest.approx(1e-4)


def test_only_weights_of_convolutions_and_linear_layers_are_decayed() -> None:
    network = AutoSpeed(64, 64)
    decayed, others = make_optimiser(network, Hyperparameters(weight_decay=1e-3), 128).param_groups
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert others["weight_decay"] == 0
    assert decayed["weight_decay"] == pytest.approx(2e-3)  # 128 images an update instead of 64


def test_a_study_may_try_no_momentum() -> None:
    network = torch.nn.Linear(2, 1)
    optimiser = make_optimiser(network, Hyperparameters(momentum=0.0, min_lr=0.1, weight_decay=0.0), 64)
    before = network.weight.detach().clone()
    network(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    torch.testing.assert_close(network.weight.detach(), before - 0.1)
