"""Studies on the emulated cluster under a seeded schedule of faults, and the proof that they lost nothing.

    make chaos

Each round is a study of its own: faults are drawn by weight and injected one after another while it runs, then it runs
to its end undisturbed and the checker reads its journal.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcjobs.paths import write_atomically
from tests.cluster.chaos.checker import CLAIMS, Verdict, check
from tests.cluster.chaos.ends import Ends
from tests.cluster.chaos.faults import FAULTS
from tests.cluster.chaos.processes import Fault, Injected
from tests.cluster.chaos.world import World
from tests.cluster.daemons import ClusterError
from tests.cluster.emulator import Cluster, why_not_here

FIRST_TRIALS = 60
# trials that must be left while faults are still to come
SPARE_TRIALS = 40
# a fault that has been impossible so often (there was no such process) is given up
MOST_TRIES = 40


@dataclass
class Record:
    """One injected fault, as the report keeps it."""

    number: int
    kind: str
    at_s: float
    evidence: str
    victims: list[int]
    damage: int = 0
    must_be_undone: bool = False
    undone: str | None = None


@dataclass
class Round:
    lock: str
    records: list[Record] = field(default_factory=list)
    verdict: Verdict | None = None
    seconds: float = 0.0
    most_waiting_s: float = 0.0


class Storm:
    """Injects faults into one study. Threads undo what is to be undone, since a fault may wait for just that."""

    def __init__(self, world: World, pause_s: float, report: Callable[[str], None]) -> None:
        self.records: list[Record] = []
        self._world = world
        self._pause_s = pause_s
        self._report = report
        self._begin = time.monotonic()
        self._timers: list[threading.Timer] = []

    def rage(self, faults: int, every: list[Fault]) -> None:
        """Inject so many faults, and among them one of each that ``every`` names, most of these early."""
        to_come = list(every)
        tries: Counter[Fault] = Counter()
        kept = time.monotonic()
        while len(self.records) < faults:
            if time.monotonic() - kept > 5.0:
                self._world.keep_going(SPARE_TRIALS)
                kept = time.monotonic()
            # now and then any other one, as long as there is room for these
            any_other = self._world.rng.random() < 0.2 and len(to_come) < faults - len(self.records)
            if to_come and not any_other:
                fault = to_come[0]
            else:
                fault = self._world.rng.choices(list(FAULTS), list(FAULTS.values()))[0]
            injected = fault(self._world)
            if injected is not None:
                self._note(fault, injected)
            if fault in to_come:
                to_come.remove(fault)
                tries[fault] += 1
                if injected is None and tries[fault] < MOST_TRIES:
                    to_come.append(fault)
            time.sleep(self._world.rng.expovariate(1 / self._pause_s))

    def calm(self, timeout_s: float) -> None:
        """Wait for what is left to undo, and let the study run to its end."""
        end = time.monotonic() + timeout_s
        self.undo_all()
        while self._world.ledger.left:
            self._world.keep_going(0)
            if time.monotonic() > end:
                raise ClusterError(f"the study has not ended: {self._world.ledger.left[:5]}; see {self._world.folder}")
            time.sleep(1.0)

    def undo_all(self) -> None:
        """Wait for all that is to be undone."""
        for timer in self._timers:
            timer.join()

    def _note(self, fault: Fault, injected: Injected) -> None:
        at = round(time.monotonic() - self._begin, 2)
        record = Record(len(self.records) + 1, fault.__name__, at, injected.evidence, injected.victims, injected.damage)
        self.records.append(record)
        if injected.undo is not None:
            record.must_be_undone = True
            timer = threading.Timer(injected.undo_after_s, self._undo, (record, injected.undo))
            self._timers.append(timer)
            timer.start()
        self._report(f"{record.number:4d} {at:7.1f} s  {record.kind}: {record.evidence}")

    def _undo(self, record: Record, undo: Callable[[], str]) -> None:
        record.undone = undo()


def run_round(
    cluster: Cluster, folder: Path, *, seed: int, faults: int, lock: str, every: list[Fault],
    options: argparse.Namespace, report: Callable[[str], None],
) -> Round:  # fmt: skip
    """One study, its faults, its end and its verdict."""
    world = World(cluster, folder, random.Random(seed), options.nodes, options.workers)
    begin = time.monotonic()
    cluster.reset()
    world.begin(FIRST_TRIALS, lock)
    storm, ends = Storm(world, options.pause, report), Ends(world.diary)
    ends.start()
    try:
        storm.rage(faults, every)
        storm.calm(options.patience)
    finally:
        storm.undo_all()
        world.end()
    fixed = {"base": 0.1, "step_s": world.step_s}
    verdict = check(
        folder / "journal.log", world.diary, budget=world.budget, fixed=fixed, epochs=world.epochs, ends=ends.stop()
    )
    verdict.wrong["faults not accounted for"] = unaccounted(storm.records, folder / "journal.lost.jsonl")
    return Round(lock, storm.records, verdict, time.monotonic() - begin)


def unaccounted(records: list[Record], lost: Path) -> list[str]:
    """Faults of which nothing is to be seen. That each interrupted run went on is a claim of its own."""
    wrong = [f"{each.number} {each.kind} was not undone" for each in records if each.must_be_undone and not each.undone]
    put = sum(record.damage for record in records)
    found = sum(json.loads(line)["length"] for line in lost.read_text().splitlines()) if lost.exists() else 0
    if found < put:
        wrong.append(f"{put} bytes of damage were put into the journal, {found} were repaired and reported")
    return wrong


def show(rounds: list[Round], console: Console) -> None:
    injected = Counter(record.kind for each in rounds for record in each.records)
    table = Table("fault", "injected", title=f"{injected.total()} faults")
    for kind in sorted(injected):
        table.add_row(kind.replace("_", " "), str(injected[kind]))
    console.print(table)
    verdicts = [each.verdict for each in rounds if each.verdict]
    claims = Table("claim", "against it", title="proved from the journals")
    for claim in CLAIMS:
        claims.add_row(claim, str(sum(len(verdict.wrong[claim]) for verdict in verdicts)))
    console.print(claims)
    names = list(dict.fromkeys(name for verdict in verdicts for name in verdict.figures))
    figures = Table("", *[f"round {n}, {each.lock} lock" for n, each in enumerate(rounds, 1)], title="looked at")
    for name in names:
        figures.add_row(name, *[f"{verdict.figures.get(name, 0):g}" for verdict in verdicts])
    figures.add_row("faults", *[str(len(each.records)) for each in rounds])
    figures.add_row("seconds", *[f"{each.seconds:.0f}" for each in rounds])
    console.print(figures)
    for verdict in verdicts:
        for claim, found in verdict.wrong.items():
            for text in found[:10]:
                console.print(f"AGAINST {claim}: {text}", style="red", markup=False)


def as_dict(rounds: list[Round], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "faults": sum(len(each.records) for each in rounds),
        "holds": all(each.verdict and each.verdict.holds for each in rounds),
        "rounds": [
            {
                "lock": each.lock,
                "seconds": round(each.seconds, 1),
                "figures": each.verdict.figures if each.verdict else {},
                "recoveries_s": sorted(round(s, 2) for s in each.verdict.recoveries_s) if each.verdict else [],
                "after_end_s": sorted(round(s, 2) for s in each.verdict.after_end_s) if each.verdict else [],
                "wrong": each.verdict.wrong if each.verdict else {},
                "faults": [vars(record) for record in each.records],
            }
            for each in rounds
        ],
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.chaos.run",
        description="Inject faults into studies on the emulated cluster, prove by the journals that they lost nothing.",
        epilog="example: python -m tests.cluster.chaos.run --faults 30 --rounds 1 --keep /tmp/chaos",
    )
    parser.add_argument("--faults", type=int, default=500, metavar="N", help="in all rounds (default: 500)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="studies; the last has a soft lock (default: 5)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the schedule (default: 1)")
    parser.add_argument(
        "--nodes", type=int, default=4, metavar="N", help="of the cluster and of each study (default: 4)"
    )
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="per node (default: 3)")
    parser.add_argument(
        "--pause", type=float, default=0.6, metavar="S", help="mean seconds between faults (default: 0.6)"
    )
    parser.add_argument("--patience", type=float, default=400.0, metavar="S", help="for a study to end (default: 400)")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="for journals, diaries and report.json; without it they are kept only if a claim does not hold",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    reason = why_not_here()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    folder = options.keep.absolute() if options.keep else Path(tempfile.mkdtemp(prefix="chaos-"))
    rounds: list[Round] = []
    with Cluster(folder / "cluster", options.nodes) as cluster:
        for number in range(options.rounds):
            soft = options.rounds > 1 and number == options.rounds - 1
            share = options.faults // options.rounds + (number < options.faults % options.rounds)
            rounds.append(run_round(
                cluster, folder / f"round-{number + 1}", seed=options.seed * 1000 + number, faults=share,
                lock="soft" if soft else "kernel", every=list(FAULTS) if share >= len(FAULTS) else [],
                options=options, report=console.print,
            ))  # fmt: skip
            write_atomically(folder / "report.json", json.dumps(as_dict(rounds, options), indent=1))
    show(rounds, console)
    holds = all(each.verdict and each.verdict.holds for each in rounds)
    if holds and not options.keep:
        shutil.rmtree(folder)
    else:
        console.print(f"journals, diaries and report.json: {folder}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
