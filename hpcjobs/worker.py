"""Runs once per logical GPU: claims waiting trials and runs the objective on them until the budget is spent.

The node agent starts it and names, in the environment, the folder on the node's own disk with what the worker is told
(:class:`~hpcjobs.spec.WorkerSpec`). torch is not imported here: a worker whose objective does without it stays small.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from hpcjobs.budget import RESULT, TrialTaken, claim, finish, hand_back, times_unasked, trials_left
from hpcjobs.checked_study import read_checked
from hpcjobs.context import HandBack, TrialContext, own_error_handling
from hpcjobs.errors import UserError, run_entry
from hpcjobs.failures import (
    EXIT_DEVICE_FAULT,
    EXIT_DONE,
    EXIT_HANDED_BACK,
    EXIT_UNUSABLE,
    Failure,
    FailureClass,
    classify,
    is_journal_out_of_reach,
    is_quota,
    is_storage_full,
)
from hpcjobs.owners import Owner
from hpcjobs.paths import StudyPaths
from hpcjobs.placement import PlacementError, check_place, load_objective, take_place
from hpcjobs.pulse import Pulse
from hpcjobs.recovery import inherit_files, recover
from hpcjobs.sampling import suggest
from hpcjobs.spec import NODE_FOLDER, WorkerSpec, spec_file
from hpcjobs.study import OpenStudy, open_study
from hpcjobs.trial_files import has_room, tidy_up_after
from hpcjobs.worker_log import WorkerLog

log = logging.getLogger("hpcjobs.worker")

T = TypeVar("T")
Objective = Callable[[dict[str, Any], TrialContext], float]
# an idle worker looks for a trial that came back at first so often, then ever less
IDLE_POLL_S = (0.2, 3.0)
# a trial that still runs out of GPU memory with an eighth of what the study fixes has failed
MOST_HALVINGS = 3
# an objective that hands its trial back unasked once more, without a new report in between, has failed; so has one that
# finds a disk full so often which is not the study's
MOST_UNASKED = 5
# a worker whose trial found the disk full begins no other one for so long
FULL_DISK_PAUSE_S = 10.0
JOURNAL_PAUSE_S = 1.0


def release_memory() -> None:
    """Free what a trial left behind, so that a failed one does not take the next with it."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def seconds_to_checkpoint(study: OpenStudy) -> float:
    """How long the slowest of the last trials took until it could be saved; 0 where none tells."""
    ended = study.storage.last_ended(study.study_id)
    timings = [(trial.user_attrs.get(RESULT) or {}).get("timing", {}) for trial in ended]
    # an objective that polls can save at any step once it has begun; any other one needs a whole epoch
    needed = [timing.get("first_poll_s", timing.get("first_report_s", 0.0)) for timing in timings]
    return max(needed, default=0.0)


class Worker:
    """The trial loop of one process."""

    def __init__(self, spec: WorkerSpec, study: OpenStudy, objective: Objective, pulse: Pulse) -> None:
        self._spec = spec
        self._study = study
        self._objective = objective
        self._pulse = pulse
        self._owner = Owner.of_this_process(
            element=spec.element, agent=spec.agent, worker=spec.worker, token=spec.token
        )

    def run(self) -> int:
        """Run trials until none is left or a stop is ordered; returns the process's exit code."""
        pause = IDLE_POLL_S[0]
        while not self._pulse.stop_ordered():
            if not self._another_trial_fits():
                log.info("too little time is left for another trial")
                return EXIT_HANDED_BACK
            trial_id = self._patiently(lambda: claim(self._study, self._owner))
            if trial_id is None:
                if trials_left(self._study) == 0:
                    log.info("the study's budget is spent")
                    return EXIT_DONE
                # others run still, and their trials may come back
                self._pulse.update(state="idle", trial=None)
                self._pulse.wait(pause * random.uniform(0.5, 1.0))  # hundreds must not look at the same moment
                pause = min(IDLE_POLL_S[1], 1.5 * pause)
                continue
            pause = IDLE_POLL_S[0]
            code = self._run_trial(trial_id)
            if code != EXIT_DONE:
                return code
        log.info("stopping: %s", self._pulse.reason)
        return EXIT_HANDED_BACK

    def _patiently(self, action: Callable[[], T]) -> T:
        """Do this on the journal however long others keep it from us, waiting on a full disk, say.

        What a trial has reached is not dropped for that. The end of the job still ends the waiting, by force.
        """
        while True:
            try:
                return action()
            except OSError as error:
                if not is_journal_out_of_reach(error):
                    raise
                log.warning("%s; trying again", error)
                self._pulse.update(message=str(error))
                self._pulse.wait(JOURNAL_PAUSE_S)

    def _another_trial_fits(self) -> bool:
        """Whether a trial begun now could still reach a checkpoint."""
        left = self._pulse.seconds_left()
        return left is None or left > 1.2 * seconds_to_checkpoint(self._study)

    def _run_trial(self, trial_id: int) -> int:
        trial = optuna.Trial(self._study.optuna_study(self._study.trial(trial_id).number), trial_id)
        log.info("trial %d begins", trial.number)
        self._pulse.begin_trial(trial.number, trial_id, self._study.file.study.epochs)
        try:
            return self._attempts(trial, trial_id)
        except (TrialTaken, UpdateFinishedTrialError) as taken:
            log.warning("trial %d dropped, somebody else goes on with it: %s", trial.number, taken)
        except HandBack as back:
            asked = back.asked
            self._patiently(lambda: hand_back(self._study, trial_id, self._spec.token, asked=asked))
            if asked:
                log.info("trial %d handed back: %s", trial.number, self._pulse.reason or "too little time is left")
                return EXIT_HANDED_BACK
            log.warning("trial %d handed back, though nobody asked to: it is offered again", trial.number)
        finally:
            self._pulse.end_trial()
            release_memory()
        return EXIT_DONE

    def _attempts(self, trial: optuna.Trial, trial_id: int) -> int:
        """Run the objective, again after its own errors as often as the study allows, and write how it ended."""
        try:
            params = self._draw(trial)
            inherit_files(self._study.paths, self._study.trial(trial_id))
        except OSError as error:
            if not is_journal_out_of_reach(error):
                raise
            return self._wait_for_room(trial_id, classify(error))
        if isinstance(params, Failure):
            log.error("trial %d: %s\n%s", trial.number, params.message, params.details)
            self._finish(trial_id, TrialState.FAIL, failure=params)
            return EXIT_DONE
        retries, halvings = self._study.file.study.retries, MOST_HALVINGS
        attempts = 0
        changed: dict[str, int] = {}
        while True:
            attempts += 1
            context = self._context(trial)
            outcome = self._call({**params, **changed}, context, trial_id)
            result = {"figures": context.figures, "timing": context.timing.as_dict(), "attempts": attempts}
            if changed:
                result["changed"] = changed
            if isinstance(outcome, float):
                self._finish(trial_id, TrialState.COMPLETE, value=outcome, result=result)
                log.info("trial %d completed: %.6g", trial.number, outcome)
                return EXIT_DONE
            if outcome is None:
                self._finish(trial_id, TrialState.PRUNED, result=result)
                log.info("trial %d pruned", trial.number)
                return EXIT_DONE
            log.error("trial %d, %s: %s\n%s", trial.number, outcome.kind.value, outcome.message, outcome.details)
            if outcome.kind == FailureClass.STORAGE:
                return self._wait_for_room(trial_id, outcome)
            if outcome.is_infrastructure:
                successor = recover(self._study, trial_id, self._spec.token, outcome)
                log.warning("trial %d goes on elsewhere as trial %s", trial.number, successor)
                return EXIT_DEVICE_FAULT if outcome.kind == FailureClass.DEVICE else EXIT_DONE
            release_memory()
            smaller = self._halved({**params, **changed}) if outcome.kind == FailureClass.GPU_MEMORY else {}
            if smaller and halvings:
                halvings -= 1
                changed = smaller
                log.warning("trial %d is tried again with %s", trial.number, changed)
                continue
            # with the same numbers these two would end the same way again
            if not retries or outcome.kind in (FailureClass.DIVERGED, FailureClass.GPU_MEMORY):
                break
            retries -= 1
        self._finish(trial_id, TrialState.FAIL, failure=outcome, result=result)
        return EXIT_DONE

    def _draw(self, trial: optuna.Trial) -> dict[str, Any] | Failure:
        """The parameters, or what the sampler raised: in another process it would raise the same."""
        with self._study.storage.batch(), own_error_handling():
            try:
                return suggest(trial, self._study.file.study)
            except (OSError, MemoryError, UpdateFinishedTrialError):
                raise  # of the storage, or of the machine
            except Exception as error:  # noqa: BLE001  # samplers use libraries of all kinds
                failure = classify(error)
        return Failure(FailureClass.OBJECTIVE, f"no parameters: the sampler raised {failure.message}", failure.details)

    def _halved(self, params: dict[str, Any]) -> dict[str, int]:
        """The smaller values with which the study lets a trial try again that ran out of GPU memory."""
        names = self._study.file.study.halve_on_gpu_memory
        return {name: params[name] // 2 for name in names if params[name] >= 2}

    def _wait_for_room(self, trial_id: int, failure: Failure) -> int:
        """The disk is full: the trial goes back as it was last saved, for which the journal itself waits for room.

        If it is another disk than the study's, this is counted as a trial is that its objective hands back unasked.
        """
        log.warning("%s: the trial is handed back until there is room", failure.message)
        self._pulse.update(state="idle", message=failure.message)
        asked = not failure.elsewhere
        self._patiently(lambda: hand_back(self._study, trial_id, self._spec.token, asked=asked))
        self._pulse.wait(FULL_DISK_PAUSE_S)
        self._pulse.update(message="")
        return EXIT_DONE

    def _call(self, params: dict[str, Any], context: TrialContext, trial_id: int) -> float | Failure | None:
        """One attempt: the objective's value, why it failed, or None for pruned."""
        try:
            value = float(self._objective(dict(params), context))
        except optuna.TrialPruned:
            return None
        except HandBack as back:
            times = times_unasked(self._study.trial(trial_id))
            if back.asked or times < MOST_UNASKED:
                raise
            message = f"hand_back() was called {times + 1} times without a new report, though no stop was requested"
            return Failure(FailureClass.OBJECTIVE, f"{message}; allowed: where context.stop_requested is true")
        except TrialTaken:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit() in a user's function too is this trial's failure
            failure = classify(error)
            return self._of_a_full_disk(error, failure, trial_id) if failure.kind == FailureClass.STORAGE else failure
        finally:
            if os.getpid() != self._owner.pid:
                os._exit(1)  # a child that the objective has forked and let return: it must not go on as a worker
        if not math.isfinite(value):
            return Failure(FailureClass.DIVERGED, f"the objective returned {value}")
        return value

    def _of_a_full_disk(self, error: BaseException, failure: Failure, trial_id: int) -> Failure:
        """Why the attempt failed: the study's disk gets room some day, of any other one nobody may know."""
        if not is_storage_full(error) or is_quota(error) or not has_room(self._study.paths.folder):
            return failure
        times = times_unasked(self._study.trial(trial_id))
        if times < MOST_UNASKED:
            return replace(failure, elsewhere=True)
        message = f"{failure.message} ({times + 1} times without a new report, while the study's own disk has room)"
        return Failure(FailureClass.OBJECTIVE, message, failure.details)

    def _finish(self, trial_id: int, state: TrialState, **more: Any) -> None:
        ended = self._patiently(lambda: finish(self._study, trial_id, self._spec.token, state, **more))
        tidy_up_after(self._study, ended)
        self._pulse.trial_finished()

    def _context(self, trial: optuna.Trial) -> TrialContext:
        return TrialContext(
            trial=trial,
            token=self._spec.token,
            folder=self._study.paths.trial(trial.number),
            curves=self._study.paths.worker_curves(self._spec.element, self._spec.worker),
            data=self._study.file.run.data,
            epochs=self._study.file.study.epochs,
            device="cuda:0" if self._spec.has_gpu else "cpu",
            clock=self._pulse,
        )


def work(spec: WorkerSpec, own_log: WorkerLog) -> int:
    """Run the worker that ``spec`` describes; returns the exit code."""
    misplaced = None
    try:
        take_place(spec)
    except PlacementError as error:
        misplaced = error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(StudyPaths(spec.folder), read_checked(spec.status.parent))
    gc.freeze()  # a long study is a million objects: what looks for garbage after each trial passes them over
    pulse = Pulse(spec, study.file)
    pulse.start()
    code = 1
    try:
        code = _unusable(pulse, misplaced) if misplaced else _work(spec, study, pulse, own_log)
    finally:
        pulse.stop(code)
    return code


def _work(spec: WorkerSpec, study: OpenStudy, pulse: Pulse, own_log: WorkerLog) -> int:
    name = study.file.study.objective
    try:
        with own_log.kept():
            objective = load_objective(name, study.file.run.working_folder)
    except Exception as error:
        log.exception("the objective was not imported")
        return _unusable(pulse, ImportError(f"the objective {name} cannot be imported: {error}"))
    try:
        check_place(spec, spec.status.parent)
    except PlacementError as error:
        return _unusable(pulse, error)

    def run(params: dict[str, Any], context: TrialContext) -> float:
        with own_log.kept():
            return float(objective(params, context))

    return Worker(spec, study, run, pulse).run()


def _unusable(pulse: Pulse, error: Exception) -> int:
    """No trial is taken here; the node's agent shows why."""
    log.error("%s", error)
    pulse.update(message=str(error))
    return EXIT_UNUSABLE


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpcjobs.worker", description="Started by the node agent only.")
    parser.add_argument("folder", type=Path, help="the study's folder")
    parser.add_argument("--worker", type=int, required=True, help="number of the worker on its node, from 0")
    options = parser.parse_args(arguments)
    if NODE_FOLDER not in os.environ:
        raise UserError("a worker is started by its node agent: submit the study instead (python -m hpcjobs.submit)")
    spec = WorkerSpec.read(spec_file(Path(os.environ[NODE_FOLDER]), options.worker))
    own_log = WorkerLog()
    log.info("worker %d of %s, process %d, device %s", spec.worker, spec.element, os.getpid(), spec.device or "cpu")
    started = time.monotonic()
    code = work(spec, own_log)
    log.info("ends with code %d after %.0f s", code, time.monotonic() - started)
    return code


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(run_entry(main))
