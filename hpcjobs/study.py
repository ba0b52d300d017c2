"""The Optuna study in a study folder: making it, opening it, giving it more trials."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpcjobs.errors import UserError
from hpcjobs.journal import StudyStorage, open_storage
from hpcjobs.paths import StudyPaths
from hpcjobs.sampling import distribution, fits, make_pruner, make_sampler

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from hpcjobs.config import Choice, StudyFile


# what trials of one study have in common, kept in its journal: with another value they could not be compared or resumed
_UNCHANGING = ("objective", "direction", "parameters", "fixed", "epochs")
GIVEN = "fixed_params"  # Optuna's own name: parameters that a queued trial must take
_SETTINGS = "hpcjobs:settings"


@dataclass(frozen=True)
class OpenStudy:
    """A study of a folder with its storage: what budget, recovery, status and workers act on."""

    paths: StudyPaths
    file: StudyFile
    storage: StudyStorage
    study_id: int
    name: str

    def trials(self, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        """The trials as they are now in the journal. They are shared with the storage: do not change them."""
        return self.storage.get_all_trials(self.study_id, deepcopy=False, states=states)

    def trial(self, trial_id: int) -> FrozenTrial:
        return self.storage.get_trial(trial_id)

    def optuna_study(self, trial_number: int | None = None) -> optuna.Study:
        """The study as Optuna's own class, with sampler and pruner; made anew for each trial.

        A fresh object has no cache of trials from before, and its sampler is seeded for this trial.
        """
        return optuna.load_study(
            study_name=self.name,
            storage=self.storage,
            sampler=make_sampler(self.file.study, trial_number),
            pruner=make_pruner(self.file.study),
        )


def create_study(paths: StudyPaths, file: StudyFile, starts: Sequence[dict[str, Choice]] = ()) -> OpenStudy:
    """Make the study in the folder, with all its trials waiting, and write ``study.yaml`` if it is not there.

    The number of trials is fixed here: workers claim waiting trials and never make one. ``starts`` are parameters that
    the first of them must take.

    Raises:
        UserError: if the folder already holds a study.
    """
    from hpcjobs.load import write_study_file

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    make_sampler(file.study)
    make_pruner(file.study)
    paths.folder.mkdir(parents=True, exist_ok=True)
    direction = StudyDirection.MAXIMIZE if file.study.direction == "maximize" else StudyDirection.MINIMIZE
    storage = open_storage(paths)
    with storage.exclusive():
        if storage.get_all_studies():
            raise UserError(f"{paths.folder}: already holds a study. Resume it, or choose another folder.")
        study_id = storage.create_new_study([direction], file.name)
        storage.set_study_user_attr(study_id, _SETTINGS, _settings(file))
        _enqueue(storage, study_id, file.study.trials, starts)
        # inside: of two at once, the one that is refused has changed nothing
        if not paths.config.exists():
            write_study_file(paths, file)
    return OpenStudy(paths, file, storage, study_id, file.name)


def open_study(paths: StudyPaths, checked: StudyFile | None = None) -> OpenStudy:
    """Open the study of a folder. ``checked``: its file, if that was read, and compared with the journal, before.

    Raises:
        UserError: if the folder is missing or is no study, its journal holds none or none of its trials, or what it
            searches was changed.
    """
    file = checked or _read(paths)
    if not paths.journal.is_file():
        raise UserError(f"{paths.folder}: {paths.journal.name} is missing: the study was never started, or was moved.")
    storage = open_storage(paths)
    studies = storage.get_all_studies()
    if not studies:
        raise UserError(f"{paths.journal}: holds no study. Submit the study anew in another folder.")
    study = OpenStudy(paths, file, storage, studies[0]._study_id, studies[0].study_name)
    if not study.trials():
        raise UserError(
            f"{paths.journal}: holds a study without trials: it was cut, or its submission ended in the midst. Bring "
            "the journal back from a copy, or submit the study anew in another folder."
        )
    if checked is None:
        _check_unchanged(paths, file, storage.get_study_user_attrs(study.study_id).get(_SETTINGS))
    return study


def _read(paths: StudyPaths) -> StudyFile:
    from hpcjobs.load import read_study_file

    return read_study_file(paths)


def _settings(file: StudyFile) -> dict[str, Any]:
    return file.study.model_dump(mode="json", include=set(_UNCHANGING))


def _check_unchanged(paths: StudyPaths, file: StudyFile, began_with: dict[str, Any] | None) -> None:
    """A journal without settings was made by another program: it is taken as it is."""
    found = _settings(file)
    for key, value in (began_with or {}).items():
        if found.get(key) != value:
            raise UserError(
                f"{paths.config}: study.{key} is {json.dumps(found.get(key))}, "
                f"its trials began with {json.dumps(value)}; allowed: no change within a study. Write the former value "
                "again, or begin a new study that starts from the best of this one: "
                f"--study YAML --warm-start {shlex.quote(str(paths.folder))}"
            )


def extend(study: OpenStudy, more: int) -> None:
    """Add ``more`` trials to the budget of a study that is finished, interrupted or running.

    Raises:
        UserError: for less than one trial.
    """
    if more < 1:
        raise UserError(f"--trials +{more}: at least one trial can be added")
    _enqueue(study.storage, study.study_id, more)


def default_starts(file: StudyFile) -> list[dict[str, Choice]]:
    """The defaults that the objective declares, for the first trial: what is found is compared with them anyway, and
    the sampler learns from what people already know. Empty where none is declared or lies in the search space."""
    spaces = file.study.parameters
    values = {name: file.defaults[name] for name in spaces if name in file.defaults}
    fitting = {name: value for name, value in values.items() if fits(distribution(spaces[name]), value)}
    return [fitting] if fitting else []


def best_starts(file: StudyFile, old: OpenStudy, at_most: int | None = None) -> list[dict[str, Choice]]:
    """The best parameters of an older study for the first trials of the new one that ``file`` describes.

    Only values that lie in the new search space are taken over; the sampler draws the others. By default they are for
    at most a fifth of the trials.

    Raises:
        UserError: if no completed trial of the older study has a value that fits.
    """
    space = {name: distribution(parameter) for name, parameter in file.study.parameters.items()}
    sign = -1.0 if old.file.study.direction == "maximize" else 1.0
    completed = sorted(old.trials((TrialState.COMPLETE,)), key=lambda trial: sign * trial.values[0])
    fitting = [
        {name: value for name, value in trial.params.items() if name in space and fits(space[name], value)}
        for trial in completed
    ]
    starts = [values for values in fitting if values]
    if not starts:
        raise UserError(f"{old.paths.folder}: found no completed trial whose parameters lie in the new search space")
    return starts[: at_most if at_most is not None else max(1, file.study.trials // 5)]


def _enqueue(storage: StudyStorage, study_id: int, count: int, starts: Sequence[dict[str, Choice]] = ()) -> None:
    """Append ``count`` waiting trials in one write: one by one, thousands take minutes on a parallel filesystem."""
    with storage.batch():
        for number in range(count):
            attributes = {GIVEN: starts[number]} if number < len(starts) else {}
            storage.create_new_trial(study_id, create_trial(state=TrialState.WAITING, system_attrs=attributes))
