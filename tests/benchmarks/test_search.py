"""The replay of searches: it counts what a study would have spent, and answers with recorded curves."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from benchmarks import record_curves, search

SPACE: dict[str, dict[str, Any]] = {
    "max_lr": {"type": "loguniform", "min": 1e-3, "max": 5e-2},
    "momentum": {"type": "uniform", "min": 0.8, "max": 0.98},
}
RANDOM = {"sampler": {"name": "random"}, "pruner": {"name": "none"}}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    optuna.logging.set_verbosity(before)


def rising(params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
    """A curve of five epochs of ten seconds; a larger momentum ends higher."""
    return [float(params["momentum"]) * epoch for epoch in range(1, 6)], 10.0


@pytest.mark.parametrize("workers", [8, 256])
def test_the_published_way_spends_100_trials_of_5_epochs(workers: int) -> None:
    found = search.replay(RANDOM, rising, SPACE, workers, seed=0)
    assert len(found) == 100
    assert found[-1].epochs == search.BUDGET
    waves = math.ceil(100 / workers)
    assert found[-1].seconds == pytest.approx(waves * 50, rel=0.15)


def test_with_a_target_it_begins_with_the_defaults_and_ends_where_they_reach_it() -> None:
    asked = []

    def noting(params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        asked.append(dict(params))
        return rising(params, rng)

    target = 5 * search.DEFAULTS["momentum"]
    found = search.replay(RANDOM, noting, SPACE, 1, seed=0, target=target)
    assert asked == [{name: search.DEFAULTS[name] for name in SPACE}]
    assert (found[-1].epochs, found[-1].value) == (5, target)
    assert search.reached(found, target + 1).epochs == math.inf


def test_pruning_spends_fewer_epochs_on_the_same_trials() -> None:
    pruned = {**RANDOM, "pruner": {"name": "asha"}}
    whole, halved = (search.replay(way, rising, SPACE, 4, seed=1) for way in (RANDOM, pruned))
    assert halved[-1].epochs < 0.6 * whole[-1].epochs
    assert halved[-1].value > 0.97 * whole[-1].value


def test_a_diverged_training_costs_its_epochs_and_gives_no_value() -> None:
    def diverging(params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        return ([], 10.0) if params["momentum"] > 0.9 else rising(params, rng)

    found = search.replay(RANDOM, diverging, SPACE, 4, seed=1)
    assert 0 < len(found) < 100
    assert found[-1].value <= 0.9 * 5


def test_recorded_curves_answer_for_what_is_nearest(tmp_path: Path) -> None:
    rows = [
        {"params": {}, "map": [0.1] * 10, "pass_s": 2.0},
        {"params": {"max_lr": 0.05, "momentum": 0.8}, "map": [0.01 * n for n in range(1, 11)], "pass_s": 3.0},
        {"params": {"max_lr": 0.001, "momentum": 0.98}, "map": [], "pass_s": None},
    ]
    path = tmp_path / "curves.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = search.Recorded(path, SPACE)
    near = curve({"max_lr": 0.049, "momentum": 0.81}, np.random.default_rng(0))
    assert near == (pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1]), 6.0)


def test_settings_to_record_begin_with_the_defaults_and_fill_the_ranges_evenly() -> None:
    settings = record_curves.draw(SPACE, 65, seed=0)
    assert settings[0] == {}
    points = np.array([search.unit(setting, SPACE) for setting in settings[1:]])
    for column in points.T:
        assert set(np.histogram(column, bins=8, range=(0, 1))[0]) <= {6, 7, 8, 9, 10}
    assert record_curves.draw(SPACE, 9, seed=0) == settings[:9]
