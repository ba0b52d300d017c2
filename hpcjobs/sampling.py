"""From the study file to Optuna: samplers, pruners and the values of one trial."""

from __future__ import annotations

import inspect
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcjobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import optuna

    from hpcjobs.config import Choice, NamedWithOptions, Parameter, StudyConfig
    from hpcjobs.yaml_file import Document, KeyPath

SAMPLERS = {
    "tpe": "ReportsTPESampler",  # our own: see hpcjobs.tpe
    "random": "RandomSampler",
    "qmc": "QMCSampler",
    "cmaes": "CmaEsSampler",
    "gp": "GPSampler",
}
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "asha": "HalvingPruner",  # our own: see hpcjobs.halving
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
    "patient": "PatientPruner",
    "wilcoxon": "WilcoxonPruner",
}


# what options cannot set: the study has its own
_NOT_OPTIONS = frozenset({"self", "seed", "epochs", "wrapped_pruner"})


def _unknown(document: Document | None, key: KeyPath, found: str, name: str, known: Iterable[str]) -> UserError:
    """With file and line where the study comes from a file that people edit."""
    from hpcjobs.load import Mistake, mistakes_error, nearest  # late: every worker imports this module

    mistake = Mistake(key, ", ".join(known) or "none", found, nearest(name, known))
    if document is not None:
        return mistakes_error(document, [mistake])
    near = f"; {mistake.remedy}" if mistake.remedy else ""
    return UserError(f"study: {mistake.found}; allowed are {mistake.allowed}{near}")


def _class_name(kind: str, named: NamedWithOptions, known: dict[str, str], document: Document | None) -> str:
    if named.name in known:
        return known[named.name]
    found = f"unknown {kind} {named.name!r}"
    raise _unknown(document, (kind, "name"), found, named.name, sorted(known))


def _build(
    kind: str, named: NamedWithOptions, module: Any, class_name: str, document: Document | None, **more: Any
) -> Any:
    options: dict[str, Any] = dict(named.options)
    if class_name == "PatientPruner":
        options.setdefault("patience", 1)
        more["wrapped_pruner"] = None
    wanted = getattr(module, class_name)
    known = sorted(inspect.signature(wanted).parameters.keys() - _NOT_OPTIONS)
    for option in options:
        if option not in known:
            found = f"unknown option {option!r} of {kind} {named.name!r}"
            raise _unknown(document, (kind, "options", option), found, option, known)
    with warnings.catch_warnings():
        # the options that a study needs (constant_liar, multivariate) are marked experimental since years
        warnings.simplefilter("ignore")
        try:
            return wanted(**options, **more)
        except (TypeError, ValueError) as error:
            raise UserError(f"study: the options {options} of {kind} {named.name!r} do not work: {error}") from error


def make_sampler(
    config: StudyConfig, trial_number: int | None = None, document: Document | None = None
) -> optuna.samplers.BaseSampler:
    """The study's sampler, seeded for one trial: what a trial draws does not depend on the worker that draws it.

    Raises:
        UserError: for an unknown name or options that the sampler refuses.
    """
    import numpy as np
    import optuna

    from hpcjobs import tpe

    seed = None
    if config.seed is not None:
        seed = int(np.random.SeedSequence([config.seed, trial_number or 0]).generate_state(1)[0])
    class_name = _class_name("sampler", config.sampler, SAMPLERS, document)
    module: ModuleType = tpe if class_name == "ReportsTPESampler" else optuna.samplers
    sampler: optuna.samplers.BaseSampler = _build("sampler", config.sampler, module, class_name, document, seed=seed)
    return sampler


def make_pruner(config: StudyConfig, document: Document | None = None) -> optuna.pruners.BasePruner:
    """The study's pruner.

    Raises:
        UserError: for an unknown name or options that the pruner refuses.
    """
    import optuna

    from hpcjobs import halving

    class_name = _class_name("pruner", config.pruner, PRUNERS, document)
    module: ModuleType = optuna.pruners
    more: dict[str, Any] = {}
    if class_name == "HalvingPruner":
        module, more = halving, {"epochs": config.epochs}
    pruner: optuna.pruners.BasePruner = _build("pruner", config.pruner, module, class_name, document, **more)
    return pruner


def check_sampling(config: StudyConfig, document: Document | None = None) -> None:
    """Draw one trial from the search space, past the sampler's random start, and let the pruner look at it.

    Some samplers import what they need, or look at their options, only then: in a job that would cost every trial.
    ``document``: the file that the study was read from, for messages.

    Raises:
        UserError: sampler or pruner cannot do it.
    """
    import optuna

    sampler, pruner = make_sampler(config, 0, document), make_pruner(config, document)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _draw_once(config, sampler, pruner)
    except Exception as error:  # what their own code raises, it would raise in every worker
        missing = f"; install it: pip install {error.name}" if isinstance(error, ImportError) and error.name else ""
        raise UserError(
            f"study: sampler {config.sampler.name!r} with options {config.sampler.options} and pruner "
            f"{config.pruner.name!r} with options {config.pruner.options} cannot work on this search space: "
            f"{type(error).__name__}: {error}{missing}"
        ) from error
    finally:
        optuna.logging.set_verbosity(verbosity)


def _draw_once(config: StudyConfig, sampler: optuna.samplers.BaseSampler, pruner: optuna.pruners.BasePruner) -> None:
    import optuna

    study = optuna.create_study(direction=config.direction, sampler=optuna.samplers.RandomSampler(seed=0))
    start = config.sampler.options.get("n_startup_trials", 10)
    for number in range(min(start, 100) + 2 if isinstance(start, int) else 12):
        trial = study.ask()
        suggest(trial, config)
        trial.report(float(number), 1)
        study.tell(trial, float(number))
    study.sampler, study.pruner = sampler, pruner
    trial = study.ask()
    suggest(trial, config)
    trial.report(0.0, 1)
    trial.should_prune()


def distribution(space: Parameter) -> optuna.distributions.BaseDistribution:
    """One parameter of the search space as Optuna's distribution."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if space.type == "categorical":
        return CategoricalDistribution(space.values)
    if space.type == "int":
        return IntDistribution(space.min, space.max, log=space.log, step=space.step)
    return FloatDistribution(space.min, space.max, log=space.type == "loguniform")


def fits(space: optuna.distributions.BaseDistribution, value: Choice) -> bool:
    """Whether a value, which may come from another search space, lies in this one."""
    try:
        return bool(space._contains(space.to_internal_repr(value)))
    except ValueError:
        return False


def suggest(trial: optuna.Trial, config: StudyConfig) -> dict[str, Choice]:
    """The values of one trial: the fixed ones and those of the search space.

    Values that the trial already has (it was handed back, or goes on for another one) stay as they are.
    """
    values: dict[str, Choice] = dict(config.fixed)
    for name, space in config.parameters.items():
        values[name] = trial._suggest(name, distribution(space))
    return values
