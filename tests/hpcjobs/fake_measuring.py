"""Measuring functions that measure nothing: their images are invented, and made up of what the cell is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


def measure_fake_images(context: Any) -> dict[str, Any]:
    """Twice as many images compute-only as end to end; a batch above the setting ``largest`` is out of memory."""
    if context.batch_size > context.settings.get("largest", 1 << 30):
        raise OutOfMemoryError("HIP out of memory. Tried to allocate 99 GiB")
    for name, factor in (("end_to_end", 1), ("compute_only", 2)):
        window = context.window(name)
        while not window.over:
            time.sleep(0.01)
        window.add(factor * context.batch_size)
        window.close()
    return {
        "memory_gb": context.batch_size / 10,
        "objective": "fake_measuring:train",
        "device": os.environ.get("ROCR_VISIBLE_DEVICES"),
    }


def fails_for_batch_16(context: Any) -> dict[str, Any]:
    if context.batch_size == 16:
        raise ValueError("sixteen is not liked")
    return measure_fake_images(context)


def dies_once_for_batch_16(context: Any) -> dict[str, Any]:
    died = Path(str(context.settings["folder"])) / f"died-{os.getppid()}"
    if context.batch_size == 16 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return measure_fake_images(context)


def is_told_to_end_at_batch_16(context: Any) -> dict[str, Any]:
    if context.batch_size == 16:
        os.kill(os.getpid(), context.settings["signal"])
        time.sleep(600)
    return measure_fake_images(context)


def never_ready_for_batch_16(context: Any) -> dict[str, Any]:
    if context.batch_size == 16:
        time.sleep(600)
    return measure_fake_images(context)


def opens_no_window(context: Any) -> dict[str, Any]:
    return {}


def returns_nothing(context: Any) -> None:
    measure_fake_images(context)


def returns_a_set(context: Any) -> dict[str, Any]:
    return {**measure_fake_images(context), "devices": {1, 2}}


def train(params: dict[str, Any], context: Any) -> float:
    return 0.0


train.parameters = {"x": {"type": "float"}, "batch_size": {"type": "int", "default": 8}}  # type: ignore[attr-defined]
