"""What a training process needs set before it uses a GPU, all in one place. Imports no torch: submit shows it.

Variables that are set already win, so that a cluster profile's ``environment`` overrides any of this.
"""

from __future__ import annotations

import os
import shutil
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
# Folders that a site may name.
NODE_CACHE = "AUTOSPEED_NODE_CACHE"  # on the node's own disk, shared by its workers and by later jobs
SHARED_CACHE = "AUTOSPEED_COMPILE_CACHE"  # on the shared filesystem: compiled code for nodes that have none
TUNED_MIOPEN = "AUTOSPEED_MIOPEN_DB"  # what `python -m autospeed_model.tune_miopen` made

# What `submit --dry-run` shows. The worker's own process decides the folders.
DECLARED = {**SWITCHES, "TORCHINDUCTOR_CACHE_DIR": f"${{{NODE_CACHE}:-$TMPDIR/autospeed-$UID}}/torch-VERSION"}


def prepare_process(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set :data:`SWITCHES`, the folder of compiled code, and this worker's own copy of the tuned MIOpen database.

    :raises UserError: when a folder that is named does not exist, or the cache's is somebody else's.
    """
    for name, value in SWITCHES.items():
        environment.setdefault(name, value)
    if "TORCHINDUCTOR_CACHE_DIR" not in environment:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(node_cache(environment))
    _copy_tuned_database(environment)


def node_cache(environment: MutableMapping[str, str] = os.environ) -> Path:
    """The folder for compiled code of this user and this PyTorch on this node, which exists afterwards.

    :raises UserError: when it belongs to another user, who could plant code there.
    """
    named = environment.get(NODE_CACHE)
    temporary = environment.get("TMPDIR") or tempfile.gettempdir()
    base = Path(named) if named else Path(temporary) / f"autospeed-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise UserError(f"{base}: belongs to another user; set {NODE_CACHE} to a folder of your own on the node's disk")
    try:
        release = version("torch")
    except PackageNotFoundError:
        release = "unknown"
    folder = base / f"torch-{release}"
    folder.mkdir(exist_ok=True)
    return folder


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
