"""Entry: arguments and configuration -> study folder -> job array (or this machine)."""

from __future__ import annotations

import argparse
import errno
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hpcjobs.config import CONTROL_CHARACTER, MODES, MOST_TRIALS, ClusterConfig
from hpcjobs.errors import EXIT_INTERRUPTED, UserError, run_entry
from hpcjobs.filesystem import is_node_local, mount_of
from hpcjobs.load import nearest, write_study_file
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import Plan
from hpcjobs.preflight import check_slurm, check_writers
from hpcjobs.slurm import job_script, shell_line, step_command, worker_command
from hpcjobs.submission import (
    AUTO,
    Submission,
    cores_text,
    group_writes,
    keep_ours,
    new_submission,
    resumed_submission,
)
from hpcjobs.text import counted

_EXAMPLES = """\
examples:
  # on this machine, without Slurm: two workers, live progress, the best parameters at the end
  python -m hpcjobs.submit --study configs/studies/experiment1.yaml --data packed --trials 8 --epochs 2 --workers 2

  # look first: the plan, the whole sbatch text and one step's srun line; nothing is made
  python -m hpcjobs.submit --nodes 4 --study configs/studies/experiment1.yaml --cluster lumi \\
      --account project_465000000 --data packed --trials 100 --epochs 5 --dry-run

  # four nodes whose GPUs are split into 64 logical ones each
  python -m hpcjobs.submit --nodes 4 --study my_study.yaml --cluster my_site.yaml --data packed --mode cpx

  # two more nodes and fifty more trials for a study that is finished, interrupted or running
  python -m hpcjobs.submit --resume runs/experiment1-20260101-120000 --nodes 2 --trials +50
"""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    submission = new_submission(options) if options.resume is None else resumed_submission(options)
    # wide where nobody looks at a terminal, so that paths in a log are whole
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if options.dry_run:
        show_dry_run(submission, console)
        return 0
    if submission.plan.cluster is not None and not options.prepare:
        check_slurm(submission.plan.cluster.name)
    show(submission, console)
    make(submission)
    if options.prepare:
        print(f"\nmade, not started; by hand: sbatch --array=... slurm/study.sbatch {_quoted(submission.paths)}")
        return 0
    if submission.plan.cluster is None:
        return run_here(submission, detach=options.detach)
    start(submission)
    return follow(submission.paths) if options.wait and not options.detach else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        lone_file = options.study is None and unknown[0].endswith((".yaml", ".yml"))
        hint = f"; did you mean --study {shlex.quote(unknown[0])}?" if lone_file else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.submit",
        description="Make a study and run it: with --cluster one Slurm array element per node,\nelse on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--study", type=Path, metavar="YAML", help="what is searched: parameters, or a full study file")
    parser.add_argument("--cluster", metavar="YAML|NAME", help="a profile's path, or its name in configs/clusters")
    parser.add_argument(
        "--data", type=Path, metavar="PACKED", help="prepared data, as autospeed_model.prepare writes it"
    )
    parser.add_argument(
        "--nodes",
        type=_positive,
        metavar="N",
        help="nodes, one array element each (default: 1; with --resume: as before)",
    )
    parser.add_argument("--trials", type=_trials, metavar="N", help="trials of the study (default: the study file's)")
    parser.add_argument("--epochs", type=_positive, metavar="N", help="epochs of a trial (default: the study file's)")
    parser.add_argument(
        "--mode",
        type=_mode,
        help=f"partition mode of the GPUs: {', '.join(MODES)}; auto: what is fastest for this study",
    )
    parser.add_argument(
        "--throughput-table", type=Path, metavar="JSON", help="for --mode auto (default: PROFILE.throughput.json)"
    )
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="workers per node (default: one per logical GPU)"
    )
    parser.add_argument(
        "--workers-per-gpu", type=_positive, metavar="K", help="workers on each logical GPU (default: 1)"
    )
    parser.add_argument("--folder", type=Path, metavar="F", help="the study's folder (default: runs/NAME-DATE-TIME)")
    parser.add_argument("--name", type=_name, help="the study's name (default: that of its file)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="add nodes or trials (--trials +50) to a study")
    parser.add_argument(
        "--warm-start", type=Path, metavar="FOLDER", help="begin with the best parameters of an older study"
    )
    parser.add_argument("--account", help="short for --set account=...")
    parser.add_argument("--timeout-min", type=_positive, metavar="MIN", help="short for --set timeout_min=...")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a key of the profile (mode.default=cpx)",
    )
    parser.add_argument("--wait", action="store_true", help="watch a study on Slurm until it ends")
    parser.add_argument("--detach", action="store_true", help="do not watch a study on this machine")
    parser.add_argument(
        "--prepare", action="store_true", help="make the study's folder, start nothing; then sbatch slurm/study.sbatch"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be done; make and submit nothing")
    return parser


def show(submission: Submission, console: Console) -> None:
    """The plan as a table, with what deserves a second thought below it."""
    from rich.table import Table

    file, plan, study = submission.file, submission.plan, submission.file.study
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "study": f"{file.name} ({study.objective}, {study.direction})",
        "folder": str(submission.paths.folder),
        "searched": ", ".join(study.parameters),
        "fixed": ", ".join(f"{name}={value}" for name, value in study.fixed.items()),
        "trials": f"{study.trials}, each {counted(study.epochs, 'epoch')}; sampler {study.sampler.name}, "
        f"pruner {study.pruner.name}",
        "data": str(file.run.data) if file.run.data else "",
        "where": f"cluster {plan.cluster.name}" if plan.cluster else "this machine",
        "nodes": str(plan.nodes) + (f" in {len(plan.arrays)} job arrays" if len(plan.arrays) > 1 else ""),
        "mode": plan.mode or "",
        "workers": workers_text(plan),
        "time limit": f"{plan.timeout_min} min a job" if plan.timeout_min else "",
    }
    if submission.resumed:
        rows["trials"] = f"{submission.more_trials} more" if submission.more_trials else "those that are left"
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    console.print(table)
    if plan.cluster is None and shutil.which("sbatch"):
        console.print("note: Slurm is here, but without --cluster the study runs on this machine alone", style="yellow")
    mount = mount_of(submission.paths.folder)
    if plan.nodes > 1 and is_node_local(mount):
        told = f"note: the folder is on {mount.type}, a filesystem of this node alone: do other nodes see it?"
        console.print(told, style="yellow")
    if submission.changed is not None:
        told = (
            "note: what is set here holds for every node that starts from now on, also of jobs that are queued already"
        )
        console.print(told, style="yellow")
    if submission.choice is not None:
        console.print(Text(f"mode auto: {submission.choice.reason}"))
        for note in submission.choice.notes:
            console.print(Text(f"note: {note}", style="yellow"))
    elif not submission.resumed and study.trials < 3 * plan.workers and plan.workers > 1:
        console.print(
            f"note: {counted(study.trials, 'trial')} for {plan.workers} workers: the sampler has little to learn from; "
            "it searches better with fewer workers or more trials",
            style="yellow",
        )


def workers_text(plan: Plan) -> str:
    memory = f", {plan.mem_gb_per_worker:.1f} GB a worker" if plan.mem_gb_per_worker else ""
    number = "one" if plan.workers_per_gpu == 1 else str(plan.workers_per_gpu)
    source = f"{number} per logical GPU that is there; expected " if plan.workers_by_devices else ""
    return f"{source}{plan.workers_per_node} a node, {cores_text(plan)}{memory}"


def show_dry_run(submission: Submission, console: Console) -> None:
    """Plan, sbatch text and one step's line, as they would be submitted."""
    paths, plan = submission.paths, submission.plan
    show(submission, console)
    working_folder = submission.file.run.working_folder
    if plan.cluster is None:
        print(f"\n# one worker's command\n{shell_line(worker_command(plan, paths, 0))}")
    else:
        for index, elements in enumerate(plan.arrays):
            print(f"\n# sbatch text, job array {index + 1} of {len(plan.arrays)}")
            print(job_script(plan, paths, elements, working_folder))
        cores = counted(plan.cluster.cores_per_node, "core")
        print(
            f"# one worker's step, started by the node agent. It spans all {cores} of the node, as those of the other "
            "workers do; the worker then binds itself to its own\n"
            f"{shell_line(step_command(plan, paths, '%A_%a' if plan.nodes > 1 else '%j', 0))}"
        )
    if submission.objective_sets:
        print("\n# the objective sets in each worker, unless the profile's environment does")
        for name, value in submission.objective_sets.items():
            print(f"{name}={value}")
    print("\nnothing was made or submitted (--dry-run)")
    for lack in submission.lacks:
        console.print(Text(f"note: without --dry-run this is an error: {lack}"), style="yellow")


def make(submission: Submission) -> None:
    """Make the study with all its trials waiting, or give an existing one more and what is set for its next nodes."""
    import optuna

    from hpcjobs.study import best_starts, create_study, default_starts, extend, open_study

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    cluster = submission.file.cluster
    keep_ours(cluster)
    if not submission.resumed:
        old = submission.warm_start
        starts = default_starts(submission.file)
        starts += best_starts(submission.file, open_study(old)) if old is not None else []
        _make_whole(submission.paths, lambda paths: create_study(paths, submission.file, starts), cluster)
    elif submission.more_trials or submission.changed is not None:
        study = open_study(submission.paths)  # first: of a study that is refused nothing is changed
        if submission.changed is not None:
            write_study_file(submission.paths, submission.changed)
        if submission.more_trials:
            extend(study, submission.more_trials)


def _make_whole(paths: StudyPaths, create: Callable[[StudyPaths], object], cluster: ClusterConfig | None) -> None:
    """Make the study under another name, so that its folder is whole as soon as it is there: of two submissions at
    once one makes it, and one that is killed leaves nothing in the way of the next.

    A folder that is there, empty, is somebody's with all that was set on it, and is filled as it is.
    """
    folder = paths.folder
    making = StudyPaths(folder.with_name(f".making.{secrets.token_hex(4)}"))
    try:
        if not folder.exists():
            create(making)
            making.folder.rename(folder)
            return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UserError(f"{folder}: somebody has made it this moment. Choose another folder.") from None
    finally:
        shutil.rmtree(making.folder, ignore_errors=True)
    check_writers(folder, group_writable=group_writes(cluster))  # somebody may have been quicker than us
    create(paths)


def start(submission: Submission) -> None:
    """Start the node agents and say how to go on.

    Raises:
        UserError: Slurm refused the job or does not answer; the study's folder is kept.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from hpcjobs.launch import launch
    from hpcjobs.slurm_control import SlurmUnavailableError

    paths, plan = submission.paths, submission.plan
    try:
        launched = launch(paths, submission.file, plan)
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(
            f"sbatch refused the job: {str(error).strip()}\nThe study is kept; correct the value in question and go on "
            f"with: python -m hpcjobs.submit --resume {_quoted(paths)} --set KEY=VALUE"
        ) from None
    except SlurmUnavailableError as error:
        raise UserError(
            f"Slurm does not answer: {error}\nThe study is kept, with all its trials. Where Slurm answers go on with: "
            f"python -m hpcjobs.submit --resume {_quoted(paths)} --nodes {plan.nodes}"
        ) from None
    if plan.cluster is None:
        print(f"\nstarted on this machine as process {', '.join(launched.job_ids)}")
    else:
        print(f"\nsubmitted {counted(plan.nodes, 'node')} as job {', '.join(launched.job_ids)}")
    folder = _quoted(paths)
    print(f"  watch    python -m hpcjobs.status {folder}")
    print(f"  results  python -m hpcjobs.collect {folder}")
    print(f"  cancel   python -m hpcjobs.cancel {folder}", flush=True)


def run_here(submission: Submission, *, detach: bool) -> int:
    """Run a study on this machine. Ctrl-C ends it, at whatever moment: the terminal tells the agent as well."""
    from hpcjobs.cancel import main as cancel

    try:
        start(submission)
        code = 0 if detach else follow(submission.paths)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        print("stopping the workers; what they have saved is kept", flush=True)
        cancel([str(submission.paths.folder)])
    return code


def follow(paths: StudyPaths) -> int:
    """Watch the study until it ends, then show its results.

    Returns 1 if trials are left or none has completed, 130 if Ctrl-C ended the watching.
    """
    from hpcjobs.budget import count
    from hpcjobs.collect import main as collect
    from hpcjobs.status import watch
    from hpcjobs.study import open_study

    if not watch(paths):
        return EXIT_INTERRUPTED
    return collect([str(paths.folder)]) or int(count(open_study(paths)).left > 0)


def _quoted(paths: StudyPaths) -> str:
    return shlex.quote(str(paths.folder))


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:20]) <= MOST_TRIALS:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; allowed: a whole number of at least 1, below a million")
    return int(text)


def _trials(text: str) -> str:
    _positive(text.removeprefix("+"))
    return text


def _mode(text: str) -> str:
    allowed = (*MODES, AUTO)
    if text.lower() in allowed:
        return text.lower()
    near = nearest(text.lower(), allowed)
    raise argparse.ArgumentTypeError(f"found {text!r}; allowed: {', '.join(allowed)}{'; ' + near if near else ''}")


def _name(text: str) -> str:
    if not text.strip() or CONTROL_CHARACTER.search(text) or len(text) > 100:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: one line of at most 100 characters")
    return text


if __name__ == "__main__":
    sys.exit(run_entry(main))
