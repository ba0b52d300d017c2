"""How much a user may still write: what ``quota`` and, on Lustre, ``lfs quota`` say, since statvfs tells of all users.

Sites with quotas of another kind have commands of their own; those are not known here.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hpcjobs.filesystem import mount_of

ANSWER_S = 20.0
# device or mount point; kilobytes and files, each as used, quota, limit, grace. A star marks what is exceeded.
_ROW = re.compile(
    r"^\s*(?P<place>\S+)\s+(?P<kb>\d+)\*?\s+(?P<kb_quota>\d+)\s+(?P<kb_limit>\d+)\s+\S+"
    r"\s+(?P<files>\d+)\*?\s+(?P<files_quota>\d+)\s+(?P<files_limit>\d+)\s+\S+\s*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Room:
    """What is left of a quota; None where there is no limit. ``whose``: for a person to read."""

    whose: str
    free_gb: float | None
    free_files: int | None


class QuotaUnknownError(Exception):
    """A command for quotas does not answer."""


def quotas(folder: Path) -> list[Room]:
    """The quotas that hold in ``folder``; none where no command tells of any.

    Raises:
        QuotaUnknownError: their server is away, say.
    """
    mount = mount_of(folder)
    if mount.type == "lustre" and shutil.which("lfs"):
        user, group = getpass.getuser(), str(folder.stat().st_gid)
        asked = {f"of {user}": ["-u", user], f"of group {group}": ["-g", group]}
        if project := _lustre_project(folder):
            asked[f"of project {project}"] = ["-p", project]
        found = {whose: _ask(["lfs", "quota", "-q", *which, mount.point]) for whose, which in asked.items()}
        return [room for whose, said in found.items() for room in rooms(said, {mount.point}, whose)]
    if shutil.which("quota"):
        device = _device(mount.point)
        return rooms(_ask(["quota", "--no-wrap", "--raw-grace"]), {mount.point, device}, f"of {getpass.getuser()}")
    return []


def rooms(said: str, places: set[str], whose: str) -> list[Room]:
    """What the rows of ``lfs quota -q`` or ``quota -w -p`` that tell of one of these places say; 0 is no limit."""
    found = []
    for row in _ROW.finditer(said):
        kb_limit = int(row["kb_limit"]) or int(row["kb_quota"])
        files_limit = int(row["files_limit"]) or int(row["files_quota"])
        if row["place"] in places and (kb_limit or files_limit):
            free_gb = max(0.0, (kb_limit - int(row["kb"])) * 1024 / 1e9) if kb_limit else None
            found.append(Room(whose, free_gb, max(0, files_limit - int(row["files"])) if files_limit else None))
    return found


def _lustre_project(folder: Path) -> str | None:
    match = re.match(r"\s*(\d+)", _ask(["lfs", "project", "-d", str(folder)]))
    return match.group(1) if match and match.group(1) != "0" else None


def _device(point: str) -> str:
    """What is mounted there: ``quota`` names it."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, where, *_ = line.split()
        if where.encode().decode("unicode_escape") == point:
            return device
    return ""


def _ask(command: list[str]) -> str:
    """What a command says on standard output, also if it ends with an error: ``quota`` does where one is exceeded."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        raise QuotaUnknownError(str(error)) from None
    return done.stdout
