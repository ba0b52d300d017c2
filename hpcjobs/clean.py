"""Entry: removes what a study that has ended no longer needs: checkpoints, submitit's files, logs of what went well."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import TrialState

from hpcjobs.errors import UserError, run_entry
from hpcjobs.final_plan import MAKING
from hpcjobs.paths import StudyPaths, write_atomically
from hpcjobs.progress import LIVE, StudyWatch
from hpcjobs.status_look import look_again
from hpcjobs.study import OpenStudy, open_study
from hpcjobs.text import counted
from hpcjobs.trial_files import checkpoints, no_longer_needed, trial_folders

_EXAMPLES = """\
examples:
  python -m hpcjobs.clean runs/experiment1            # only says what would go
  python -m hpcjobs.clean runs/experiment1 --remove
"""


# where a trial's part of a worker's log begins, or that of a new process of the worker
_BEGINS = re.compile(
    rb"^[^\n]* hpcjobs\.worker: (?:trial (?P<trial>\d+) begins$|worker \d+ of .*, process \d+, device )", re.MULTILINE
)


@dataclass(frozen=True)
class Item:
    """Something that may go, and why."""

    path: Path
    why: str

    @property
    def size(self) -> int:
        """Bytes of the file, or of all files below the folder."""
        if not self.path.is_dir():
            return self.path.lstat().st_size
        return sum(path.lstat().st_size for path in self.path.rglob("*") if not path.is_dir() or path.is_symlink())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.clean",
        description="Say what a study that has ended no longer needs; with --remove, remove it.\nJournal, study.yaml, "
        "results, curves, the best trial's checkpoint and what logs\nsay of failed trials always stay.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    parser.add_argument("--remove", action="store_true", help="remove it; without this nothing is touched")
    options = parser.parse_args(arguments)
    study = open_study(StudyPaths(options.folder))
    _check_ended(study)
    total = 0
    failed = {trial.number for trial in study.trials((TrialState.FAIL,))}
    if options.remove:
        keep_logs_of(failed, study.paths)
    items = list(removable(study, failed))
    for item in items:
        size = item.size
        total += size
        print(f"{size_text(size):>10}  {item.path.relative_to(study.paths.folder)}  ({item.why})")
        if options.remove:
            remove(item)
    if not items:
        print("nothing to remove")
    else:
        print(f"{size_text(total):>10}  in all {'removed' if options.remove else '(a dry run: add --remove)'}")
    return 0


def _check_ended(study: OpenStudy) -> None:
    watched = StudyWatch(study)
    now = look_again(study.paths, watched, watched.look())
    counts, folder = now.counts, shlex.quote(str(study.paths.folder))
    at_work = [line.report.node for line in now.nodes if line.state in LIVE]
    if counts.left:
        raise UserError(
            f"{study.paths.folder}: the study has not ended ({counted(counts.running, 'trial')} running, "
            f"{counts.waiting} waiting); allowed: a study that has ended, since the others go on from their "
            f"checkpoints. Bring it to its end: python -m hpcjobs.submit --resume {folder}"
        )
    if at_work:
        raise UserError(
            f"{study.paths.folder}: all trials have ended, but {counted(len(at_work), 'node')} not yet "
            f"({', '.join(at_work[:4])}); allowed: a study whose nodes have ended. Try again in a minute, or end them: "
            f"python -m hpcjobs.cancel {folder}"
        )


def removable(study: OpenStudy, failed: Container[int]) -> Iterator[Item]:
    """What may go: no trial goes on from it, and no result is in it."""
    paths, is_over = study.paths, no_longer_needed(study)
    for number in trial_folders(paths):
        folder = paths.trial(number)
        if is_over(number):
            files = set(checkpoints(folder))
            whole = files.issuperset(folder.iterdir())
            yield from (Item(path, "of a trial that has ended") for path in ([folder] if whole else sorted(files)))
    if paths.trials.is_dir():
        yield from (Item(path, "a copy that was cut short") for path in paths.trials.glob(".*.partial"))
    for path in paths.folder.glob(f"{MAKING}*"):
        yield Item(path, "final trainings whose making was cut short")
    if paths.submitit.is_dir():
        yield Item(paths.submitit, "submitit's files of jobs that have ended")
    if not failed and paths.logs.is_dir():
        yield Item(paths.logs, "no trial failed")
    elif failed:
        kept = f"what it has of failed trials is in {paths.failed_logs.relative_to(paths.folder)}"
        yield from (Item(path, kept) for path in worker_logs(paths))


def worker_logs(paths: StudyPaths) -> list[Path]:
    return sorted(paths.logs.glob("*/worker_*.log"))


def keep_logs_of(trials: Container[int], paths: StudyPaths) -> None:
    """Write what the workers' logs have of each of these trials into a file of its own.

    A file that is there stays: a run that was cut short may have removed some of the logs that it was made from.
    """
    found: dict[int, list[bytes]] = defaultdict(list)
    for path in worker_logs(paths):
        for number, text in stretches(path.read_bytes()):
            if number in trials:
                found[number].append(text)
    for number, texts in found.items():
        path = paths.failed_log(number)
        if not path.exists():
            write_atomically(path, b"".join(texts))


def stretches(log: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a worker's log that belong to trials, with their numbers."""
    begins = [match.start() for match in _BEGINS.finditer(log)]
    for start, end in zip(begins, [*begins[1:], len(log)], strict=True):
        match = _BEGINS.match(log, start)
        if match and match["trial"]:
            yield int(match["trial"]), log[start:end]


def size_text(size: int) -> str:
    """Bytes in the unit in which they read well."""
    if size < 1000:
        return f"{size} B"
    number, units = size / 1000, ["kB", "MB", "GB", "TB"]
    while number >= 999.95 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.1f} {units[0]}"


def remove(item: Item) -> None:
    """Remove a file or a folder; a link is removed, not what it points to."""
    if item.path.is_dir() and not item.path.is_symlink():
        shutil.rmtree(item.path)
    else:
        item.path.unlink()


if __name__ == "__main__":
    sys.exit(run_entry(main))
