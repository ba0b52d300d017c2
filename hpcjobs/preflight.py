"""What must be right on this machine before a study is made: its folder, its data, Slurm's commands."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from hpcjobs.errors import UserError
from hpcjobs.paths import StudyPaths

_IMPORTED_BY_JOBS = ("cloudpickle", "msgspec", "numpy", "optuna", "pydantic", "submitit", "yaml")


def check_new_folder(paths: StudyPaths, *, group_writable: bool) -> None:
    """A study folder must be new or empty, writable for us, and for nobody else: jobs load pickles from it.

    Raises:
        UserError: it is a study already, holds other files, or others could change what is in it.
    """
    folder = paths.folder
    if paths.config.exists():
        raise UserError(
            f"{folder}: found a study there; allowed: a new or empty folder; "
            f"to go on with that study: python -m hpcjobs.submit --resume {shlex.quote(str(folder))}"
        )
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: found a file; allowed: a new or empty folder; choose another --folder")
        if folder.exists() and (held := sorted(entry.name for entry in folder.iterdir())):
            raise UserError(
                f"{folder}: found {len(held)} entries that are no study ({', '.join(held[:3])}...); "
                "allowed: a new or empty folder; choose another --folder"
            )
    except PermissionError:
        raise UserError(f"{folder}: cannot be read; allowed: a folder of your own; choose another --folder") from None
    check_writers(folder, group_writable=group_writable)
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir():
        raise UserError(f"{folder}: {nearest} is a file; allowed: folders all the way; choose another --folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"{folder}: you cannot write in {nearest}; allowed: a folder of your own; choose another --folder"
        )


def check_writers(folder: Path, *, group_writable: bool) -> None:
    """Refuse a folder whose files others could replace.

    Looked at is every folder and link on the way to it. One that everybody can write to is safe only with the sticky
    bit, as /tmp has it, and there only for links of our own: their owners can turn them to another place.

    Raises:
        UserError: everybody can write to it or exchange it, or the group can and the profile does not consent.
    """
    for place, is_link in _way_to(folder):
        found = place.lstat()
        if is_link:
            if found.st_uid not in (os.getuid(), 0) and place.parent.stat().st_mode & stat.S_IWOTH:
                raise UserError(
                    f"{place}: this link belongs to another user, who can turn it to another place; allowed: links of "
                    "your own; choose another --folder"
                )
            continue
        mode = found.st_mode
        is_last = folder.exists() and os.path.samestat(found, folder.stat())
        if mode & stat.S_IWOTH and (is_last or not mode & stat.S_ISVTX):
            raise UserError(
                f"{place}: everybody can write to it (mode {stat.S_IMODE(mode):o}); allowed: a folder that only you "
                f"can change, since jobs load pickles from it; chmod o-w {place}, or choose another --folder"
            )
        if is_last and mode & stat.S_IWGRP and not group_writable:
            raise UserError(
                f"{place}: its group can write to it (mode {stat.S_IMODE(mode):o}); allowed: only with "
                f"'group_writable_folders: true' in the cluster's profile, since jobs load pickles "
                f"from it; chmod g-w {place}"
            )
        if is_last and found.st_uid not in (os.getuid(), 0):
            raise UserError(
                f"{place}: it belongs to another user; allowed: a folder of your own; choose another --folder"
            )


def _way_to(path: Path) -> Iterator[tuple[Path, bool]]:
    """What the kernel goes through to ``path``, as far as it exists: each folder, and (with True) each link."""
    here = Path("/")
    parts = list(path.absolute().parts[1:])
    links = 0
    yield here, False
    while parts:
        there = here / parts.pop(0)
        if there.is_symlink():
            links += 1
            if links > 40:  # as many as the kernel follows
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            yield there, True
            target = there.readlink()
            here = Path("/") if target.is_absolute() else here
            parts = [part for part in target.parts if part != "/"] + parts
        elif there.name == "..":
            here = here.parent
        elif there.exists():
            here = there
            yield here, False
        else:
            return


def check_data(data: Path | None, *, needed: bool) -> None:
    """The data folder exists and, where the objective needs prepared data, its manifest counts images.

    Raises:
        UserError: it is missing, or was not prepared.
    """
    if data is None:
        if needed:
            raise UserError(
                "--data: found nothing, but the objective needs prepared data; allowed: a folder made by "
                "python -m autospeed_model.prepare SOURCE OUT; give it as --data OUT"
            )
        return
    if not data.is_dir():
        found = "a file" if data.exists() else "no such folder"
        raise UserError(f"--data {data}: found {found}; allowed: a folder with prepared data; check the path")
    if not needed:
        return
    manifest = data / "manifest.json"
    how = "prepare it with python -m autospeed_model.prepare SOURCE OUT"
    try:
        splits = json.loads(manifest.read_text(encoding="utf-8"))["splits"]
        counts = {name: int(split["images"]) for name, split in splits.items()}
    except FileNotFoundError:
        raise UserError(f"--data {data}: found no manifest.json; allowed: a folder with prepared data; {how}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{manifest}: found no counts of images in it ({type(error).__name__}: {error}); allowed: a manifest as "
            f"prepare writes it; {how}"
        ) from None
    if not counts.get("train"):
        raise UserError(f"{manifest}: found no image in the split 'train' ({counts}); allowed: at least one; {how}")


def check_shadows(folder: Path) -> None:
    """No file in the working folder, which Python looks through first, hides a package that jobs import.

    Raises:
        UserError: one does.
    """
    others = [place for place in sys.path if Path(place).resolve() != folder.resolve()]
    for name in _IMPORTED_BY_JOBS:
        for hiding in (folder / f"{name}.py", folder / name / "__init__.py"):
            if hiding.exists() and PathFinder.find_spec(name, others) is not None:
                raise UserError(
                    f"{hiding}: found a file that hides the package {name} from Python; allowed: any other name; "
                    "rename it"
                )


def check_slurm(cluster_name: str) -> None:
    """Slurm's commands are there.

    Raises:
        UserError: one is missing.
    """
    missing = [command for command in ("sbatch", "srun", "sacct") if shutil.which(command) is None]
    if missing:
        raise UserError(
            f"--cluster {cluster_name}: found no {', '.join(missing)} on this machine; allowed: a login node with "
            "Slurm's commands in PATH; log in there, or leave out --cluster to run on this machine"
        )
