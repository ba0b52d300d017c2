"""The final trainings as a study of their own: which settings, which seeds, on what. Nothing is started here."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hpcjobs.budget import RESULT
from hpcjobs.config import Categorical, Choice, NamedWithOptions, Parameter, StudyFile
from hpcjobs.errors import UserError
from hpcjobs.load import read_study_file
from hpcjobs.objective import inspect_objective
from hpcjobs.paths import StudyPaths, current_folder, write_atomically
from hpcjobs.plan import make_plan
from hpcjobs.study import create_study

BEST, DEFAULT = "optimised", "default"
# begins the name of a final study's folder as long as it is being made
MAKING = ".final."
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
SEED = "seed"


@dataclass(frozen=True)
class FinalPlan:
    """``settings``: each setting's values of the parameters in which they differ. ``starts``: one entry a training."""

    file: StudyFile
    settings: dict[str, dict[str, Choice]]
    starts: list[dict[str, Choice]]
    best_trial: int

    def setting_of(self, params: dict[str, Any]) -> str | None:
        """Which setting a training with these parameters belongs to; None for a mixture, which somebody has added."""
        fitting = (
            name
            for name, values in self.settings.items()
            if all(params.get(parameter) == value for parameter, value in values.items())
        )
        return next(fitting, None)


def declared_final(file: StudyFile) -> str | None:
    """The function for the final training that the study's objective names; None where it names none.

    Looked for in the folder where the study was submitted: its workers import the objective there, too.

    Raises:
        UserError: the objective cannot be imported.
    """
    python = file.cluster.python if file.cluster is not None and not file.cluster.container else None
    here, there = current_folder(), file.run.working_folder
    try:
        if there is not None and there.is_dir():
            os.chdir(there)
        return inspect_objective(file.study.objective, python).final
    finally:
        os.chdir(here)


def plan_final(
    file: StudyFile, best: FrozenTrial, objective: str, *, seeds: int, epochs: int, nodes: int | None, local_cores: int
) -> FinalPlan:
    """Train the best and the default parameters, each with ``seeds`` seeds, for ``epochs`` epochs.

    What both have in common is fixed; where they differ, a parameter has exactly these two values. ``nodes``: None for
    as many as the trainings fill.

    Raises:
        UserError: ``seed`` is searched, or the number of nodes does not suit.
    """
    if SEED in file.study.parameters:
        raise UserError(f"the study searches {SEED!r} itself: the final trainings cannot repeat with other seeds")
    changed = (best.user_attrs.get(RESULT) or {}).get("changed", {})
    found: dict[str, Choice] = {**file.study.fixed, **changed, **best.params}
    defaults = {name: file.defaults[name] for name in found if name in file.defaults and name in best.params}
    differing = [name for name, value in defaults.items() if value != found[name]]
    settings = {BEST: {name: found[name] for name in differing}}
    if len(defaults) == len(best.params) and differing:
        settings[DEFAULT] = {name: defaults[name] for name in differing}
    common = {name: value for name, value in found.items() if name not in differing or len(settings) == 1}
    numbers: tuple[Choice, ...] = tuple(range(max(2, seeds)))
    parameters: dict[str, Parameter] = {SEED: Categorical(type="categorical", values=numbers)}
    if len(settings) > 1:
        for name in differing:
            values = (settings[BEST][name], settings[DEFAULT][name])
            parameters[name] = Categorical(type="categorical", values=values)
    common.pop(SEED, None)
    starts = [{**values, SEED: seed} for seed in range(seeds) for values in settings.values()]
    if len(settings) == 1:
        only = DEFAULT if len(defaults) == len(best.params) else BEST  # the best trial may be that of the defaults
        settings, starts = {only: {}}, [{SEED: seed} for seed in range(seeds)]
    study = file.study.model_copy(
        update={
            "objective": objective,
            "parameters": parameters,
            "fixed": common,
            "sampler": NamedWithOptions(name="random"),
            "pruner": NamedWithOptions(name="none"),
            "trials": len(starts),
            "epochs": epochs,
        }
    )
    run = file.run.model_copy(update={"nodes": nodes or 1})
    final = file.model_copy(update={"name": f"{file.name}-final", "study": study, "run": run})
    if nodes is None and file.cluster is not None:
        workers = make_plan(final, local_cores=local_cores).workers_per_node
        filled = min(file.run.nodes, math.ceil(len(starts) / workers))
        final = final.model_copy(update={"run": run.model_copy(update={"nodes": filled})})
    return FinalPlan(final, settings, starts, best.number)


def _plan_file(paths: StudyPaths) -> Path:
    return paths.folder / "final.json"


def make_final(paths: StudyPaths, plan: FinalPlan) -> FinalPlan:
    """Make the final study under another name beside ``paths``, so that it is whole as soon as it is there.

    A run that was cut short leaves nothing in the way of the next one.

    Returns the plan that counts: of two who make it at once, that of the first.

    Raises:
        UserError: something else has the name.
    """
    making = StudyPaths(paths.folder.with_name(f"{MAKING}{secrets.token_hex(4)}"))
    try:
        create_study(making, plan.file, plan.starts)
        write_plan(making, plan)
        making.folder.rename(paths.folder)
    except OSError as error:
        first = read_plan(paths) if error.errno in _TAKEN else None
        if first is not None:
            return first
        if error.errno not in _TAKEN:
            raise
        raise UserError(
            f"{paths.folder}: found what are no final trainings; allowed: a place that is free; move it away"
        ) from None
    finally:
        shutil.rmtree(making.folder, ignore_errors=True)
    return plan


def write_plan(paths: StudyPaths, plan: FinalPlan) -> None:
    """Keep in the final study's folder what its own study.yaml does not say."""
    kept = {"settings": plan.settings, "starts": plan.starts, "best_trial": plan.best_trial}
    write_atomically(_plan_file(paths), json.dumps(kept, indent=2) + "\n")


def read_plan(paths: StudyPaths) -> FinalPlan | None:
    """The plan of a final study that was begun; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    if not _plan_file(paths).exists():
        return None
    file = read_study_file(paths)
    try:
        return FinalPlan(file, **json.loads(_plan_file(paths).read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{_plan_file(paths)}: found no plan of final trainings ({error}); allowed: what hpcjobs.final wrote "
            f"there; move {paths.folder} away to train anew"
        ) from None
