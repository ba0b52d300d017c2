"""Trials whose owner is gone go on under a new number, exactly once.

A new number and folder, because the old owner may be only stopped: when it wakes up, its trial has ended, whatever it
writes goes into the old folder, and its reports are refused.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState, create_trial

from hpcjobs.budget import FAILURE, HISTORY, successor_of, token_of
from hpcjobs.failures import SUSPICIOUS, Failure, FailureClass
from hpcjobs.paths import CHECKPOINT, StudyPaths
from hpcjobs.study import OpenStudy

RECOVERED = "hpcjobs:recovered"
# A trial that kills its worker so often in a row without a new report is to blame itself.
MOST_DEATHS_WITHOUT_PROGRESS = 5


def recover(study: OpenStudy, trial_id: int, token: str | None, failure: Failure) -> int | None:
    """Fail the running trial of the owner with ``token`` and queue its successor, unless that happened already.

    The caller knows that the owner is gone (or is the owner itself). ``token`` None: a running trial without an owner.

    Returns:
        The number of the successor; None if there is none, because somebody was quicker or because the trial has used
        up its attempts and counts as failed.
    """
    with study.storage.exclusive():
        trial = study.trial(trial_id)
        if trial.state != TrialState.RUNNING or token_of(trial) != token:
            return None
        lineage = _lineage(trial, failure)
        if lineage["deaths"] > MOST_DEATHS_WITHOUT_PROGRESS:
            message = f"{failure.message} ({lineage['deaths']} times without a new report: not tried again)"
            failure = Failure(failure.kind, message, failure.details)
            goes_on = False
        else:
            goes_on = successor_of(study, trial.number) is None
        with study.storage.batch():
            if goes_on:
                study.storage.create_new_trial(study.study_id, _successor(trial, lineage))
            study.storage.set_trial_user_attr(trial_id, FAILURE, failure.as_dict())
            study.storage.set_trial_state_values(trial_id, TrialState.FAIL)
    successor = successor_of(study, trial.number)
    return successor.number if successor else None


def _lineage(trial: FrozenTrial, failure: Failure) -> dict[str, Any]:
    before = trial.user_attrs.get(RECOVERED) or {}
    reports = len(trial.intermediate_values)
    deaths = before.get("deaths", 0) if reports <= before.get("reports", 0) else 0
    return {
        "class": failure.kind.value,
        "reports": reports,
        "deaths": deaths + (failure.kind in SUSPICIOUS),
    }


def _successor(trial: FrozenTrial, lineage: dict[str, Any]) -> FrozenTrial:
    """The waiting trial that goes on, with the attributes that Optuna's own retry callback sets."""
    history = [*trial.system_attrs.get(HISTORY, []), trial.number]
    attributes = {key: value for key, value in trial.user_attrs.items() if not key.startswith("hpcjobs:")}
    return create_trial(
        state=TrialState.WAITING,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs={**attributes, RECOVERED: lineage},
        system_attrs={"failed_trial": trial.number, **trial.system_attrs, HISTORY: history},
        intermediate_values=trial.intermediate_values,
    )


def recover_worker(study: OpenStudy, token: str, failure: Failure) -> list[tuple[int, int | None]]:
    """Recover what the dead worker with ``token`` was running: pairs of its trial and the successor."""
    mine = [trial for trial in study.trials((TrialState.RUNNING,)) if token_of(trial) == token]
    return [(trial.number, recover(study, trial._trial_id, token, failure)) for trial in mine]


def inherit_files(paths: StudyPaths, trial: FrozenTrial) -> None:
    """Copy all that the newest predecessor has in its folder into that of ``trial``, if it has nothing of its own.

    All of it or nothing: a copy that was cut short, by a kill or a full disk, is made anew by whoever goes on.
    """
    folder = paths.trial(trial.number)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        return
    for number in reversed(trial.system_attrs.get(HISTORY, [])):
        source = paths.trial(number)
        if source.is_dir() and any(not _is_temporary(path) for path in source.iterdir()):
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            _copy_tree(source, partial, moved=(source, folder))
            partial.replace(folder)  # which is empty
            return


def _copy_tree(source: Path, target: Path, moved: tuple[Path, Path]) -> None:
    """Copy folders and files; a link stays one, and leads to the second of ``moved`` where it led to the first."""
    target.mkdir()
    for path in source.iterdir():
        if _is_temporary(path):
            continue
        with contextlib.suppress(FileNotFoundError):  # a former owner that is not dead renames what it wrote
            if path.is_symlink():
                link = path.readlink()
                inside = link.is_relative_to(moved[0])
                (target / path.name).symlink_to(moved[1] / link.relative_to(moved[0]) if inside else link)
            elif path.is_dir():
                _copy_tree(path, target / path.name, moved)
            elif path.is_file():
                shutil.copyfile(path, target / path.name)


def _is_temporary(path: Path) -> bool:
    """Whether it is ``.NAME.xxxx``, which a writer of NAME had begun, and not a hidden file that somebody keeps."""
    if not path.name.startswith(".") or not path.suffix:
        return False
    name = path.stem[1:]
    return name == CHECKPOINT or path.with_name(name).exists()


def worker_death(return_code: int, out_of_memory: bool, log: object) -> Failure:
    """What to write for a worker that ended with ``return_code`` (negative: the signal that killed it)."""
    how = f"signal {-return_code}" if return_code < 0 else f"exit code {return_code}"
    kind = FailureClass.HOST_MEMORY if out_of_memory else FailureClass.WORKER
    return Failure(kind, f"the worker ended with {how}; its log: {log}")
