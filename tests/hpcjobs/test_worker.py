"""One worker process: how trials end, how it stops, and what a stopped one that wakes up again does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState, create_trial

from hpcjobs import trial_files
from hpcjobs import worker as worker_module
from hpcjobs.budget import count
from hpcjobs.collect import configuration
from hpcjobs.context import TrialContext
from hpcjobs.failures import (
    EXIT_DEVICE_FAULT,
    EXIT_DONE,
    EXIT_HANDED_BACK,
    EXIT_UNUSABLE,
    Failure,
    FailureClass,
    classify,
)
from hpcjobs.heartbeat import read_status
from hpcjobs.journal_lock import JournalTimeoutError
from hpcjobs.journal_replay import LAST_ENDED
from hpcjobs.owners import process_start
from hpcjobs.placement import DeviceList
from hpcjobs.recovery import recover
from hpcjobs.spec import Control, WorkerSpec, control_file, status_file
from hpcjobs.study import OpenStudy
from hpcjobs.trial_files import read_curves
from hpcjobs.worker import MOST_UNASKED, seconds_to_checkpoint


def running_epoch(study: Any, trial: int = 0, epoch: int = 1) -> bool:
    found = study.trials()[trial]
    return found.state == TrialState.RUNNING and epoch in found.intermediate_values


def test_a_worker_spends_the_budget_and_ends(studies: Any) -> None:
    study = studies.create("quadratic", trials=5)
    assert studies.worker(study).wait(300) == EXIT_DONE
    assert count(study).completed == 5
    assert all(trial.value == (trial.params["x"] - 2.0) ** 2 for trial in study.trials())


@pytest.mark.parametrize(
    ("objective", "kind", "attempts"),
    [
        ("failing", FailureClass.OBJECTIVE, 2),
        ("exiting", FailureClass.OBJECTIVE, 2),
        ("interrupting", FailureClass.OBJECTIVE, 2),
        ("unspeakable", FailureClass.OBJECTIVE, 2),
        ("not_a_number", FailureClass.DIVERGED, 1),
        ("diverging", FailureClass.DIVERGED, 1),
    ],
)
def test_a_trials_own_failure_is_classed_and_spends_the_budget(
    objective: str, kind: FailureClass, attempts: int, studies: Any
) -> None:
    study = studies.create(objective, trials=2, retries=1)
    assert studies.worker(study).wait(300) == EXIT_DONE
    counts = count(study)
    assert (counts.failed, counts.left, counts.recovered) == (2, 0, 0)
    trial = study.trials()[0]
    assert trial.user_attrs["hpcjobs:failure"]["class"] == kind.value
    assert trial.user_attrs["hpcjobs:result"]["attempts"] == attempts
    assert trial.value is None


def test_a_failure_can_be_written_whatever_its_text() -> None:
    failure = classify(ValueError("b\udcff"))
    assert failure.message == r"ValueError: b\udcff"
    assert r"b\udcff" in failure.details
    assert "\udcff" not in failure.message + failure.details


@pytest.mark.parametrize("numbers", [10, 1_000_000])
def test_a_full_disk_is_known_by_what_torch_says_of_it(tmp_path: Path, numbers: int) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as full:
        torch.save({"weights": torch.zeros(numbers)}, "/dev/full")
    failure = classify(full.value)
    assert failure.kind == FailureClass.STORAGE and "probably for lack of room: RuntimeError: " in failure.message
    damaged = tmp_path / "checkpoint.pt"
    damaged.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(RuntimeError) as unreadable:
        torch.load(damaged)
    assert classify(unreadable.value).kind == FailureClass.OBJECTIVE


def test_a_child_that_the_objective_lets_return_does_not_go_on_as_a_worker(studies: Any) -> None:
    study = studies.create("forking", trials=3)
    assert studies.worker(study).wait(300) == EXIT_DONE
    assert [trial.value for trial in study.trials()] == [1.0, 1.0, 1.0]


def test_an_objective_can_end_its_children(studies: Any) -> None:
    study = studies.create("ending_children", trials=1)
    assert studies.worker(study).wait(120) == EXIT_DONE
    assert [trial.value for trial in study.trials()] == [50.0]


def test_the_traceback_of_an_objective_is_kept(studies: Any) -> None:
    study = studies.create("failing", trials=1)
    worker = studies.worker(study)
    worker.wait(300)
    failure = study.trials()[0].user_attrs["hpcjobs:failure"]
    assert failure["message"].startswith("ValueError: no value for x")
    assert 'raise ValueError(f"no value' in failure["traceback"]
    assert failure["traceback"] in (worker.folder / "log").read_text()


def test_a_trial_that_closes_its_streams_fails_by_itself_alone(studies: Any) -> None:
    study = studies.create("closing_its_streams", trials=4, workers=1)
    worker = studies.worker(study)
    assert worker.wait(300) == EXIT_DONE
    counts = count(study)
    assert (counts.completed, counts.failures, counts.recovered) == (2, {"objective error": 2}, 0)
    assert study.trials()[2].user_attrs["hpcjobs:failure"]["message"] == "ValueError: its own error"
    said = (worker.folder / "log").read_text()
    assert (said.count("its own word"), said.count("\nValueError: its own error")) == (4, 2)
    assert "ends with code 0" in said


def test_no_objective_silences_the_workers_log(studies: Any) -> None:
    study = studies.create("silencing_logs", trials=2)
    worker = studies.worker(study)
    assert worker.wait(300) == EXIT_DONE
    said = (worker.folder / "log").read_text()
    for trial in study.trials():
        assert f"trial {trial.number} begins\n" in said
        assert trial.user_attrs["hpcjobs:failure"]["traceback"] in said
    assert said.count("\nValueError: its own error") == 2


def test_a_retry_within_the_studys_policy_saves_the_trial(studies: Any) -> None:
    study = studies.create("failing_once", trials=1, retries=1)
    studies.worker(study).wait(300)
    assert count(study).completed == 1


def test_a_trial_out_of_gpu_memory_does_not_take_the_next_with_it(studies: Any) -> None:
    study = studies.create("out_of_gpu_memory", trials=4)
    assert studies.worker(study).wait(300) == EXIT_DONE
    counts = count(study)
    assert (counts.completed, counts.failures) == (2, {"out of GPU memory": 2})


def test_a_trial_out_of_gpu_memory_is_tried_smaller_where_the_study_allows_it(studies: Any) -> None:
    smaller = {"fixed": {"batch_size": 64}, "halve_on_gpu_memory": ("batch_size",)}
    study = studies.create("needs_a_small_batch", trials=1, **smaller)
    assert studies.worker(study).wait(300) == EXIT_DONE
    assert study.trials()[0].value == 16.0
    assert study.trials()[0].user_attrs["hpcjobs:result"]["changed"] == {"batch_size": 16}
    assert configuration(study.file, study.trials()[0])["batch_size"] == 16


def test_a_device_fault_costs_no_budget_and_ends_the_process(studies: Any) -> None:
    study = studies.create("device_fault_once", trials=2)
    assert studies.worker(study).wait(300) == EXIT_DEVICE_FAULT
    counts = count(study)
    assert (counts.budget, counts.waiting, counts.recovered) == (2, 2, 1)
    assert studies.worker(study).wait(300) == EXIT_DONE
    assert count(study).completed == 2


class QuietPulse:
    """The pulse of a worker that nobody stops."""

    reason = None

    def stop_ordered(self) -> bool:
        return False

    def seconds_left(self) -> float | None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def worker_here(study: OpenStudy, folder: Path, objective: Any) -> worker_module.Worker:
    spec = WorkerSpec(study.paths.folder, "here_1", 0, "token", "agent", 1, "", folder / "s", folder / "c")
    return worker_module.Worker(spec, study, objective, QuietPulse())  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["claim", "finish"])
def test_a_worker_outlasts_those_who_keep_the_journal_from_it(
    call: str, studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studies.create("quadratic", trials=2)
    real, refused = getattr(worker_module, call), []

    def refused_at_first(*arguments: Any, **more: Any) -> Any:
        if len(refused) < 3:
            refused.append(call)
            raise JournalTimeoutError("the journal is locked by somebody")
        return real(*arguments, **more)

    monkeypatch.setattr(worker_module, call, refused_at_first)
    assert worker_here(study, tmp_path, lambda params, context: 1.0).run() == EXIT_DONE
    assert (len(refused), count(study).completed) == (3, 2)


def test_what_the_sampler_raises_is_said_of_the_trial(
    studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studies.create("quadratic", trials=2)
    real, refused = worker_module.suggest, []

    def refused_at_first(*arguments: Any) -> Any:
        if not refused:
            refused.append(arguments)
            raise FloatingPointError("underflow encountered in exp")
        return real(*arguments)

    monkeypatch.setattr(worker_module, "suggest", refused_at_first)
    assert worker_here(study, tmp_path, lambda params, context: 1.0).run() == EXIT_DONE
    assert (count(study).completed, count(study).failures) == (1, {"objective error": 1})
    failure = study.trials()[0].user_attrs["hpcjobs:failure"]
    assert failure["message"] == "no parameters: the sampler raised FloatingPointError: underflow encountered in exp"
    assert "in refused_at_first" in failure["traceback"]


def test_how_an_objective_lets_numpy_and_python_raise_is_not_how_samplers_work(
    studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, real = studies.create("quadratic", trials=2), worker_module.suggest

    def carelessly(*arguments: Any) -> Any:
        warnings.warn("a small thing", stacklevel=1)
        assert np.exp(np.float64(-1000.0)) == 0.0
        return real(*arguments)

    def strict(params: Any, context: TrialContext) -> float:
        np.seterr(all="raise")
        warnings.simplefilter("error")
        return 1.0

    monkeypatch.setattr(worker_module, "suggest", carelessly)
    with np.errstate(), warnings.catch_warnings():
        assert worker_here(study, tmp_path, strict).run() == EXIT_DONE
    assert count(study).completed == 2


def test_another_disk_than_the_studys_is_found_full_only_so_often(
    studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_files, "ROOM_BYTES", 0)
    study = studies.create("quadratic", trials=2, epochs=2 * MOST_UNASKED)

    def full(params: Any, context: TrialContext) -> float:
        """For the first trial always, for the other one after each epoch."""
        done = int(context.checkpoint.read_text()) if context.checkpoint.exists() else 0
        if context.number and done < context.epochs:
            context.checkpoint.write_text(str(done + 1))
            context.report(done + 1, 1.0)
        if not context.number or done < context.epochs:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/batch")
        return 1.0

    assert worker_here(study, tmp_path, full).run() == EXIT_DONE
    counts = count(study)
    assert (counts.completed, counts.failures, counts.recovered) == (1, {"objective error": 1}, 0)
    failure = study.trials()[0].user_attrs["hpcjobs:failure"]
    assert "No space left on device: '/dev/shm/batch'" in failure["message"]
    assert f"({MOST_UNASKED + 1} times without a new report, while the study's own disk has room)" in failure["message"]


@pytest.mark.parametrize(("number", "room"), [(errno.ENOSPC, 1 << 62), (errno.EDQUOT, 0)])
def test_a_trial_waits_however_long_for_room_on_the_studys_disk(
    number: int, room: int, studies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_files, "ROOM_BYTES", room)
    study, tried = studies.create("quadratic", trials=1), []

    def full_for_long(params: Any, context: TrialContext) -> float:
        tried.append(context.number)
        if len(tried) <= 2 * MOST_UNASKED:
            raise OSError(number, os.strerror(number))
        return 1.0

    assert worker_here(study, tmp_path, full_for_long).run() == EXIT_DONE
    assert (count(study).completed, count(study).failures) == (1, {})


def test_a_full_disk_costs_no_trial_and_no_attempt(studies: Any) -> None:
    study = studies.create("disk_full_once", trials=2)
    assert studies.worker(study).wait(300) == EXIT_DONE
    counts = count(study)
    assert (counts.completed, counts.recovered, counts.failures) == (2, 0, {})


def test_handing_back_unasked_ends_no_study_and_without_progress_only_its_trial(studies: Any) -> None:
    study = studies.create("hands_back", trials=3, epochs=2 * MOST_UNASKED)
    assert studies.worker(study).wait(300) == EXIT_DONE
    counts = count(study)
    assert (counts.completed, counts.failed, counts.left, counts.recovered) == (2, 1, 0, 0)
    assert [trial.value for trial in study.trials()] == [None, 2.0 * MOST_UNASKED, 2.0 * MOST_UNASKED]
    failure = study.trials()[0].user_attrs["hpcjobs:failure"]
    assert failure["class"] == FailureClass.OBJECTIVE.value
    assert f"hand_back() was called {MOST_UNASKED + 1} times without a new report" in failure["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_hands_the_trial_back_and_another_worker_goes_on(number: int, studies: Any) -> None:
    study = studies.create("held_epochs", trials=1, epochs=30)
    worker = studies.worker(study)
    studies.wait_for(lambda: running_epoch(study, epoch=2))
    worker.send_signal(number)
    assert worker.wait(300) == EXIT_HANDED_BACK
    trial = study.trials()[0]
    assert trial.state == TrialState.WAITING
    assert max(trial.intermediate_values) == 2
    studies.let_go(study)
    assert studies.worker(study).wait(300) == EXIT_DONE
    trial = study.trials()[0]
    assert trial.value == 30.0
    # every epoch was done once: the second worker went on from the checkpoint
    steps = [row["step"] for row in read_curves(study) if row["trial"] == 0]
    assert steps == list(range(1, 31))


def test_the_agents_order_stops_a_worker(studies: Any) -> None:
    study = studies.create("held_epochs", trials=1)
    worker = studies.worker(study)
    studies.wait_for(lambda: running_epoch(study))
    Control(stop="cancelled").write(control_file(worker.folder))
    assert worker.wait(300) == EXIT_HANDED_BACK
    assert count(study).waiting == 1


def test_an_objective_that_does_not_listen_loses_its_trial_when_the_grace_is_over(studies: Any) -> None:
    study = studies.create("deaf", trials=1)
    worker = studies.worker(study, control=Control(grace_s=1.0))
    studies.wait_for(lambda: count(study).running == 1)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(300) == EXIT_HANDED_BACK
    assert count(study).waiting == 1


def test_workers_stop_in_time_before_the_job_ends(studies: Any) -> None:
    study = studies.create("held_epochs", trials=1)
    worker = studies.worker(study)
    studies.wait_for(lambda: running_epoch(study))
    now = time.monotonic()
    Control(stop_at=now + 1.0, end=now + 120.0).write(control_file(worker.folder))
    assert worker.wait(300) == EXIT_HANDED_BACK
    assert study.trials()[0].state == TrialState.WAITING
    assert study.trials()[0].intermediate_values


def test_no_trial_begins_that_could_not_reach_a_checkpoint(studies: Any) -> None:
    study = studies.create("quadratic", trials=2)
    studies.worker(study).wait(300)
    timing = {"hpcjobs:result": {"timing": {"first_report_s": 60.0}}}
    slow = create_trial(value=1.0, user_attrs=timing)
    study.storage.create_new_trial(study.study_id, slow)
    waiting = create_trial(state=TrialState.WAITING)
    study.storage.create_new_trial(study.study_id, waiting)
    now = time.monotonic()
    worker = studies.worker(study, control=Control(stop_at=now + 30.0, end=now + 60.0))
    assert worker.wait(300) == EXIT_HANDED_BACK
    assert count(study).waiting == 1


def test_the_time_to_a_checkpoint_is_known_without_a_look_at_all_ended_trials(
    studies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studies.create("quadratic", trials=1)
    assert seconds_to_checkpoint(study) == 0.0
    timings = [{"first_report_s": 600.0}, {"first_report_s": 60.0}, {"first_poll_s": 30.0, "first_report_s": 90.0}]
    for timing in timings + [{}] * (LAST_ENDED - 2):
        ended = create_trial(value=1.0, user_attrs={"hpcjobs:result": {"timing": timing}})
        study.storage.create_new_trial(study.study_id, ended)
    monkeypatch.setattr(OpenStudy, "trials", lambda *_: pytest.fail("all trials were looked at"))
    assert seconds_to_checkpoint(study) == 60.0


def test_a_worker_whose_agent_is_gone_hands_back(studies: Any) -> None:
    study = studies.create("held_epochs", trials=1)
    agent = subprocess.Popen(["sleep", "1000"])
    worker = studies.worker(study, agent_pid=agent.pid, agent_start=process_start(agent.pid))
    studies.wait_for(lambda: running_epoch(study))
    agent.kill()
    agent.wait()
    assert worker.wait(300) == EXIT_HANDED_BACK
    assert count(study).waiting == 1


def test_a_worker_that_slept_through_its_recovery_drops_its_trial(studies: Any) -> None:
    study = studies.create("held_epochs", trials=1, epochs=40)
    zombie = studies.worker(study)
    studies.wait_for(lambda: running_epoch(study, epoch=2))  # and it holds no lock until it may go on
    os.kill(zombie.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, zombie.pid, os.WSTOPPED | os.WNOWAIT)
    token = study.trials()[0].user_attrs["hpcjobs:owner"]["token"]
    assert recover(study, 0, token, Failure(FailureClass.NODE, "silent")) == 1
    before = study.trials()[0]
    studies.let_go(study)
    other = studies.worker(study)
    studies.wait_for(lambda: 3 in study.trials()[1].intermediate_values)
    os.kill(zombie.pid, signal.SIGCONT)
    assert zombie.wait(300) == other.wait(300) == EXIT_DONE
    assert study.trials()[0].intermediate_values == before.intermediate_values
    assert [trial.state for trial in study.trials()] == [TrialState.FAIL, TrialState.COMPLETE]
    assert study.trials()[1].intermediate_values == {step: float(step) for step in range(1, 41)}


def test_an_objective_that_can_not_be_imported_burns_no_trial(studies: Any) -> None:
    study = studies.create("nothing_of_this_name")
    worker = studies.worker(study)
    assert worker.wait(300) == EXIT_UNUSABLE
    assert "nothing_of_this_name" in (worker.folder / "log").read_text()
    assert count(study).waiting == 6


def test_a_worker_sees_exactly_its_device(studies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0,1,2,3,4,5,6,7")
    study = studies.create("show_devices", trials=1)
    worker = studies.worker(
        study,
        prepare=DeviceList({"37": "GPU-37"}).write,
        environment={"ROCR_VISIBLE_DEVICES": "37"},
        has_gpu=True,
        device="GPU 37",
        cores=(0,),
    )
    assert worker.wait(300) == EXIT_DONE
    seen = (study.paths.trial(0) / "devices").read_text()
    assert seen == "ROCR_VISIBLE_DEVICES=37 device=cuda:0 cores=[0]"


def test_a_light_worker_stays_small_and_without_torch(studies: Any) -> None:
    study = studies.create("deaf", trials=1)
    worker = studies.worker(study)
    studies.wait_for(lambda: count(study).running == 1)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    rss_mb = int(status.split("VmRSS:")[1].split()[0]) / 1024
    assert rss_mb < 90, f"256 workers of {rss_mb:.0f} MB do not fit into 24 GB"
    assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()


def test_the_status_file_tells_what_a_worker_does(studies: Any) -> None:
    study = studies.create("held_epochs", trials=1, epochs=100)
    worker = studies.worker(study)
    path = status_file(worker.folder, 0)
    status = studies.wait_for(lambda: (s := read_status(path)) and s.state == "running" and s.epoch and s)
    assert (status.trial, status.epochs, status.images_per_s) == (0, 100, 100.0)
    worker.send_signal(signal.SIGTERM)
    worker.wait(300)
    assert read_status(path).state == "ended"


def test_a_worker_by_hand_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcjobs.worker", str(tmp_path), "--worker", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "started by its node agent" in done.stderr
    assert "Traceback" not in done.stderr
