"""The replay of searches: it counts what a study would have spent, and answers with recorded curves."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from rich.console import Console

from benchmarks import record_curves, search
from hpcjobs.errors import UserError

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
    run = search.replay({**RANDOM, "trials": 100}, rising, SPACE, workers, seed=0)
    assert len(run.found) == 100
    assert run.found[-1].epochs == run.epochs == search.BUDGET
    assert run.seconds == pytest.approx(math.ceil(100 / workers) * 50, rel=0.15)


def test_ours_begins_with_the_defaults_and_counts_all_epochs_until_the_target() -> None:
    asked = []

    def noting(params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        asked.append(dict(params))
        return rising(params, rng)

    starts = [{name: search.DEFAULTS[name] for name in SPACE}]
    run = search.replay({**RANDOM, "trials": 6}, noting, SPACE, 2, seed=0, starts=starts)
    assert asked[0] == starts[0]
    assert len(asked) == len(run.found) == 6
    moment = run.reached(5 * search.DEFAULTS["momentum"])
    assert 5 <= moment.epochs <= 10  # of both workers
    assert moment.seconds == pytest.approx(50, rel=0.15)
    assert run.reached(run.best + 1).epochs == math.inf


def test_pruning_spends_fewer_epochs_on_the_same_trials() -> None:
    pruned = {**RANDOM, "pruner": {"name": "asha"}}
    whole, halved = (search.replay({**way, "trials": 100}, rising, SPACE, 4, seed=1) for way in (RANDOM, pruned))
    assert halved.epochs < 0.5 * whole.epochs
    assert halved.best > 0.97 * whole.best


def test_a_diverged_training_costs_its_epochs_and_gives_no_value() -> None:
    def diverging(params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        return ([1.0], 10.0) if params["momentum"] > 0.9 else rising(params, rng)

    run = search.replay({**RANDOM, "trials": 100}, diverging, SPACE, 4, seed=1)
    assert 0 < len(run.found) < 100
    assert run.epochs == 5 * len(run.found) + 2 * (100 - len(run.found))
    assert run.best <= 0.9 * 5


def test_running_trials_with_the_same_parameters_are_counted() -> None:
    start = {name: search.DEFAULTS[name] for name in SPACE}
    run = search.replay({**RANDOM, "trials": 5}, rising, SPACE, 3, seed=0, starts=[start, start, start])
    assert run.duplicates == 2


@pytest.mark.parametrize("workers", [8, 63])
def test_our_way_finds_what_the_published_way_finds_with_a_third_of_its_epochs(workers: int) -> None:
    """On curves without noise whose best is where the defaults are not: one seed, so that it is quick."""

    def hill(params: dict[str, Any], rng: np.random.Generator) -> tuple[list[float], float]:
        height = math.exp(-8 * float(((search.unit(params, SPACE) - 0.3) ** 2).sum()))
        return [height * epoch / 5 for epoch in range(1, 6)], 10.0

    theirs, ours = search.both_ways(hill, SPACE, workers, seed=0)
    assert theirs.epochs == search.BUDGET
    assert ours.epochs < 0.4 * search.BUDGET
    assert ours.best > 0.99 * theirs.best
    assert ours.duplicates == 0


def test_a_target_that_most_seeds_miss_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    one, none = search.Replay([search.Moment(5, 50, 1.0)], 5, 50, 0), search.Replay([], 3, 30, 0)
    monkeypatch.setattr(search, "both_ways", lambda *arguments: (one, none))
    console = Console(record=True, width=130)
    results = search.compare(lambda seed: rising, SPACE, [8], 3, console, "nothing")
    assert "0 of 3" in console.export_text()
    assert json.loads(json.dumps(results, allow_nan=False))["8"]["our_epochs"] is None


def test_an_oracle_tells_the_end_of_what_does_not_diverge() -> None:
    rng = np.random.default_rng(0)
    assert search.foretold(rising)({"momentum": 0.9}, rng) == ([4.5] * 5, 10.0)
    assert search.foretold(lambda params, rng: ([0.1, 0.2], 1.0))({}, rng) == ([0.1, 0.2], 1.0)


def test_recorded_curves_answer_for_what_is_nearest(tmp_path: Path) -> None:
    rows = [
        {"params": {}, "map": [0.1] * 10, "pass_s": 2.0},
        {"params": {"max_lr": 0.05, "momentum": 0.8}, "map": [0.01 * n for n in range(1, 11)], "pass_s": 3.0},
        {"params": {"max_lr": 0.001, "momentum": 0.98}, "map": [], "pass_s": None, "failure": "diverged"},
    ]
    path = tmp_path / "curves.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = search.Recorded(path, SPACE)
    near = curve({"max_lr": 0.049, "momentum": 0.81}, np.random.default_rng(0))
    assert near == (pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1], rel=1e-5), 5.0)  # the median of 2 and 3 s, twice
    assert near[0][-1] == 0.1 and near[0][0] > 0.02  # only what is reported before the end is never the same twice


def test_curves_of_fewer_passes_than_epochs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    path.write_text(json.dumps({"params": {}, "map": [0.1, 0.2], "pass_s": 1.0}))
    with pytest.raises(UserError, match="curves of 2 passes; allowed: at least 5"):
        search.Recorded(path, SPACE)


def test_settings_to_record_begin_with_the_defaults_and_fill_the_ranges_evenly() -> None:
    settings = record_curves.draw(SPACE, 65, seed=0)
    assert settings[0] == {}
    points = np.array([search.unit(setting, SPACE) for setting in settings[1:]])
    for column in points.T:
        assert set(np.histogram(column, bins=8, range=(0, 1))[0]) <= {6, 7, 8, 9, 10}
    assert record_curves.draw(SPACE, 9, seed=0) == settings[:9]


def test_a_recorded_row_has_the_map_of_every_pass_and_sets_the_first_pass_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")

    class Training:
        def __init__(self, *_: Any) -> None: ...

        def fit(self, callback: Any) -> None:
            for value, seconds in ((0.1, 5.0), (0.25, 2.0), (0.3, 2.5)):
                callback.on_epoch(self, {"map": value, "train_s": seconds})

    monkeypatch.setattr("autospeed_model.trainer.Trainer", Training)
    monkeypatch.setattr("autospeed_model.packed.PackedDataset", lambda folder: SimpleNamespace(split=str))
    settings = {"max_lr": 0.01}
    row = record_curves.train(Path("data"), settings, {}, 3, "cpu")
    assert row["params"] == settings and row["map"] == [0.1, 0.25, 0.3]
    assert (row["pass_s"], row["first_pass_s"]) == (2.25, 5.0)  # graphs are captured in the first one
