"""What a node's prolog and epilog do with the partition mode. Run as root by slurm/partition-mode.sh, never by a user.

Nothing that a user writes goes further than :func:`requested_mode`, whose answer is one of the administrator's words or
None. A request that is not understood is no failure, since a failing prolog drains the node: the node gets its default
mode, and the job finds out by itself that the mode is not the one that it needs.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcjobs.amd import AmdUnavailableError, ModeError, set_mode
from hpcjobs.cores import parse_cpu_list
from hpcjobs.logical_gpu import PARTITIONS
from hpcjobs.text import counted

log = logging.getLogger("partition-mode")

LONGEST_TEXT = 1000
# what Slurm's syntax of constraints can hold
_CONSTRAINT = re.compile(r"[A-Za-z0-9_.,:=&|*()\[\]-]*")
_WORD = re.compile(r"[A-Za-z0-9_.-]+")
_DEVICES = re.compile(r"\d{1,4}([,-]\d{1,4})*")


def requested_mode(constraints: str, comment: str, allowed: Sequence[str]) -> str | None:
    """The mode that a job asks for, or None: it asks for none, for several, or for one that is not allowed.

    Args:
        constraints: ``--constraint``; a mode is one of its features, as in ``cpx`` or ``mi300x&cpx``.
        comment: ``--comment``, read if no feature is a mode; the mode must be all of it.
        allowed: the modes that the administrator offers.
    """
    if max(len(constraints), len(comment)) > LONGEST_TEXT or not _CONSTRAINT.fullmatch(constraints):
        return None
    asked = {word for word in _WORD.findall(constraints) if word in PARTITIONS}
    if not asked and comment in PARTITIONS:
        asked = {comment}
    # "cpx|spx" leaves the choice to Slurm, which does not tell which it took
    mode = next(iter(asked)) if len(asked) == 1 else None
    return mode if mode in allowed else None


def holds_all_gpus(devices: str, gpus: int) -> bool:
    """Whether SLURM_JOB_GPUS names all of the node's GPUs: only then can no other job be using one."""
    return bool(_DEVICES.fullmatch(devices)) and len(set(parse_cpu_list(devices))) >= gpus


def run_hook(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set the mode that the job asks for (prolog) or the default (prolog without a request, epilog).

    Raises:
        ModeError, AmdUnavailableError: the mode could not be set; the node is not fit for use.
    """
    allowed = options.allowed.split()
    if not set(allowed) <= set(PARTITIONS) or options.default not in ("", *allowed):
        raise ModeError(f"partition-mode.conf: allowed_modes {options.allowed!r}, default_mode {options.default!r}")
    if not holds_all_gpus(environ.get("SLURM_JOB_GPUS", ""), options.gpus):
        log.info("the job does not hold all %d GPUs: the mode stays", options.gpus)
        return
    mode = options.default
    if options.hook == "prolog":
        constraints, comment = environ.get("SLURM_JOB_CONSTRAINTS", ""), environ.get("SLURM_JOB_COMMENT", "")
        requested = requested_mode(constraints, comment, allowed)
        if requested is None and constraints + comment:
            log.info("no allowed mode in the job's constraint or comment: the default is used")
        mode = requested or options.default
    if not mode:
        return
    begin = time.monotonic()
    devices = set_mode(mode, patience_s=options.patience)
    seconds = time.monotonic() - begin
    gpus, logical = counted(len(devices.modes), "GPU"), counted(len(devices.gpus), "logical GPU")
    log.info("mode %s on %s, %s, %.1f s", mode, gpus, logical, seconds)
    if len(devices.modes) < options.gpus:
        log.warning("AMD SMI shows %d of %d GPUs", len(devices.modes), options.gpus)
    if devices.missing:
        log.warning("%s missing", counted(devices.missing, "logical GPU"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -I -m hpcjobs.mode_hook", description=__doc__.splitlines()[0])
    parser.add_argument("hook", choices=["prolog", "epilog"])
    parser.add_argument("--allowed", required=True, help="the modes that jobs may ask for, separated by spaces")
    parser.add_argument("--default", required=True, help="the site's mode; empty: leave the mode without a request")
    parser.add_argument("--gpus", type=int, required=True, help="physical GPUs of a node")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that GPUs may be busy")
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args(arguments)
    environ = os.environ
    job = re.sub(r"\D", "", environ.get("SLURM_JOB_ID", ""))
    node = re.sub(r"[^\w.-]", "", environ.get("SLURMD_NODENAME", ""))
    form = logging.Formatter(f"%(asctime)s {node} job {job} {options.hook}: %(levelname)s %(message)s")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    unwritable = None
    try:
        handlers.append(logging.FileHandler(options.log))
    except OSError as error:  # a mode that can be set is worth more than a line about it: no node is drained for this
        unwritable = error
    for handler in handlers:
        handler.setFormatter(form)
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    if unwritable is not None:
        log.warning("there is no log: %s", unwritable)
    try:
        run_hook(options, environ)
    except (ModeError, AmdUnavailableError) as error:
        log.error("%s", error)
        return 1
    except Exception:  # the node is drained, and whoever looks for the reason looks into the log
        log.exception("an error of this program or of AMD SMI")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
