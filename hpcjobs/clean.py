"""Entry: removes what a study that has ended no longer needs: checkpoints, submitit's files, logs of what went well."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from optuna.trial import TrialState

from hpcjobs.errors import UserError, run_entry
from hpcjobs.final_plan import MAKING
from hpcjobs.owners import OWNER, Owner
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


@dataclass(frozen=True)
class Failures:
    """What logs say of failed trials: ``texts`` by trial, and the logs that stay ``whole``, with the trials that may
    be in there and were not found."""

    any: bool
    texts: dict[int, bytes] = field(default_factory=dict)
    whole: dict[Path, list[int]] = field(default_factory=dict)


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
    failures = find_failures(study)
    if options.remove:
        keep_logs_of(failures, study.paths)
    items = list(removable(study, failures))
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
    for path, numbers in failures.whole.items():
        which = ", ".join([*map(str, numbers[:4]), *(["..."] if numbers[4:] else [])])
        print(
            f"kept whole: {path.relative_to(study.paths.folder)}, in which no beginning was found of "
            f"{counted(len(numbers), 'failed trial')} that may have run there ({which})"
        )
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


def removable(study: OpenStudy, failures: Failures) -> Iterator[Item]:
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
    if not failures.any and paths.logs.is_dir():
        yield Item(paths.logs, "no trial failed")
    elif failures.any:
        kept = f"what it has of failed trials is in {paths.failed_logs.relative_to(paths.folder)}"
        yield from (Item(path, kept) for path in worker_logs(paths) if path not in failures.whole)


def worker_logs(paths: StudyPaths) -> list[Path]:
    return sorted(paths.logs.glob("*/worker_*.log"))


def find_failures(study: OpenStudy) -> Failures:
    """Look for each failed trial in the log of the worker that had it last.

    An objective may have changed how its process logs, or ended it: then the log has the trial's words, but not where
    they begin. Where the worker is not known, or has left no log, any log may have them.
    """
    paths = study.paths
    trials = study.trials((TrialState.FAIL,))
    failures = Failures(any=bool(trials))
    if not trials:
        return failures
    failed = {trial.number for trial in trials}
    texts = {path: _by_trial(path.read_bytes(), failed) for path in worker_logs(paths)}
    for trial in trials:
        number, owner = trial.number, Owner.from_dict(trial.user_attrs.get(OWNER))
        if paths.failed_log(number).exists():
            continue  # of an earlier run, which may have removed some of the logs that it was made from
        own = paths.worker_log(owner.element, owner.worker) if owner is not None else None
        logs = [own] if own in texts else list(texts)
        if any(number in texts[path] for path in logs):
            failures.texts[number] = b"".join(found[number] for found in texts.values() if number in found)
        else:
            for path in logs:
                failures.whole.setdefault(path, []).append(number)
    return failures


def keep_logs_of(failures: Failures, paths: StudyPaths) -> None:
    """Write what the workers' logs have of each failed trial into a file of its own."""
    for number, text in failures.texts.items():
        write_atomically(paths.failed_log(number), text)


def _by_trial(log: bytes, numbers: Container[int]) -> dict[int, bytes]:
    found: dict[int, list[bytes]] = defaultdict(list)
    for number, text in stretches(log):
        if number in numbers:
            found[number].append(text)
    return {number: b"".join(parts) for number, parts in found.items()}


def stretches(log: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a worker's log that belong to trials, with their numbers."""
    begins = [match.start() for match in _BEGINS.finditer(log)]
    for start, end in itertools.pairwise([*begins, len(log)]):
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
