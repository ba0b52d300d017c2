"""Prepare OpenLane for training: ``python -m autospeed_model.prepare SOURCE OUT``.

Every image is decoded, cut and scaled once; training reads them from memory-mapped arrays and never decodes again.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from autospeed_model.errors import UserError, run_entry
from autospeed_model.packed import SPLITS, VARIANTS, PackedDataset, read_manifest
from autospeed_model.pool import spread
from autospeed_model.preparation import Preparation, Request


def is_done(out: Path, request: Request, overwrite: bool) -> bool:
    """Whether ``out`` is the dataset asked for. Raises UserError if it is something else that must not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / "manifest.json").is_file():
        raise UserError(f"{out}: exists and is not a prepared dataset; name another folder")
    if overwrite:
        return False
    found = read_manifest(out)
    if found.get("request") != request.digest:
        made = {
            "variant": found["variant"],
            "height": found["height"],
            "width": found["width"],
            "seed": found.get("seed"),
        }
        asked = {"variant": request.variant, "height": request.height, "width": request.width, "seed": request.seed}
        differs = [f"{key} {made[key]} instead of {asked[key]}" for key in made if made[key] != asked[key]]
        raise UserError(
            f"{out}: was made from other input or with other options ({', '.join(differs) or 'other input files'}); "
            f"use --overwrite, or name another folder"
        )
    for name in SPLITS:
        PackedDataset(out).split(name)
    return True


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.prepare",
        description="Bring OpenLane (archives or unpacked folders) into arrays that training maps\ninto memory.",
        epilog="examples:\n  python -m autospeed_model.prepare /data/openlane /scratch/packed\n"
        "  python -m autospeed_model.prepare demo/openlane /scratch/packed --variant autospeed --strict",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="folder with OpenLane's .tar and .zip files, or with what they hold"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument(
        "--variant", choices=sorted(VARIANTS), default="autospeed-2", help="network (default autospeed-2, 512 x 1024)"
    )
    parser.add_argument("--height", type=int, help="other height in pixels, for small tests")
    parser.add_argument("--width", type=int, help="other width in pixels, for small tests")
    parser.add_argument("--seed", type=int, default=0, help="of the split into train and tune_val (default 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    parser.add_argument("--strict", action="store_true", help="end with an error if anything in the input is odd")
    parser.add_argument(
        "--dry-run", action="store_true", help="read the labels, show the plan and the report, write nothing"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset made from other input or options")
    options = parser.parse_args(arguments)
    for name, least in (("height", 64), ("width", 64), ("seed", 0), ("jobs", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    for name in ("height", "width"):
        if getattr(options, name) is not None and getattr(options, name) % 32:
            raise UserError(
                f"--{name} {getattr(options, name)}: must be a multiple of 32, the coarsest stride of the network"
            )
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)  # paths may hold [brackets]
    preparation = Preparation(options, console)
    out = preparation.out
    if options.dry_run:
        with spread(preparation.jobs) as each:
            frames = preparation.select(each)
        preparation.tell_plan(frames)
        preparation.tell_report()
        preparation.check_space(frames)
        return 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):  # a lock that cannot be made would be waited for, without end
            pass
    except OSError as error:
        raise UserError(f"{out}: nothing can be made there ({error.strerror}); choose another OUT") from error
    lock = FileLock(out.with_name(f".{out.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"another process prepares {out}: waiting for it")
        lock.acquire()
    try:
        return _prepare(preparation, console, options.overwrite)
    finally:
        lock.release()


def _prepare(preparation: Preparation, console: Console, overwrite: bool) -> int:
    out = preparation.out
    if is_done(out, preparation.request, overwrite):
        console.print(f"{out}: already prepared from this input with these options")
        return 0
    try:
        with spread(preparation.jobs) as each:
            frames = preparation.select(each)
            preparation.tell_plan(frames)
            preparation.check_space(frames)
            preparation.pack(frames, each)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{out}: {error.strerror}; free some space and run again, it goes on from there") from error
        raise
    preparation.tell_report()
    console.print(f"{out}: prepared")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
