"""NVIDIA's Multi-Process Service for the workers that share a GPU: without it their kernels take turns."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("hpcjobs.node")

TIMEOUT_S = 60
# what a worker does at its start; it fails where the service runs and its clients cannot reach it
_PROBE = (
    "import ctypes, sys; d = ctypes.CDLL('libcuda.so.1'); c = ctypes.c_void_p(); "
    "sys.exit(d.cuInit(0) or d.cuCtxCreate_v2(ctypes.byref(c), 0, 0))"
)


@contextlib.contextmanager
def shared_gpus(folder: Path) -> Iterator[bool]:
    """While it lasts, processes started from here share their GPUs through a service of this node's own.

    Yields whether there is one: it is not an error where there is no such service, or it does not work. Its sockets and
    logs are in ``folder``.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield False
        return
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield True  # the site's own
        return
    variables = {f"CUDA_MPS_{name}_DIRECTORY": str(folder / f"mps_{name.lower()}") for name in ("PIPE", "LOG")}
    for place in variables.values():
        Path(place).mkdir(exist_ok=True)
    os.environ.update(variables)
    try:
        yield _started(program)
    finally:
        # with our folders always: without them this would end another's service
        own = {**os.environ, **variables}
        try:
            subprocess.run([program], input="quit\n", text=True, capture_output=True, timeout=TIMEOUT_S, env=own)
        except subprocess.TimeoutExpired as error:  # it ends with the job; what comes after must not fail for it
            log.warning("MPS does not end: %s", error)
        for name in variables:
            os.environ.pop(name, None)


def _started(program: str) -> bool:
    """Start the service and try it; if it does not work, later processes must not look for it."""
    for command in ([program, "-d"], [sys.executable, "-c", _PROBE]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
            wrong = (done.stderr or done.stdout).strip()[-300:] if done.returncode else None
        except subprocess.TimeoutExpired as error:
            wrong = str(error)
        if wrong is not None:
            log.warning("no MPS, workers on one GPU take turns: %s", wrong)
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                del os.environ[name]
            return False
    return True
