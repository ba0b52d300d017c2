"""What came of benchmarks/tuning_suite.sh, as JSON and Markdown: recorded curves, the study, the gain.

Every part is optional: what the machine had no time for is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.record_curves import Row, read_rows
from hpcjobs.final_results import FinalResults, Spread, rows_of, title_of


def ranks(values: list[float]) -> np.ndarray:
    """Ranks from 0; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=float)
    _, place, counts = np.unique(array, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts + 1) / 2)[place])


def spearman(first: list[float], second: list[float]) -> float | None:
    """Rank correlation; None where one of the two does not vary."""
    a, b = ranks(first), ranks(second)
    if len(a) < 3 or a.std() == 0 or b.std() == 0:
        return None
    return round(float(np.corrcoef(a, b)[0, 1]), 3)


def of_curves(rows: list[Row]) -> dict[str, Any]:
    """What recorded curves look like: how high they end, whether early ranks stay, which parameters cost time.

    ``pass_s_with`` are rank correlations of a pass's seconds with each parameter; by chance alone two in three lie
    within ``chance`` on both sides of 0.
    """
    passes = max((len(row["map"]) for row in rows), default=0)
    ended = [row for row in rows if passes and len(row["map"]) == passes]
    if not ended:
        return {"trainings": len(rows), "ended": 0}
    last = [row["map"][-1] for row in ended]
    default = next((row["map"] for row in ended if not row["params"]), None)
    drawn = [row for row in ended if row["params"] and row.get("pass_s")]
    names = list(drawn[0]["params"]) if drawn else []
    seconds = [row["pass_s"] for row in drawn]
    cuts = (0, 10, 25, 50, 75, 90, 100)
    return {
        "trainings": len(rows),
        "ended": len(ended),
        "diverged": sum("failure" in row for row in rows),
        "passes": passes,
        "default": default,
        "best": max(ended, key=lambda row: row["map"][-1]),
        "map_percentiles": dict(zip(map(str, cuts), np.percentile(last, cuts).round(4).tolist(), strict=True)),
        "above_default": None if default is None else sum(value > default[-1] for value in last),
        "ranks_of_pass_and_last": [spearman([row["map"][n] for row in ended], last) for n in range(passes)],
        "map_with": {name: spearman([row["params"][name] for row in drawn], [row["map"][-1] for row in drawn])
                     for name in names},
        "pass_s": np.percentile(seconds, (10, 50, 90)).round(4).tolist() if seconds else None,
        "pass_s_with": {name: spearman([row["params"][name] for row in drawn], seconds) for name in names},
        "chance": round(1 / max(len(drawn) - 1, 1) ** 0.5, 3),
    } | {
        name: round(statistics.median(found), 4)
        for name in ("setup_s", "first_pass_s", "eval_s")
        if (found := [row[name] for row in ended if row.get(name) is not None])
    }  # fmt: skip


def of_study(folder: Path) -> dict[str, Any]:
    """All trials of a study: parameters, values after each epoch, how they ended."""
    from hpcjobs.paths import StudyPaths
    from hpcjobs.study import open_study

    trials = open_study(StudyPaths(folder)).trials()
    begun = [trial.datetime_start for trial in trials if trial.datetime_start]
    ended = [trial.datetime_complete for trial in trials if trial.datetime_complete]
    rows = [
        {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "params": trial.params,
            "map": [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)],
        }
        for trial in trials
    ]
    states = sorted({row["state"] for row in rows})
    complete = [row for row in rows if row["state"] == "complete"]
    return {
        "states": {state: sum(row["state"] == state for row in rows) for state in states},
        "epochs": sum(len(row["map"]) for row in rows),
        "seconds": (max(ended) - min(begun)).total_seconds() if begun and ended else None,
        "best": max(complete, key=lambda row: row["map"][-1], default=None),
        "trials": rows,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report for people, without the single trials."""
    lines = []
    if curves := report.get("curves"):
        lines += ["## Recorded curves", ""]
        lines += [f"- {name}: {_short(value)}" for name, value in curves.items()] + [""]
    if study := report.get("study"):
        lines += ["## Study", ""]
        lines += [f"- {name}: {_short(value)}" for name, value in study.items() if name != "trials"] + [""]
    if "final" in report:
        results = FinalResults(
            {name: {figure: Spread(**one) for figure, one in own.items()}
             for name, own in report["final"]["figures"].items()}, report["final"]["failed"])  # fmt: skip
        header, *rows = rows_of(results)
        lines += [f"## Gain, {title_of(results)}", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
        lines += ["", "A gain in brackets is smaller than the two deviations together.", ""]
        lines += [f"- {name}: {_short(values)}" for name, values in report.get("settings", {}).items()]
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file to write; Markdown goes to the output")
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--study", type=Path, help="folder of the study")
    given = parser.parse_args(arguments)
    report: dict[str, Any] = {}
    if given.curves and (rows := read_rows(given.curves)):
        report["curves"] = of_curves(rows)
    if given.study and (given.study / "journal.log").exists():
        report["study"] = of_study(given.study)
    figures = given.study and given.study / "results/final.json"
    if figures and figures.exists():
        settings = json.loads((given.study / "final/final.json").read_text(encoding="utf-8"))["settings"]
        report |= {"final": json.loads(figures.read_text(encoding="utf-8")), "settings": settings}
    given.out.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
