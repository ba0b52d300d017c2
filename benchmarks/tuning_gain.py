"""The best recorded parameters against the defaults, without a study: what ``hpcjobs.final`` does, in plain processes.

For a machine on which workers cannot run. Every training is that of ``hpcjobs.final``, from the first weights
(:mod:`benchmarks.first_weights`), tested once on the evaluation split; the figures are put together by the same code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record_curves import Row, append, end_with_parent_on_sigterm, read_rows, read_study, shared_device, tell
from hpcjobs.final_plan import BEST, DEFAULT
from hpcjobs.final_results import FinalResults, Spread


@dataclass
class Alone:
    """What an objective asks of its trial, where there is no study and nobody stops it."""

    checkpoint: Path
    data: Path | None
    epochs: int
    device: str
    figures: dict[str, float] = field(default_factory=dict)
    stop_requested: bool = False

    def hand_back(self) -> None:
        raise AssertionError("nobody has asked for it")

    def report(self, step: int, value: float, **figures: float) -> None:
        self.figures = figures


def best_of(rows: list[Row], passes: int) -> dict[str, float]:
    """The parameters of the recorded training that ended highest, the defaults' left out."""
    ended = [row for row in rows if len(row["map"]) == passes and row["params"]]
    best: dict[str, float] = max(ended, key=lambda row: row["map"][-1])["params"]
    return best


def results_of(trained: list[Row], asked: int) -> FinalResults:
    """Mean and spread of the figures of each setting; what has not ended counts as failed."""
    figures: dict[str, dict[str, Spread]] = {}
    for setting in (BEST, DEFAULT):
        own = [row["figures"] for row in trained if row["setting"] == setting]
        if own:
            figures[setting] = {name: Spread.of([one[name] for one in own]) for name in own[0]}
    return FinalResults(figures, asked - len(trained))


def _train(given: argparse.Namespace, setting: str, params: dict[str, Any], seed: int) -> None:
    from benchmarks.first_weights import train_final

    folder = given.folder / f"{setting}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    context = Alone(folder / "checkpoint.pt", given.data, given.epochs, given.device)
    train_final({**params, "seed": seed}, context)
    append(given.folder / "trained.jsonl", {"setting": setting, "seed": seed, "figures": context.figures})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the trainings; FOLDER/final.json holds the figures")
    parser.add_argument("--curves", type=Path, required=True, help="lines of benchmarks/record_curves.py")
    parser.add_argument("--data", type=Path, required=True, help="prepared data with the first weights, first.pt")
    parser.add_argument("--study", type=Path, default=Path("benchmarks/rendered.yaml"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    _, fixed = read_study(given.study)
    rows = read_rows(given.curves)
    best = best_of(rows, max(len(row["map"]) for row in rows))
    settings = {BEST: fixed | best, DEFAULT: fixed}
    tell(f"{given.seeds} trainings each: defaults, and {best}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    end_with_parent_on_sigterm()
    given.folder.mkdir(parents=True, exist_ok=True)
    given.processes = given.seeds * len(settings)
    with shared_device(given):
        processes = [
            context.Process(target=_train, args=(given, setting, params, seed), daemon=True)
            for seed in range(given.seeds)
            for setting, params in settings.items()
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            time.sleep(0.1)
    results = results_of(read_rows(given.folder / "trained.jsonl"), given.processes)
    if not results.figures:
        tell("no training has ended")
        return 1
    (given.folder / "final.json").write_text(json.dumps(results.as_dict(), indent=1) + "\n", encoding="utf-8")
    (given.folder / "settings.json").write_text(json.dumps({BEST: best, DEFAULT: {}}) + "\n", encoding="utf-8")
    tell(f"{len(results.figures)} settings have figures, {results.failed} trainings failed")
    return 0 if results.gain("map") is not None else 1


if __name__ == "__main__":
    sys.exit(main())
