"""Entry: removes what a study that has ended no longer needs: checkpoints, submitit's files, logs if none failed."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import TrialState

from hpcjobs.budget import count
from hpcjobs.errors import UserError, run_entry
from hpcjobs.heartbeat import HeartbeatWatch
from hpcjobs.paths import StudyPaths
from hpcjobs.progress import best_trial, snapshot
from hpcjobs.study import OpenStudy, open_study

_EXAMPLES = """\
examples:
  python -m hpcjobs.clean runs/experiment1            # only says what would go
  python -m hpcjobs.clean runs/experiment1 --remove
"""


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
        description="Say what a study that has ended no longer needs; with --remove, remove it. Journal, study.yaml, "
        "results, curves, the best trial and the logs of failed trials always stay.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the study's folder")
    parser.add_argument("--remove", action="store_true", help="remove it; without this nothing is touched")
    options = parser.parse_args(arguments)
    study = open_study(StudyPaths(options.folder))
    _check_ended(study)
    total = 0
    items = list(removable(study))
    for item in items:
        size = item.size
        total += size
        print(f"{size / 1e6:10.1f} MB  {item.path.relative_to(study.paths.folder)}  ({item.why})")
        if options.remove:
            remove(item)
    if not items:
        print("nothing to remove")
    else:
        print(f"{total / 1e6:10.1f} MB in all {'removed' if options.remove else '(a dry run: add --remove)'}")
    return 0


def _check_ended(study: OpenStudy) -> None:
    counts = count(study)
    if counts.left or snapshot(study, HeartbeatWatch(study.paths)).live_nodes:
        raise UserError(
            f"{study.paths.folder}: the study has not ended ({counts.running} trials running, {counts.waiting} waiting)"
            "; allowed: a study that has ended, since the others go on from their checkpoints"
        )


def removable(study: OpenStudy) -> Iterator[Item]:
    """What may go: no trial goes on from it, and no result is in it."""
    paths, best = study.paths, best_trial(study)
    for trial in study.trials():
        folder = paths.trial(trial.number)
        if best is not None and trial.number == best.number:
            continue
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.is_file():
            yield Item(checkpoint, f"checkpoint of a trial that is {trial.state.name.lower()}")
        if folder.is_dir():
            yield from (Item(path, "left by a write that was cut") for path in folder.glob(".*.partial"))
    if paths.submitit.is_dir():
        yield Item(paths.submitit, "submitit's files of jobs that have ended")
    failed = {trial.number for trial in study.trials((TrialState.FAIL,))}
    if not failed and paths.logs.is_dir():
        yield Item(paths.logs, "no trial failed")


def remove(item: Item) -> None:
    """Remove a file or a folder; a link is removed, not what it points to."""
    if item.path.is_dir() and not item.path.is_symlink():
        shutil.rmtree(item.path)
    else:
        item.path.unlink()


if __name__ == "__main__":
    sys.exit(run_entry(main))
