"""The agent's folder on the node's own disk: orders to its workers, their status, the journal server's socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpcjobs.owners import process_gone, process_start

_PREFIX = "hpcjobs-node-"
_AGENT = "agent"
# workers of a killed agent still write into its folder while they hand their trials back
_UNUSED_S = 600.0


@contextlib.contextmanager
def node_folder() -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end. Those of killed agents are removed as well."""
    remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        (folder / _AGENT).write_text(f"{os.getpid()} {process_start(os.getpid())}")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove our own folders in ``parent`` whose agent has certainly ended and that nobody has used for a while."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            # another user's may hold anything, also a pipe that is never written to
            if found.st_uid != os.getuid() or time.time() - found.st_mtime <= _UNUSED_S:
                continue
            pid, start = (folder / _AGENT).read_text().split()
            gone = process_gone(int(pid), start)
        except (OSError, ValueError):
            continue
        if gone:
            shutil.rmtree(folder, ignore_errors=True)
