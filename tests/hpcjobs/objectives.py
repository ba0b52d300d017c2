"""Quick objectives for tests of the launcher. None needs torch."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def quadratic(params: dict[str, Any], context: Any) -> float:
    return float((params["x"] - 2.0) ** 2)


def epochs(params: dict[str, Any], context: Any, held: Callable[[int], bool] = lambda epoch: False) -> float:
    """Goes on from its checkpoint; each epoch takes ``epoch_s`` seconds. The value tells how many epochs it did."""
    done = int(context.checkpoint.read_text()) if context.checkpoint.exists() else 0
    for epoch in range(done + 1, context.epochs + 1):
        end = time.monotonic() + float(params.get("epoch_s", 0.05))
        while time.monotonic() < end or held(epoch):
            if context.stop_requested:
                context.hand_back()
            time.sleep(0.01)
        _save(context.checkpoint, str(epoch))
        context.report(epoch, float(epoch), images_per_s=100.0)
    return float(context.checkpoint.read_text())


def held_epochs(params: dict[str, Any], context: Any) -> float:
    """As ``epochs``, but once two are done the third lasts until somebody has put a file ``go`` into the study's
    folder: however long a test needs for what it does meanwhile, the trial runs and has two reports."""
    go = context.folder.parents[1] / "go"
    return epochs(params, context, lambda epoch: epoch == 3 and not go.exists())


def hands_back(params: dict[str, Any], context: Any) -> float:
    """Unasked: the first trial always, every other one after each epoch."""
    done = int(context.checkpoint.read_text()) if context.checkpoint.exists() else 0
    if context.number > 0 and done < context.epochs:
        _save(context.checkpoint, str(done + 1))
        context.report(done + 1, 1.0)
    if context.number == 0 or done < context.epochs:
        context.hand_back()
    return float(done)


def deaf(params: dict[str, Any], context: Any) -> float:
    """Never polls and never reports."""
    time.sleep(float(params.get("sleep_s", 600.0)))
    return 0.0


def failing(params: dict[str, Any], context: Any) -> float:
    raise ValueError(f"no value for x = {params['x']}")


def broken(params: dict[str, Any], context: Any) -> float:
    """Raises an error until somebody has put a file ``mended`` into the study's folder."""
    if not (context.folder.parents[1] / "mended").exists():
        raise ImportError("no module named missing")
    return quadratic(params, context)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text \udcff")


def unspeakable(params: dict[str, Any], context: Any) -> float:
    raise UnspeakableError


def exiting(params: dict[str, Any], context: Any) -> float:
    sys.exit(0)


def interrupting(params: dict[str, Any], context: Any) -> float:
    raise KeyboardInterrupt


def forking(params: dict[str, Any], context: Any) -> float:
    """Its child forgets to end."""
    child = os.fork()
    if child == 0:
        return 99.0
    os.waitpid(child, 0)
    return 1.0


def ending_children(params: dict[str, Any], context: Any) -> float:
    """Ends each child as soon as it is there, as the pools of multiprocessing do with idle ones."""
    ended = 0
    for _ in range(50):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        os.kill(child, signal.SIGTERM)
        ended += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    return float(ended)


def closing_its_streams(params: dict[str, Any], context: Any) -> float:
    """Every other one fails at that."""
    print("its own word")
    sys.stdout.close()
    sys.stderr.close()
    os.close(2)
    if context.number % 2 == 0:
        raise ValueError("its own error")
    return 1.0


def silencing_logs(params: dict[str, Any], context: Any) -> float:
    """Sets up logging for itself alone, in all ways there are, and fails."""
    import logging.config

    logging.config.dictConfig({"version": 1, "root": {"level": "CRITICAL"}})
    logging.basicConfig(force=True, handlers=[logging.NullHandler()])
    for name in ("hpcjobs", "hpcjobs.worker"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).addFilter(lambda record: False)
    logging.disable(logging.CRITICAL)
    raise ValueError("its own error")


def failing_once(params: dict[str, Any], context: Any) -> float:
    marker = Path(context.folder) / "tried"
    if not marker.exists():
        marker.touch()
        raise ValueError("the first attempt fails")
    return 1.0


def not_a_number(params: dict[str, Any], context: Any) -> float:
    return float("nan")


def diverging(params: dict[str, Any], context: Any) -> float:
    context.report(1, float("inf"))
    return 0.0


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def out_of_gpu_memory(params: dict[str, Any], context: Any) -> float:
    if context.number % 2 == 0:
        raise OutOfMemoryError("HIP out of memory. Tried to allocate 99 GiB")
    return 1.0


def needs_a_small_batch(params: dict[str, Any], context: Any) -> float:
    if params["batch_size"] > 16:
        raise OutOfMemoryError("HIP out of memory. Tried to allocate 99 GiB")
    return float(params["batch_size"])


def disk_full_once(params: dict[str, Any], context: Any) -> float:
    """Each trial finds the disk full at its first attempt; the library hides the reason, as many do."""
    marker = Path(context.folder) / "tried"
    if not marker.exists():
        marker.touch()
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("the checkpoint cannot be written") from None
    return 1.0


def device_fault_once(params: dict[str, Any], context: Any) -> float:
    if context.number == 0:
        raise RuntimeError("HIP error: an illegal memory access was encountered")
    return 1.0


def always_pruned(params: dict[str, Any], context: Any) -> float:
    import optuna

    context.report(1, 0.5)
    raise optuna.TrialPruned


def dying_once(params: dict[str, Any], context: Any) -> float:
    """The first process that runs it dies at once, after a report; its successor goes on."""
    if not context.checkpoint.exists():
        _save(context.checkpoint, "1")
        context.report(1, 1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return 10.0


def first_always_dying(params: dict[str, Any], context: Any) -> float:
    """The first trial and all that continue it end their worker, with ``code``."""
    if context.number not in (1, 2):
        os._exit(int(params.get("code", 9)))
    return 1.0


def _save(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def show_devices(params: dict[str, Any], context: Any) -> float:
    """Writes what it may use into the trial's folder."""
    names = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.endswith("_VISIBLE_DEVICES")]
    cores = sorted(os.sched_getaffinity(0))
    (context.folder / "devices").write_text(f"{' '.join(names)} device={context.device} cores={cores}")
    return 0.0


def device_fault(params: dict[str, Any], context: Any) -> float:
    raise RuntimeError("HIP error: an illegal memory access was encountered")


def with_batch_size(params: dict[str, Any], context: Any) -> float:
    return params["x"]


with_batch_size.parameters = {"x": {"type": "float"}, "batch_size": {"type": "int", "default": 32}}  # type: ignore[attr-defined]


def with_final(params: dict[str, Any], context: Any) -> float:
    return quadratic(params, context)


def final_training(params: dict[str, Any], context: Any) -> float:
    """Its figure tells its parameter and its seed."""
    value = float(params["x"] + 0.01 * params["seed"])
    (context.folder / "samples.png").write_text(str(params["x"]))
    context.report(1, -1.0)
    context.report(context.epochs, value, map=value)
    return value


with_final.final = "objectives:final_training"  # type: ignore[attr-defined]


def with_failing_final(params: dict[str, Any], context: Any) -> float:
    return quadratic(params, context)


def failing_final(params: dict[str, Any], context: Any) -> float:
    """One training of the defaults fails."""
    if (params["x"], params["seed"]) == (0.5, 1):
        raise ValueError("no luck")
    return final_training(params, context)


with_failing_final.final = "objectives:failing_final"  # type: ignore[attr-defined]


def with_broken_final(params: dict[str, Any], context: Any) -> float:
    return quadratic(params, context)


with_broken_final.final = "objectives:failing"  # type: ignore[attr-defined]
