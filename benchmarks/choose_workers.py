"""Joins tables of ``hpcjobs.throughput`` and holds the choice of ``--mode auto`` against what was measured."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpcjobs.errors import UserError, run_entry
from hpcjobs.mode_choice import Need, choose
from hpcjobs.throughput_report import write_report
from hpcjobs.throughput_table import ThroughputTable

# images/s, the most that several processes of the public code reached together on one H200
REFERENCE, GOAL = 854.0, 2.2
ALLOWED_LOSS = 0.05
# so many that the number of rounds decides nothing
TRIALS = 100_000


def joined(tables: list[ThroughputTable]) -> ThroughputTable:
    """One table with the rows of all; they must be of the same machine and settings."""
    first = tables[0]
    for table in tables[1:]:
        if (table.node["gpu"], table.objective, table.settings) != (first.node["gpu"], first.objective, first.settings):
            raise UserError("the tables are of different machines, objectives or settings; join those of one machine")
    return replace(first, rows=tuple(row for table in tables for row in table.rows))


def check(table: ThroughputTable) -> bool:
    """Print for each batch size what was measured and chosen; whether every choice is nearly the best."""
    good = True
    for batch in table.batch_sizes:
        need = Need(TRIALS, 1, (batch,), table.precisions[0], table.objective, table.settings)
        chosen = choose(need, None, table)
        rows = {row.setup: row for row in table.rows if row.batch_size == batch}
        best = max((row.end_to_end or 0.0 for row in rows.values()), default=0.0)
        for setup, row in rows.items():
            mark = "  <- chosen" if setup == chosen.setup else ""
            speed = f"{row.end_to_end:8.1f} images/s end to end" if row.end_to_end else f"{row.status:>8}"
            print(f"batch {batch:4}, {row.per_gpu} a GPU: {speed}{mark}")
        share = (rows[chosen.setup].end_to_end or 0.0) / best if best and chosen.setup in rows else 0.0
        good = good and share >= 1 - ALLOWED_LOSS
        print(f"batch {batch:4}: the choice reaches {share:.1%} of the best. {chosen.reason}")
    return good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", type=Path, help="results/throughput.json of experiments")
    parser.add_argument("--out", required=True, type=Path, help="folder for the joined table and its page")
    options = parser.parse_args(arguments)
    table = joined([ThroughputTable.read(path) for path in options.tables])
    write_report(options.out, table, with_charts=False)
    good = check(table)
    best = max((row.end_to_end or 0.0 for row in table.rows), default=0.0)
    print(f"most: {best:.0f} images/s, {best / REFERENCE:.2f} times the reference's {REFERENCE:.0f} (aim: {GOAL})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(run_entry(main))
