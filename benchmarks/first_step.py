"""Where a training process's time goes until its first step: ``python benchmarks/first_step.py --data OUT``.

Run it after ``training_speed.py`` to see what a later worker of a node waits for. Every stage ends with a wait for the
device, so that the sum is a little more than an undisturbed start. Work of the host inside a stage is told beside it:
choosing between versions of Triton kernels by trying, and loading them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from autospeed_model import compile_cache  # noqa: E402
from autospeed_model.accelerator import prepare_process  # noqa: E402
from autospeed_model.errors import run_entry  # noqa: E402
from autospeed_model.hyperparameters import Hyperparameters, RuntimeOptions, TrainingOptions  # noqa: E402
from autospeed_model.packed import PackedDataset  # noqa: E402
from autospeed_model.runtime import add_runtime_arguments, runtime_from  # noqa: E402
from autospeed_model.trainer import Trainer  # noqa: E402


class Stages:
    """Seconds by stage, in the order of their ends."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._last = wait, STARTED
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        self._wait()
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 3)
        self._last = now


class Counted:
    """Calls of a method of a class and the seconds in them, in whatever thread."""

    def __init__(self, owner: Any, name: str) -> None:
        self.calls, self.seconds = 0, 0.0
        plain = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            started = time.monotonic()
            try:
                return plain(*arguments, **options)
            finally:
                self.calls += 1
                self.seconds += time.monotonic() - started

        setattr(owner, name, counted)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    runtime = runtime_from(given, RuntimeOptions())
    stages = Stages(runtime.wait)
    stages.end("import")
    data = PackedDataset(given.data)
    hyperparameters = Hyperparameters(batch_size=given.batch_size, max_lr=1e-3)
    trainer = Trainer(data.split("train"), None, hyperparameters, TrainingOptions(size=given.size), runtime)
    if given.no_search:
        torch.backends.cudnn.benchmark = False
    stages.end("trainer")
    counted: dict[str, Counted] = {}
    if runtime.compile and runtime.on_gpu:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        counted = {
            "kernel versions tried": Counted(CachingAutotuner, "benchmark_all_configs"),
            "kernels loaded": Counted(CachingAutotuner, "_make_launchers"),
        }
        stages.end("import of the compiler")
    load = compile_cache._load

    def timed_load(file: Path) -> Any:
        stages.end("batch")
        code = load(file)
        stages.end("load code")
        return code

    compile_cache._load = timed_load
    step = trainer.training_step
    accumulate = step._accumulate_now

    def timed_accumulate() -> None:
        losses = step._losses

        def timed_losses(*arguments: Any) -> Any:
            found = losses(*arguments)
            stages.end("first forward")
            return found

        stages.end("compile")
        step._losses = timed_losses
        accumulate()
        step._losses = losses
        stages.end("first backward")
        put(accumulate)

    def put(function: Callable[[], None]) -> None:
        step._accumulate_now = function  # type: ignore[method-assign]
        step._accumulate = function
        step.reset()

    put(timed_accumulate)
    trainer.network.train()
    for _, batch in trainer.batches.of_epoch(0):
        step.accumulate(*batch)
        stages.end("other steps, with their capture as a graph")
    return {
        "total_s": round(sum(stages.seconds.values()), 3),
        "stages_s": stages.seconds,
        "inside": {name: [one.calls, round(one.seconds, 3)] for name, one in counted.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="dataset folder made by autospeed_model.prepare")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", default="n", help="size of the network (default n)")
    parser.add_argument("--no-search", action="store_true", help="take convolution algorithms without trying them")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    add_runtime_arguments(parser)
    given = parser.parse_args(arguments)
    prepare_process()
    text = json.dumps(measure(given), indent=1)
    if given.json is not None:
        given.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
