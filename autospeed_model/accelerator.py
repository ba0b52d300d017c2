"""What a training process needs set before it uses a GPU, all in one place. Imports no torch: submit shows it.

Variables that are set already win, so that a cluster profile's ``environment`` overrides any of this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autospeed_model.errors import UserError

# The same for every worker.
SWITCHES = {
    # MIOpen works in PyTorch's channels-last order instead of transposing around every convolution.
    "PYTORCH_MIOPEN_SUGGEST_NHWC": "1",
    "PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM": "1",
    # Compiled code is looked up before anything is compiled.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    # Every worker of a node would start a thread per core otherwise.
    "OPENCV_FOR_THREADS_NUM": "1",
}
# For NVIDIA's GPUs alone: a training at batch 32 holds half a gigabyte less that it does not use. With ROCm a process
# that allocates so may hang (PyTorch's issue 192259). A container may hide the first of the driver's files, and a node
# on which nobody has used a GPU since it was started has not yet the second.
NVIDIA_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
NVIDIA_SWITCHES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # the same for all builds, since PyTorch 2.9
# Folders that a site may name.
NODE_CACHE = "AUTOSPEED_NODE_CACHE"  # on the node's own disk, shared by its workers and by later jobs
SHARED_CACHE = "AUTOSPEED_COMPILE_CACHE"  # on the shared filesystem: compiled code for nodes that have none
TUNED_MIOPEN = "AUTOSPEED_MIOPEN_DB"  # what `python -m autospeed_model.tune_miopen` made
# Folders of PyTorch's own caches. A user's stay; what AutoSpeed compiles as a whole lies in NODE_CACHE all the same.
INDUCTOR_CACHE, TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"

# What `submit --dry-run` shows. The worker's own process decides the folders.
DECLARED = {
    **SWITCHES,
    **{name: f"{value} (where NVIDIA's driver is)" for name, value in NVIDIA_SWITCHES.items()},
    INDUCTOR_CACHE: f"${{{INDUCTOR_CACHE}:-${{{NODE_CACHE}:-$TMPDIR/autospeed-$UID}}/torch-VERSION}}",
}


def prepare_process(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set :data:`SWITCHES`, :data:`NVIDIA_SWITCHES` where they belong, the folder of compiled code, and this worker's
    own copy of the tuned MIOpen database.

    torch may have been imported before: what is set here it reads when it first uses a GPU or compiles.

    :raises UserError: when the database's folder does not exist, or others could plant code in one of compiled code,
        be it one that the user has named to PyTorch.
    """
    for name, value in SWITCHES.items():
        environment.setdefault(name, value)
    if ALLOCATOR not in environment and any(map(os.path.exists, NVIDIA_DRIVER)):
        for name, value in NVIDIA_SWITCHES.items():
            environment.setdefault(name, value)
    if not environment.get(INDUCTOR_CACHE):  # PyTorch takes an empty one for the working folder
        environment[INDUCTOR_CACHE] = str(node_cache(environment))
    _check_named_caches(environment)
    shared = environment.get(SHARED_CACHE)
    if shared and os.access(shared, os.X_OK):  # now, and not first on a node that has to load from there
        _check_writers(Path(shared), f"set {SHARED_CACHE} to a folder of your own")
    _copy_tuned_database(environment)


def node_cache(environment: MutableMapping[str, str] = os.environ) -> Path:
    """The folder for compiled code of this user and this PyTorch on this node, which exists afterwards.

    :raises UserError: when others could plant code there.
    """
    named = environment.get(NODE_CACHE)
    temporary = environment.get("TMPDIR") or tempfile.gettempdir()
    base = Path(named) if named else Path(temporary) / f"autospeed-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_writers(base, f"set {NODE_CACHE} to a folder of your own on the node's disk")
    try:
        release = version("torch")
    except PackageNotFoundError:
        release = "unknown"
    folder = base / f"torch-{release}"
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_writers(folder, "delete it")  # others may have made it before the base was closed to them
    return folder


def shared_cache(environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """The folder for compiled code on the shared filesystem, which exists afterwards; None if none is named.

    :raises UserError: when others could plant code there.
    """
    named = environment.get(SHARED_CACHE)
    if not named:
        return None
    folder = Path(named)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_writers(folder, f"set {SHARED_CACHE} to a folder of your own")
    return folder


def _check_writers(folder: Path, remedy: str) -> None:
    """Refuse a folder in which others could place files: what lies there is run as code.

    On the way to it, where everybody can write, only the sticky bit keeps them from exchanging it.
    """
    link, found = folder.lstat(), folder.stat()
    if {link.st_uid, found.st_uid} != {os.getuid()}:
        raise UserError(f"{folder}: belongs to another user, but compiled code is loaded from it; {remedy}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{folder}: others can write to it (mode {mode:o}), but compiled code is loaded from it; allowed: a folder "
            f"that only you can change; chmod go-w {folder}, or {remedy}"
        )
    for place in folder.resolve().parents:
        mode = stat.S_IMODE(place.stat().st_mode)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(f"{place}: everybody can exchange what is in it (mode {mode:o}), {folder} too; {remedy}")


def _check_named_caches(environment: MutableMapping[str, str]) -> None:
    inductor, triton = (Path(environment.get(name, "")).absolute() for name in (INDUCTOR_CACHE, TRITON_CACHE))
    caches = {INDUCTOR_CACHE: inductor}
    if environment.get(TRITON_CACHE) and not triton.is_relative_to(inductor):  # there PyTorch sets it itself
        caches[TRITON_CACHE] = triton
    for name, folder in caches.items():
        with contextlib.suppress(OSError):  # PyTorch says so if it needs it; a training on a CPU does not
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.X_OK):
            _check_writers(folder, f"set {name} to a folder of your own, or unset it")


def _copy_tuned_database(environment: MutableMapping[str, str]) -> None:
    """Begin the worker's own database with the tuned one: processes that share a database damage it."""
    tuned, own = environment.get(TUNED_MIOPEN), environment.get("MIOPEN_USER_DB_PATH")
    if not tuned:
        return
    if not Path(tuned).is_dir():
        raise UserError(f"{TUNED_MIOPEN} is {tuned!r}, which is no folder; make it with autospeed_model.tune_miopen")
    if not own:
        own = environment["MIOPEN_USER_DB_PATH"] = tempfile.mkdtemp(prefix="miopen-")
    target = Path(own)
    target.mkdir(parents=True, exist_ok=True)
    for file in Path(tuned).iterdir():
        if file.is_file() and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
