"""Entry: trains with the best and with the default parameters on all training data, and tests both once."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

from optuna.trial import FrozenTrial
from rich.console import Console

from hpcjobs.budget import count
from hpcjobs.errors import UserError, run_entry
from hpcjobs.final_plan import DEFAULT, SEED, FinalPlan, declared_final, make_final, plan_final, read_plan
from hpcjobs.final_results import results_of, table_of, title_of, write_results
from hpcjobs.launch import cancel_requested, launch
from hpcjobs.paths import StudyPaths
from hpcjobs.plan import make_plan
from hpcjobs.preflight import check_slurm
from hpcjobs.progress import StudyWatch, best_trial
from hpcjobs.status import Jobs, watch
from hpcjobs.status_look import look_again
from hpcjobs.study import OpenStudy, open_study
from hpcjobs.submission import available_cores
from hpcjobs.text import counted, number_text, positive

SEEDS = 3

_EXAMPLES = """\
examples:
  python -m hpcjobs.final runs/experiment1                          # three seeds, twice the epochs of a trial
  python -m hpcjobs.final runs/experiment1 --seeds 5 --epochs 30
  python -m hpcjobs.final runs/experiment1                          # again: goes on, or shows what came of it
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    study = open_study(StudyPaths(options.folder))
    paths = StudyPaths(study.paths.folder / "final")
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    _check_ended(study)
    best = best_trial(study)
    if best is None:
        raise UserError(f"{study.paths.folder}: no trial has completed, so there are no best parameters")
    plan = read_plan(paths)
    is_new = plan is None
    if plan is None:
        plan = _new_plan(study, best, options)
    else:
        _check_same(plan, paths, options)
    if is_new or options.dry_run:
        _show(plan, console)
    if options.dry_run:
        print("\nnothing was made or submitted (--dry-run)")
        return 0
    if is_new:
        plan = make_final(paths, plan)
    elif plan.best_trial != best.number:
        note = (
            f"trial {best.number} is better than trial {plan.best_trial}, with which these trainings began; to train "
        )
        console.print(f"note: {note}with it, move {paths.folder} away", style="yellow")
    final = open_study(paths)
    if count(final).left:
        _start(final, options.nodes, console)
        if options.detach:
            console.print(f"  watch    python -m hpcjobs.status {shlex.quote(str(paths.folder))}")
            console.print(f"  results  python -m hpcjobs.final {shlex.quote(str(study.paths.folder))}")
            return 0
        watch(paths)
    return _finish(study, final, plan, console)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hpcjobs.final",
        description="After a study: train with the best and with the default parameters on all\n"
        "training data, with several seeds, then test each training once on data that\nno trial has seen.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the folder of a study that has ended")
    parser.add_argument("--seeds", type=positive, metavar="N", help=f"trainings of each setting (default: {SEEDS})")
    parser.add_argument("--epochs", type=positive, metavar="N", help="of each training (default: twice a trial's)")
    parser.add_argument("--nodes", type=positive, metavar="N", help="nodes (default: as many as the trainings fill)")
    parser.add_argument("--detach", action="store_true", help="start, and do not wait; call it again for the results")
    parser.add_argument("--dry-run", action="store_true", help="show what would be trained; make and submit nothing")
    return parser.parse_args(arguments)


def _check_ended(study: OpenStudy) -> None:
    """As long as trials may still learn from results, the evaluation data stay unseen."""
    counts = count(study)
    if counts.running or (counts.waiting and not cancel_requested(study.paths)):
        folder = shlex.quote(str(study.paths.folder))
        raise UserError(
            f"{study.paths.folder}: the study has not ended ({counted(counts.running, 'trial')} running, "
            f"{counts.waiting} waiting); allowed: a study that has ended, since its trials must not learn of the "
            "evaluation data. Wait for it "
            f"(python -m hpcjobs.status {folder}) or end it (python -m hpcjobs.cancel {folder})"
        )


def _new_plan(study: OpenStudy, best: FrozenTrial, options: argparse.Namespace) -> FinalPlan:
    file = study.file
    objective = declared_final(file)
    if objective is None:
        raise UserError(
            f"objective: {file.study.objective} declares no function for the final training; allowed: an attribute "
            "`final` of it, the text module:function. That function takes (params, context) as the objective does, "
            "trains on all training data, and returns the value on data that no trial has seen"
        )
    seeds, epochs = options.seeds or SEEDS, options.epochs or 2 * file.study.epochs
    return plan_final(
        file,
        best,
        objective,
        seeds=seeds,
        epochs=epochs,
        nodes=options.nodes,
        local_cores=available_cores(),
    )


def _check_same(plan: FinalPlan, paths: StudyPaths, options: argparse.Namespace) -> None:
    """Trainings that have begun go on as they are: the settings must be compared by the same."""
    known = {"seeds": len({start[SEED] for start in plan.starts}), "epochs": plan.file.study.epochs}
    for name, value in known.items():
        asked = getattr(options, name)
        if asked not in (None, value):
            raise UserError(
                f"--{name} {asked}: the final trainings of this study began with {value}; allowed: the same, or leave "
                f"it out; to begin anew, move {paths.folder} away"
            )


def _show(plan: FinalPlan, console: Console) -> None:
    study = plan.file.study
    console.print(f"{counted(study.trials, 'training')} of {counted(study.epochs, 'epoch')} by {study.objective}")
    for setting, values in plan.settings.items():
        text = ", ".join(f"{name}={number_text(value)}" for name, value in values.items())
        console.print(f"  {setting:10} {text or 'as below'}")
    if list(plan.settings) == [DEFAULT]:
        console.print("  the best trial is that of the defaults: there is nothing to compare them with", style="yellow")
    fixed = ", ".join(f"{name}={number_text(value)}" for name, value in study.fixed.items())
    if fixed:
        console.print(f"  {'both':10} {fixed}")


def _start(final: OpenStudy, nodes: int | None, console: Console) -> None:
    """Start node agents, on as many nodes as at first unless ``nodes`` says otherwise, if none are there."""
    watched = StudyWatch(final)
    if Jobs(final.paths).any_left(look_again(final.paths, watched, watched.look())):
        return
    file = final.file
    if nodes is not None:
        file = file.model_copy(update={"run": file.run.model_copy(update={"nodes": nodes})})
    plan = make_plan(file, local_cores=available_cores())
    if plan.cluster is not None:
        check_slurm(plan.cluster.name)
    launched = launch(final.paths, file, plan)
    where = "on this machine as process" if plan.cluster is None else f"on {counted(plan.nodes, 'node')} as job"
    console.print(f"started {where} {', '.join(launched.job_ids)}")


def _finish(study: OpenStudy, final: OpenStudy, plan: FinalPlan, console: Console) -> int:
    results = results_of(final, plan)
    anew = f"Mend the cause; to train anew, move {final.paths.folder} away and call this again."
    if not results.figures:
        failures = ", ".join(f"{number} x {kind}" for kind, number in count(final).failures.items())
        console.print(f"No training has completed ({failures or 'none has ended'}). Logs: {final.paths.logs}")
        if not count(final).left:
            console.print(anew)
        return 1
    write_results(final, plan, results, study.paths)
    if importlib.util.find_spec("matplotlib"):
        from hpcjobs.report_final import final_figure
        from hpcjobs.report_style import require_matplotlib

        require_matplotlib()
        study.paths.figures.mkdir(parents=True, exist_ok=True)
        final_figure(final, plan, results, study.paths.figures / "final.png")
    console.print(title_of(results), style="bold")
    console.print(table_of(results))
    if any(results.gain(name) is not None and not results.beyond_spread(name) for name in results.names):
        console.print("a gain in brackets is smaller than the two deviations together", style="dim")
    if results.failed:
        failed = counted(results.failed, "training")
        console.print(f"{failed} failed, logs: {final.paths.logs}. {anew}", style="yellow")
    console.print(
        f"figures  {study.paths.final}\nreport   python -m hpcjobs.report {shlex.quote(str(study.paths.folder))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
