"""What trials leave in the study's folder, so that ten thousand of them leave few files.

Curves lie in one file of each worker. A trial has a folder only while it may still go on from it; afterwards the folder
stays if it is that of the best trial, or if the objective keeps files of its own there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpcjobs.budget import HISTORY, successor_of
from hpcjobs.paths import CHECKPOINT, StudyPaths
from hpcjobs.progress import best_trial
from hpcjobs.study import OpenStudy

log = logging.getLogger(__name__)

# with less than this a study's disk may be too full for the next checkpoint
ROOM_BYTES = 1 << 30
PROBE_BYTES = 1 << 20


def append_to_curves(file: Path, trial: int, step: int, value: float, figures: Mapping[str, float]) -> None:
    """Add what a trial reports after an epoch. Raises OSError, on a full disk for example.

    The line break comes first: a line that a full disk or a kill cuts short spoils no other one.
    """
    file.parent.mkdir(exist_ok=True)  # of a study that was moved meanwhile nothing is made anew
    with file.open("ab") as curves:
        curves.write(b"\n" + json.dumps({**figures, "trial": trial, "step": step, "value": value}).encode())


def read_curves(study: OpenStudy) -> list[dict[str, Any]]:
    """What the trials reported, in the order of trials and steps; a recovered trial's rows are those of its successor.

    A step is in the files twice if a worker died after writing it there and before reporting: the later one counts.
    """
    files = sorted(study.paths.curves.glob("*.jsonl"))
    found = (_report(line) for file in files for line in file.read_bytes().split(b"\n"))
    trials = range(len(study.trials()))  # a damaged journal may have lost the latest
    curves = {}
    for row in sorted((row for row in found if row and row["trial"] in trials), key=lambda row: row["trial"]):
        row["trial"] = last_successor(study, row["trial"]).number
        curves[row["trial"], row["step"]] = row
    return [curves[key] for key in sorted(curves)]


def _report(line: bytes) -> dict[str, Any] | None:
    """What a line of a curve file says; None for an empty or damaged one, such as one that was cut short."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    match row:
        case {"trial": int(), "step": int(), "value": int() | float()}:
            return dict(row)
    return None


def last_successor(study: OpenStudy, number: int) -> FrozenTrial:
    """The trial that goes on with what trial ``number`` began: itself, unless it was recovered."""
    while (successor := successor_of(study, number)) is not None:
        number = successor.number
    return study.trials()[number]


def no_longer_needed(study: OpenStudy) -> Callable[[int], bool]:
    """Tells of a trial's number, as the study is now, whether nobody goes on from its folder and it is not the best."""
    best = best_trial(study)

    def is_over(number: int) -> bool:
        # a successor copies from the newest of the trials before it that has files
        return last_successor(study, number).state.is_finished() and (best is None or best.number != number)

    return is_over


def tidy_up_after(study: OpenStudy, trial: FrozenTrial) -> None:
    """Remove what ``trial``, which has just ended, leaves and nobody needs any more.

    If it is the best so far, that is also the checkpoint of the one that was the best before. What cannot be removed
    now is left to ``hpcjobs.clean``.
    """
    numbers = [trial.number, *trial.system_attrs.get(HISTORY, [])]
    try:
        if len(numbers) == 1 and remove_if_empty(study.paths.trial(trial.number)):
            return
        is_over = no_longer_needed(study)
        if trial.state == TrialState.COMPLETE and not is_over(trial.number):
            numbers = trial_folders(study.paths)
        for number in numbers:
            if is_over(number):
                folder = study.paths.trial(number)
                for path in checkpoints(folder):
                    _remove(path)
                remove_if_empty(folder)
    except OSError as error:
        log.warning("files of trials that have ended stay for the moment: %s", error)


def checkpoints(folder: Path) -> Iterator[Path]:
    """The checkpoint in a trial's folder, and what a write of one left that was cut short."""
    if os.path.lexists(folder / CHECKPOINT):
        yield folder / CHECKPOINT
    yield from folder.glob(f".{CHECKPOINT}.*")


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it, also while another worker removes the same."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    while path.is_dir() and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def has_room(folder: Path) -> bool:
    """Whether the disk of a study's folder has certainly room for what a trial saves, also below a quota."""
    try:
        disk = os.statvfs(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # NFS tells of a quota only then
    except OSError as error:
        log.warning("%s: whether it has room is not known: %s", folder, error)
        return False
    return disk.f_bavail * disk.f_frsize >= ROOM_BYTES


def remove_if_empty(folder: Path) -> bool:
    """Whether the folder is gone now."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        if error.errno != errno.ENOENT:
            raise
    return True


def trial_folders(paths: StudyPaths) -> list[int]:
    """Numbers of the trials that have a folder."""
    names = [path.name for path in paths.trials.iterdir()] if paths.trials.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())
