"""Entry: measures what each partition mode, or each number of workers per GPU, gives for which batch size."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hpcjobs.config import MODES
from hpcjobs.errors import UserError, run_entry
from hpcjobs.load import find_cluster, load_cluster, validate, with_overrides
from hpcjobs.paths import StudyPaths
from hpcjobs.preflight import check_data, check_new_folder, check_slurm
from hpcjobs.slurm import check_path
from hpcjobs.submission import (
    absolute,
    available_cores,
    check_account,
    check_existing_folder,
    cluster_overrides,
    cores_text,
    default_folder,
    group_writes,
    keep_ours,
    told_or_raised,
)
from hpcjobs.text import counted
from hpcjobs.throughput_launch import job_script, open_modes, run_here, submit_jobs, wait_for_jobs
from hpcjobs.throughput_plan import Cell, Setup, ThroughputFile, ThroughputPaths, read_file, write_file
from hpcjobs.throughput_report import findings, sections, write_report
from hpcjobs.throughput_table import gather
from hpcjobs.yaml_file import Document, KeyPath, parse_value, read_yaml

EXIT_UNFINISHED = 1
BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
PER_GPU_HERE = (1, 2, 4, 8)

_EXAMPLES = """\
examples:
  # four modes of a node of eight MI300X: one job per mode, eight batch sizes each
  python -m hpcjobs.throughput --cluster mi300x-generic --data packed --modes spx,dpx,qpx,cpx --wait

  # on this machine: 1, 2, 4 and 8 workers on each GPU (NVIDIA: through MPS where it is installed)
  python -m hpcjobs.throughput --data packed --batch-sizes 8,32,128

  # go on after a time limit; write the tables and charts from what is done
  python -m hpcjobs.throughput --resume runs/throughput-20260101-120000 --wait
  python -m hpcjobs.throughput --report runs/throughput-20260101-120000
"""


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    check_combination(parser, options)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if options.report is not None:
        return report(ThroughputPaths(options.report), console, with_charts=not options.no_charts)
    if options.resume is not None:
        paths, file = resumed_experiment(options)
    else:
        paths, file, lacks = new_experiment(options)
        if options.dry_run:
            return show_dry_run(paths, file, console, lacks)
        if file.cluster is not None:
            check_slurm(file.cluster.name)
        keep_ours(file.cluster)
        paths.submitit.mkdir(parents=True)
        check_existing_folder(paths, file.cluster)  # somebody may have been quicker than us
        write_file(paths, file)
    finished = run(paths, file, console, wait=options.wait)
    if finished is None:
        return 0
    report(paths, console, with_charts=not options.no_charts)
    return 0 if finished else EXIT_UNFINISHED


def run(paths: ThroughputPaths, file: ThroughputFile, console: Console, *, wait: bool) -> bool | None:
    """Whether every cell is done; None if jobs were submitted and nobody waits."""
    if file.cluster is None:

        def on_cell(setup: Setup, cell: Cell, status: str) -> None:
            console.print(f"{setup.name}, batch size {cell.batch_size}, {cell.precision}: {status}")

        console.print(
            f"measuring on this machine, {counted(len(file.cells), 'cell')} a set-up; "
            f"folder {escape(str(paths.folder))}"
        )
        return run_here(paths, file, on_cell) == 0
    submit_jobs(paths, file, console.print)
    folder = shlex.quote(str(paths.folder))
    if not wait:
        console.print(f"  tables so far  python -m hpcjobs.throughput --report {folder}", markup=False)
        console.print(f"  go on          python -m hpcjobs.throughput --resume {folder}", markup=False)
        return None
    return wait_for_jobs(paths, file, console.print)


def report(paths: ThroughputPaths, console: Console, *, with_charts: bool) -> int:
    """Show the tables of the cells that are done, and write all results."""
    file = read_file(paths.folder)
    table = gather(paths, file)
    for title, lines in sections(table)[:2] if table.rows else []:
        shown = Table(*lines[0], title=title, title_justify="left")
        for column in shown.columns[1:]:
            column.justify = "right"
        for line in lines[1:]:
            shown.add_row(*line)
        console.print(shown)
    for finding in findings(table):
        console.print(f"- {finding}", markup=False)
    if left := open_modes(paths, file):
        modes = ", ".join(str(mode or "as-is") for mode in left)
        console.print(f"unfinished: mode {modes}; --resume FOLDER measures the rest", style="yellow")
    files = write_report(paths.results, table, with_charts=with_charts)
    console.print(f"written: {len(files)} files in {paths.results}; look at throughput.html", markup=False)
    copied = "copy throughput.json to NAME.throughput.json beside the profile NAME.yaml, or " if file.cluster else ""
    console.print(f"for --mode auto: {copied}give throughput.json as --throughput-table", markup=False)
    return 0


def check_combination(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An experiment that exists is what it is: with --resume and --report no option may ask for something else.

    Raises:
        UserError: one does.
    """
    of_a_job = ("--account", "--timeout-min", "--set")
    for flag, more in (("report", ("--no-charts",)), ("resume", ("--wait", "--no-charts", *of_a_job))):
        if getattr(options, flag) is None:
            continue
        for name, value in vars(options).items():
            option = f"--{name.replace('_', '-')}"
            if name != flag and option not in more and value != parser.get_default(name):
                raise UserError(
                    f"{option}: found together with --{flag}; allowed: {', '.join(more)}, since the experiment's "
                    f"folder says what is measured; leave {option} out, or begin another experiment"
                )


def resumed_experiment(options: argparse.Namespace) -> tuple[ThroughputPaths, ThroughputFile]:
    """What an experiment's folder says, with what its next jobs are to have otherwise: more time, another account.

    Raises:
        UserError: the folder is no experiment, or was measured on this machine, without jobs.
    """
    paths = ThroughputPaths(absolute(options.resume))
    file = read_file(paths.folder)
    overrides: dict[KeyPath, Any] = {("cluster", *key): value for key, value in cluster_overrides(options).items()}
    if overrides and file.cluster is None:
        raise UserError("--set, --account and --timeout-min: found for an experiment on this machine; leave them out")
    check_existing_folder(paths, file.cluster)
    keep_ours(file.cluster)
    return paths, validate(ThroughputFile, with_overrides(read_yaml(paths.config), overrides))


def new_experiment(options: argparse.Namespace) -> tuple[ThroughputPaths, ThroughputFile, tuple[str, ...]]:
    """From the command line, validated; nothing is made. With it what a dry run passes over: no data, no account.

    Raises:
        UserError: for any mistake in arguments, profile, data or folder.
    """
    overrides = cluster_overrides(options)
    if overrides and options.cluster is None:
        raise UserError("--set, --account and --timeout-min: found without --cluster; leave them out")
    cluster = load_cluster(options.cluster, overrides) if options.cluster is not None else None
    modes = options.modes if options.modes is not None else (cluster.mode.modes if cluster else ())
    offered = cluster.mode.modes if cluster else ()
    for mode in modes:
        if mode not in offered:
            allowed = (
                f"on cluster {cluster.name}: {', '.join(offered) or 'none'}" if cluster else "with --cluster alone"
            )
            raise UserError(f"--modes: found {mode!r}; allowed {allowed}; leave --modes out for the nodes as they are")
    data = absolute(options.data) if options.data is not None else None
    # people look at a plan before hours of preparing data, and before they have a project
    lacks = told_or_raised(
        options.dry_run,
        lambda: check_account(cluster),
        lambda: check_data(data, needed=options.measure.startswith("autospeed_model.")),
    )
    check_measure(options.measure, here=cluster is None or not (cluster.container or cluster.python))
    per_gpu = options.per_gpu or ((1,) if cluster else PER_GPU_HERE)
    values: dict[str, Any] = {
        "name": options.name or (find_cluster(options.cluster).stem if options.cluster else "this machine"),
        "measure": options.measure,
        "settings": dict(options.setting),
        "data": str(data) if data else None,
        "working_folder": str(Path.cwd()),
        "modes": list(modes),
        "per_gpu": list(per_gpu),
        "batch_sizes": list(options.batch_sizes),
        "precisions": list(options.precisions),
        "window_s": options.window_s,
        "cluster": cluster.model_dump(mode="json") if cluster else None,
    }
    file = validate(ThroughputFile, Document(Path("the command line"), values, {}))
    paths = ThroughputPaths(absolute(options.folder) if options.folder else default_folder("throughput"))
    for path in (paths.folder, Path.cwd(), *([data] if data else [])):
        check_path(path)
    check_new_folder(StudyPaths(paths.folder), group_writable=group_writes(cluster))
    return paths, file, lacks


def check_measure(text: str, *, here: bool) -> None:
    """The measuring function's module is there, so that no job waits for a node to tell of a slip of the pen.

    It is not imported: a login node may lack what it needs. ``here``: workers look for it as this process does.

    Raises:
        UserError: the text names no function, or there is no such module.
    """
    allowed = "allowed: module:function, importable where this command is called"
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text):
        raise UserError(f"--measure: found {text!r}; {allowed}; for example my_project.speed:measure")
    if not here:
        return
    top, *inner = text.partition(":")[0].split(".")
    found = PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)
    for name in inner:
        found = PathFinder.find_spec(name, found.submodule_search_locations or []) if found else None
    if found is None:
        raise UserError(
            f"--measure: found {text!r}, but there is no such module; {allowed}; install it, or call this in the "
            f"folder that holds it (now {Path.cwd()})"
        )


def show_dry_run(paths: ThroughputPaths, file: ThroughputFile, console: Console, lacks: tuple[str, ...]) -> int:
    for mode in file.jobs:
        for setup in file.setups(mode):
            plan = file.plan(setup, available_cores())
            cells = ", ".join(cell.name for cell in file.cells)
            workers = f"{counted(plan.workers_per_node, 'worker')}, {cores_text(plan)}"
            console.print(f"{setup.name}: {workers}; cells: {cells}", markup=False)
        if file.cluster is not None:
            print(f"\n# sbatch text of the job of mode {mode or 'as-is'}\n{job_script(paths, file, mode)}")
    print("nothing was made or submitted (--dry-run)")
    for lack in lacks:
        console.print(Text(f"note: without --dry-run this is an error: {lack}"), style="yellow")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.throughput",
        description="Measure a node's summed training speed in each partition mode and for each\nbatch size.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cluster", metavar="YAML|NAME", help="a profile; without it: this machine")
    parser.add_argument(
        "--data", type=Path, metavar="PACKED", help="prepared data, as autospeed_model.prepare writes it"
    )
    parser.add_argument("--modes", type=_words, metavar="M,M", help=f"of {','.join(MODES)} (default: the profile's)")
    parser.add_argument(
        "--per-gpu", type=_numbers, metavar="K,K", help="workers per logical GPU (default: 1; on this machine 1,2,4,8)"
    )
    parser.add_argument("--batch-sizes", type=_numbers, default=BATCH_SIZES, metavar="B,B", help="default: 8 to 1024")
    parser.add_argument("--precisions", type=_words, default=("auto",), metavar="P,P", help="auto, bf16, fp16, fp32")
    parser.add_argument(
        "--window-s", type=float, default=20.0, metavar="S", help="seconds of each window (default: 20)"
    )
    parser.add_argument(
        "--measure", default="autospeed_model.throughput:measure", metavar="M:F", help="the measuring function"
    )
    parser.add_argument(
        "--setting", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="for it, such as size=s"
    )
    parser.add_argument("--folder", type=Path, metavar="F", help="default: runs/throughput-DATE-TIME")
    parser.add_argument("--name", help="in titles (default: the profile's)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="measure what is left of an experiment")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only write tables and charts")
    parser.add_argument("--account", help="short for --set account=...")
    parser.add_argument("--timeout-min", type=int, metavar="MIN", help="short for --set timeout_min=...")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrides a key of the profile"
    )
    parser.add_argument("--wait", action="store_true", help="wait for the jobs, then report")
    parser.add_argument("--no-charts", action="store_true", help="without matplotlib")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done")
    return parser


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip().lower() for word in text.split(","))
    if not all(words):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: words with a comma between them, such as bf16,fp32")
    return words


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: whole numbers such as 8,32,128")
    return tuple(int(number) for number in text.split(","))


def _setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: NAME=VALUE")
    return name, parse_value(value)


if __name__ == "__main__":
    sys.exit(run_entry(main))
