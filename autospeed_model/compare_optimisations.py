"""What each optimisation of a training brings: ``python -m autospeed_model.compare_optimisations --out FOLDER``.

Every row is a process of its own, one after another: the variants of ``benchmarks/reference_variants.py``, which are
written as such trainings usually are, then this project's own training.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from autospeed_model.errors import UserError, run_entry

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = """\
examples:
  python -m autospeed_model.compare_optimisations --out runs/comparison
  python -m autospeed_model.compare_optimisations --out runs/comparison --data OUT --source RENDERED --batch-size 8
  python -m autospeed_model.compare_optimisations --out runs/comparison --rows original,all,ours --seconds 20
"""


class Row(NamedTuple):
    """A name for the table, and the command below ``benchmarks``."""

    title: str
    command: tuple[str, ...]


def _reference(variant: str) -> tuple[str, ...]:
    return "reference_variants.py", variant


ROWS = {
    "original": Row("original", _reference("original")),
    "vectorised": Row("vectorised loss", _reference("vectorised")),
    "preprocessed": Row("pre-processed images", _reference("preprocessed")),
    "compiled": Row("torch.compile", _reference("compiled")),
    "all": Row("all three", _reference("all")),
    "ours-plain": Row(
        "ours, fp32, not compiled",
        ("training_speed.py", "--precision", "fp32", "--compile", "never", "--graphs", "never"),
    ),
    "ours-no-graphs": Row("ours without graphs", ("training_speed.py", "--graphs", "never")),
    "ours-host": Row("ours, images on the host", ("training_speed.py", "--images", "host")),
    "ours": Row("ours", ("training_speed.py",)),
}


class Measured(NamedTuple):
    """Images a second."""

    title: str
    compute_only: float
    end_to_end: float


def measure(row: Row, arguments: Sequence[str]) -> Measured:
    """Run one row.

    :raises UserError: when it fails, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        script, *options = row.command
        own = list(arguments) if script == "reference_variants.py" else _without_source(arguments)
        command = [sys.executable, str(ROOT / "benchmarks" / script), *options, *own, "--json", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
        if done.returncode:
            raise UserError(f"'{row.title}' failed with code {done.returncode}:\n{done.stderr[-1500:]}")
        found = json.loads(result.read_text())
    return Measured(row.title, found["compute_only"], found["end_to_end"])


def _without_source(arguments: Sequence[str]) -> list[str]:
    """Our own training needs no JPEG files."""
    place = list(arguments).index("--source")
    return [*arguments[:place], *arguments[place + 2 :]]


def write(measured: Sequence[Measured], folder: Path) -> None:
    """``comparison.csv`` and, where matplotlib is installed, ``comparison.png``."""
    with (folder / "comparison.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "compute_only_images_per_s", "end_to_end_images_per_s"])
        writer.writerows([row.title, f"{row.compute_only:.1f}", f"{row.end_to_end:.1f}"] for row in measured)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart: matplotlib is not installed", file=sys.stderr)
        return
    figure = Figure(figsize=(8, 0.6 * len(measured) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(measured))
    axes.barh([p - 0.2 for p in places], [row.compute_only for row in measured], 0.4, label="compute-only")
    axes.barh([p + 0.2 for p in places], [row.end_to_end for row in measured], 0.4, label="end to end")
    axes.set_yticks(list(places), [row.title for row in measured])
    axes.invert_yaxis()
    axes.set_xlabel("images/s")
    axes.legend()
    figure.savefig(folder / "comparison.png", dpi=150)


def make_data(folder: Path) -> tuple[Path, Path]:
    """Rendered frames in OpenLane's layout, and the dataset prepared from them."""
    from autospeed_model.prepare import main as prepare
    from autospeed_model.render import main as render

    source, data = folder / "rendered", folder / "prepared"
    if render([str(source)]) or prepare([str(source), str(data)]):
        raise UserError(f"{folder}: no data could be made; give --data and --source")
    return source, data


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.compare_optimisations",
        description="Compare a usual training, its published optimisations and this project's, in\nimages a second.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for table and chart")
    parser.add_argument("--data", type=Path, help="prepared dataset (default: rendered frames, made below --out)")
    parser.add_argument("--source", type=Path, help="the OpenLane folder that --data was prepared from")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="end-to-end time of each row (default 10)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of {', '.join(ROWS)} (default: all)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    names = given.rows.split(",")
    for name in names:
        if name not in ROWS:
            raise UserError(f"--rows: {name!r}; allowed are {', '.join(ROWS)}")
    if not (ROOT / "benchmarks").is_dir():
        raise UserError(
            f"{ROOT}/benchmarks is missing: the variants belong to a checkout of the project, not a package"
        )
    if (given.data is None) != (given.source is None):
        raise UserError("give both --data and --source, or neither")
    if given.batch_size < 1 or given.seconds <= 0:
        found = f"--batch-size {given.batch_size} --seconds {given.seconds:g}"
        raise UserError(f"found {found}; allowed are a whole number from 1 and any number above 0")
    given.out.mkdir(parents=True, exist_ok=True)
    source, data = (given.source, given.data) if given.data else make_data(given.out)
    options = ["--data", str(data.resolve()), "--source", str(source.resolve())]
    options += ["--batch-size", str(given.batch_size), "--seconds", str(given.seconds)]
    options += ["--device", given.device] if given.device else []
    measured = []
    for name in names:
        measured.append(measure(ROWS[name], options))
        row = measured[-1]
        print(f"{row.title}: {row.compute_only:.4g} compute-only, {row.end_to_end:.4g} end to end", flush=True)
        write(measured, given.out)
    table = Table("variant", "compute-only", "end to end", title=f"images/s, batch {given.batch_size}")
    for row in measured:
        table.add_row(row.title, f"{row.compute_only:.4g}", f"{row.end_to_end:.4g}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
