from collections.abc import Callable

import numpy as np
import pytest

from autospeed_model.schedule import LEAST_WARMUP_STEPS, LinearSchedule, warmup_steps


def test_rates_are_the_golden_ones(golden: Callable[[str], dict[str, np.ndarray]]) -> None:
    schedule = LinearSchedule(1e-4, 1e-2, warmup_steps=3 * 40, total_steps=5 * 40)
    np.testing.assert_allclose([schedule.at(step) for step in range(200)], golden("schedule")["lr"], rtol=1e-12)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_training_that_ends_within_the_warm_up_follows_the_same_line(epochs: int) -> None:
    short = LinearSchedule(1e-4, 1e-2, warmup_steps=30, total_steps=10 * epochs)
    longer = LinearSchedule(1e-4, 1e-2, warmup_steps=30, total_steps=100)
    rates = [short.at(step) for step in range(10 * epochs)]
    assert rates == [longer.at(step) for step in range(10 * epochs)]
    assert all(0 < rate < 1e-2 for rate in rates)


@pytest.mark.parametrize("total", [1, 2, 11])
def test_without_warm_up_the_rate_falls_from_the_largest(total: int) -> None:
    schedule = LinearSchedule(1e-4, 1e-2, warmup_steps=0, total_steps=total)
    rates = [schedule.at(step) for step in range(total)]
    assert rates[0] == 1e-2
    assert rates == sorted(rates, reverse=True)
    if total > 1:
        assert rates[-1] == pytest.approx(1e-4)


def test_a_single_step_after_the_warm_up_has_the_largest_rate() -> None:
    assert LinearSchedule(1e-4, 1e-2, warmup_steps=4, total_steps=5).at(4) == 1e-2


def test_a_warm_up_of_few_steps_is_lengthened_and_none_stays_none() -> None:
    assert warmup_steps(3, 40) == 120
    assert warmup_steps(1, 5) == LEAST_WARMUP_STEPS
    assert warmup_steps(0, 5) == 0
