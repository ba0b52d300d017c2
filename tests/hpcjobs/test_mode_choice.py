"""``--mode auto``: from a table where one fits, else by a rule; every answer says which and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autospeed_model.objective import train_trial
from hpcjobs.config import Categorical, ClusterConfig, ModeSelection, StudyConfig, Uniform
from hpcjobs.mode_choice import Need, choose, does_not_fit, need_of
from tests.hpcjobs.published import published_table

OBJECTIVE = "autospeed_model.objective:train_trial"
SWITCHABLE = ModeSelection(by="constraint", modes=("spx", "dpx", "qpx", "cpx"), default="spx")


def need(**change: Any) -> Need:
    return Need(**{
        "trials": 1000, "nodes": 1, "batch_sizes": (32,), "precision": "auto", "objective": OBJECTIVE, "settings": {},
        **change,
    })  # fmt: skip


def site(**change: Any) -> ClusterConfig:
    return ClusterConfig(**{
        "name": "mi300x-generic", "cores_per_node": 96, "gpu_memory_gb": 192, "mode": SWITCHABLE, **change
    })  # fmt: skip


@pytest.mark.parametrize(
    ("batch_size", "mode"), [(8, "cpx"), (16, "cpx"), (64, "dpx"), (128, "dpx"), (256, "dpx"), (1024, "spx")]
)
def test_with_many_trials_the_fastest_measured_mode_is_chosen(batch_size: int, mode: str) -> None:
    choice = choose(need(batch_sizes=(batch_size,), trials=100_000), site(), published_table())
    assert choice.setup.mode == mode
    assert choice.reason.startswith(f"measured (table published): at batch size {batch_size}")


def test_of_equally_fast_modes_the_one_with_fewer_workers_searches_better() -> None:
    # 7,570 in QPX with 32 workers, 7,384 in CPX with 63, 7,206 in DPX with 16: the last is within 5%, not 3%
    assert choose(need(trials=100_000), site(), published_table()).setup.mode == "qpx"


def test_a_last_round_of_few_trials_counts_against_many_workers() -> None:
    # 64 trials on 63 workers: the 64th would run alone in a second round
    table = published_table()
    assert choose(need(trials=63, batch_sizes=(16,)), site(), table).setup.mode == "cpx"
    assert choose(need(trials=64, batch_sizes=(16,)), site(), table).setup.mode == "qpx"


def test_the_estimate_agrees_with_the_published_study_on_the_order_of_spx_and_cpx() -> None:
    # published: 100 trials at batch size 32 took 1.47 times as long in SPX as in CPX
    rows = tuple(row for row in published_table().rows if row.mode in ("spx", "cpx"))
    choice = choose(need(trials=100), site(), dataclasses.replace(published_table(), rows=rows))
    assert choice.setup.mode == "cpx"
    assert "spx 4,528 images/s, 13 rounds, 1.35 times the time" in choice.reason


def test_a_mode_in_which_one_of_the_searched_batch_sizes_does_not_fit_is_out() -> None:
    choice = choose(need(batch_sizes=(8, 256)), site(), published_table())
    assert choice.setup.mode != "cpx"
    assert "Out of memory or not measured: cpx" in choice.reason


def test_few_trials_per_worker_are_told_with_what_fewer_workers_would_cost() -> None:
    choice = choose(need(trials=63, batch_sizes=(16,)), site(), published_table())
    assert choice.setup.mode == "cpx"
    (note,) = choice.notes
    assert note.startswith("63 trials for 63 workers: the sampler has 1.0 trials per worker to learn from")
    assert "as would qpx: 32 workers" in note


def test_a_faster_precision_and_the_hosts_limit_are_noted() -> None:
    table = published_table()
    rows = [dataclasses.replace(row, host_limit="CPUs: 99% of 96 busy") for row in table.rows]
    rows += [dataclasses.replace(row, precision="fp32", end_to_end=2 * (row.end_to_end or 0)) for row in table.rows]
    choice = choose(need(trials=100_000), site(), dataclasses.replace(table, rows=tuple(rows)))
    assert any("precision fp32 is 2.00 times as fast" in note for note in choice.notes)
    assert any("the host was the limit while this was measured: CPUs" in note for note in choice.notes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"objective": "mine:train"}, "the table measured autospeed_model.objective:train_trial"),
        ({"batch_sizes": (48,)}, "batch size 48 in precision auto is not in the table"),
        ({"precision": "fp16"}, "batch size 32 in precision fp16 is not in the table"),
        ({"batch_sizes": ()}, "batch size is not known"),
        ({"settings": {"size": "s"}}, "measured with size=n, the study has size=s"),
    ],
)
def test_a_table_of_something_else_is_not_used_and_that_is_said(change: dict[str, Any], why: str) -> None:
    table = dataclasses.replace(published_table(), settings={"size": "n"})
    asked = need(**change)
    assert why in (does_not_fit(table, asked, site()) or "")
    assert why in choose(asked, site(), table).reason


def test_a_table_of_another_cluster_is_not_used() -> None:
    assert "measured on mi300x-generic" in choose(need(), site(name="other"), published_table()).reason


@pytest.mark.parametrize(("memory_gb", "mode"), [(10, "cpx"), (30, "qpx"), (60, "dpx"), (100, "spx"), (500, "spx")])
def test_the_rule_takes_the_finest_mode_with_enough_memory(memory_gb: float, mode: str) -> None:
    choice = choose(need(memory_gb=memory_gb), site(), None)
    assert choice.setup.mode == mode
    assert choice.reason.startswith("rule, since there is no table of measurements")


def test_the_rule_says_which_figures_stood_against_finer_modes() -> None:
    reason = choose(need(memory_gb=30), site(), None).reason
    assert "cpx has 24 GB a logical GPU, batch size 32 needs 30" in reason


def test_the_rule_wants_a_core_and_its_host_memory_for_every_worker() -> None:
    few_cores = choose(need(memory_gb=1), site(cores_per_node=40), None)
    assert (few_cores.setup.mode, few_cores.workers) == ("qpx", 32)
    assert "cpx would give 64 workers 40 cores" in few_cores.reason
    little_memory = choose(need(memory_gb=1, host_memory_gb=6), site(mem_gb_per_node=128), None)
    assert little_memory.setup.mode == "dpx"


@pytest.mark.parametrize(
    ("change", "host_memory_gb", "workers", "why"),
    [
        ({"cores_per_node": 6}, None, 6, "one worker a GPU would give 8 workers 6 cores, less than one each"),
        ({"mem_gb_per_node": 40}, 9.0, 4, "would give a worker 5.0 GB of host memory, it needs 9.0"),
        ({"mem_gb_per_node": 4}, 9.0, 1, "would give a worker 0.5 GB of host memory"),
    ],
)
def test_where_the_host_is_too_small_for_all_gpus_some_stay_idle(
    change: dict[str, int], host_memory_gb: float | None, workers: int, why: str
) -> None:
    choice = choose(need(host_memory_gb=host_memory_gb), site(mode=ModeSelection(), **change), None)
    assert (choice.setup.mode, choice.workers, choice.some_idle) == (None, workers, True)
    assert why in choice.reason


def test_no_more_workers_than_trials_are_chosen() -> None:
    choice = choose(need(trials=20, nodes=2, memory_gb=1), site(), None)
    assert (choice.setup.mode, choice.workers) == ("dpx", 10)
    assert "qpx has 32 logical GPUs a node for 10 trials" in choice.reason


def test_nodes_that_cannot_be_switched_are_taken_as_they_are() -> None:
    choice = choose(need(), site(mode=ModeSelection()), None)
    assert (choice.setup.mode, choice.workers) == (None, 8)
    assert choose(need(trials=100), None, None, devices=2).workers == 2


def test_the_need_of_a_study_is_read_off_its_space_its_fixed_values_and_the_defaults() -> None:
    space = {"x": Uniform(type="uniform", min=0, max=1)}
    memory = {"device_fixed_gb": 1.0, "device_gb_per_image": 0.1, "host_gb": 2.0}
    defaults = {"batch_size": 32, "precision": "auto", "size": "n"}
    plain = need_of(StudyConfig(parameters=space), 2, defaults, memory)
    assert (plain.batch_sizes, plain.precision, plain.host_memory_gb) == ((32,), "auto", 2.0)
    assert plain.memory_gb == pytest.approx(4.2)
    of_size_n = {**memory, "settings": {"size": "n"}}
    assert need_of(StudyConfig(parameters=space), 2, defaults, of_size_n).memory_gb == plain.memory_gb
    for other in ({**defaults, "size": "m"}, {"batch_size": 32}):
        unknown = need_of(StudyConfig(parameters=space), 2, other, of_size_n)
        assert (unknown.memory_gb, unknown.host_memory_gb) == (None, None)
    fixed = need_of(StudyConfig(parameters=space, fixed={"batch_size": 8, "precision": "fp32"}), 1, defaults, None)
    assert (fixed.batch_sizes, fixed.precision, fixed.memory_gb) == ((8,), "fp32", None)
    searched = {**space, "batch_size": Categorical(type="categorical", values=(16, 64, 32))}
    assert need_of(StudyConfig(parameters=searched), 1, defaults, memory).batch_sizes == (16, 32, 64)


def test_what_the_detector_needs_is_known_for_the_size_that_was_measured() -> None:
    memory = train_trial.memory
    space = {"momentum": Uniform(type="uniform", min=0.8, max=0.99)}
    defaults = {name: declared["default"] for name, declared in train_trial.parameters.items()}
    found = need_of(StudyConfig(parameters=space, trials=200), 1, defaults, memory)
    assert found.batch_sizes == (32,)
    assert found.memory_gb == pytest.approx(5.056)
    assert choose(found, site(), None).setup.mode == "cpx"
    large = need_of(StudyConfig(parameters=space, trials=200, fixed={"batch_size": 256}), 1, defaults, memory)
    assert choose(large, site(), None).setup.mode == "qpx"
    other = need_of(StudyConfig(parameters=space, fixed={"size": "m"}), 1, defaults, memory)
    assert other.memory_gb is None
