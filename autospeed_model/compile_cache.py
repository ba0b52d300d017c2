"""Compile once: the first process of a node compiles while the others wait for it; all later ones read.

PyTorch's own caches hold the code (their keys cover versions, device, source and shapes). This module adds who goes
first, and a file on the shared filesystem from which a fresh node fills its cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from autospeed_model.accelerator import SHARED_CACHE, node_cache

log = logging.getLogger("autospeed_model")

# The modules whose code is compiled.
SOURCES = ("assignment", "augment", "iou", "layers", "loss", "network", "step")


def cache_key(*shape: object) -> str:
    """A name for what is compiled: PyTorch and its backend, the device, our source, and ``shape``."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    digest = hashlib.sha256(repr((torch.__version__, torch.version.cuda, torch.version.hip, device, shape)).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:20]


@contextmanager
def first_compilation(key: str) -> Iterator[None]:
    """Compile inside: alone if nothing was compiled for ``key`` on this node, else at once and beside others.

    Whoever dies while compiling lets the next one in, since the kernel drops its lock.
    """
    folder = node_cache()
    done = folder / f"{key}.done"
    if done.exists():
        yield
        return
    with (folder / f"{key}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
            yield
            return
        shared = os.environ.get(SHARED_CACHE)
        artifacts = Path(shared) / f"{key}.bin" if shared else None
        if artifacts is not None and artifacts.exists():
            torch.compiler.load_cache_artifacts(artifacts.read_bytes())
            yield
        else:
            log.info("compiling; later processes find the code in %s", folder)
            yield
            if artifacts is not None:
                _save(artifacts)
        done.touch()


def _save(path: Path) -> None:
    """Write what was compiled in this process, for nodes that come later."""
    made = torch.compiler.save_cache_artifacts()
    if made is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    partial.write_bytes(made[0])
    partial.replace(path)
