"""Finding and reading the files of OpenLane, in archives or unpacked, without unpacking anything."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from autospeed_model.errors import UserError
from autospeed_model.odd import Report

LAYOUT = """expected is a folder with OpenLane's archives or with what they hold, or both:
    images_training_0.tar ..., images_validation_0.tar ..., cipo.zip
    images/{training,validation}/segment-<id>/<timestamp>.jpg
    cipo/{training,validation}/segment-<id>/<timestamp>.jpg.json"""
_FRAME = r"(?:^|/)(?:images_)?(training|validation)(?:_\d+)?/(segment-[^/\n]+)/(?:images/)?([^/\n]+?)"
_IMAGE = re.compile(_FRAME + r"\.jpe?g$")
_LABEL = re.compile(_FRAME + r"(?:\.jpe?g)?\.json$")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")


class Key(NamedTuple):
    """One frame of OpenLane."""

    split: str  # training or validation
    segment: str
    timestamp: str

    def __str__(self) -> str:
        return "/".join(self)


class Member(NamedTuple):
    """Where the bytes of a file lie: in ``path`` itself (``how`` is "file"), or inside a .tar or .zip file."""

    path: str
    how: str
    offset: int
    size: int
    crc: int = 0


@dataclass
class Inventory:
    """What a source folder holds: each frame's image and label; ``files`` has the name, size and date of every file."""

    images: dict[Key, Member] = field(default_factory=dict)
    labels: dict[Key, Member] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(sorted(self.files)).encode(errors="surrogateescape")).hexdigest()


def take_inventory(source: Path, report: Report) -> Inventory:
    """List the frames below ``source``; archives are only looked through, not read.

    Raises UserError when ``source`` does not exist, holds no images or labels of OpenLane, or holds a file that is no
    archive although its name says so. All else that is odd goes to ``report``.
    """
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise UserError(f"{source}: {what}; {LAYOUT}")
    inventory = Inventory()
    for path in _walk(source):
        name = path.relative_to(source).as_posix()
        status = _status_of_file(path)
        if status is None:
            report.add("no_file", name)
            continue
        if name.endswith(_COMPRESSED):
            raise UserError(f"{path}: compressed archives cannot be read in pieces: decompress it")
        if name.endswith((".tar", ".zip")):
            members = list(_tar(path, report) if name.endswith(".tar") else _zip(path))
            found = sum([_add(inventory, f"{name[:-4]}/{inner}", member, report) for inner, member in members])
        else:
            found = int(_add(inventory, name, Member(str(path), "file", 0, 0), report))
        if found:
            inventory.files.append(f"{name} {status.st_size} {status.st_mtime_ns}")
        else:
            inventory.others[path.suffix or path.name] += 1
    _check(source, inventory)
    return inventory


def _status_of_file(path: Path) -> os.stat_result | None:
    """One call for each file: a dataset has hundreds of thousands. None: a pipe, say, or a link that leads nowhere."""
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return status if stat.S_ISREG(status.st_mode) else None


def _walk(source: Path) -> Iterator[Path]:
    """All files below ``source`` in a fixed order. Links to folders are followed, but no folder is entered twice."""
    entered = set()
    for folder, folders, files in os.walk(source, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _add(inventory: Inventory, name: str, member: Member, report: Report) -> bool:
    """Enter a file under its frame. Labels of other kinds have the same names: only the folder tells ``cipo`` apart."""
    if match := _IMAGE.search(name):
        known = inventory.images
    elif (match := _LABEL.search(name)) and any(part.startswith("cipo") for part in name.split("/")):
        known = inventory.labels
    else:
        return False
    key = Key(*match.groups())
    if key in known:
        report.add("duplicate", name)
    else:
        known[key] = member
    return True


def _tar(path: Path, report: Report) -> Iterator[tuple[str, Member]]:
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            while (info := archive.next()) is not None:
                if info.isreg() and not Path(info.name).name.startswith("."):
                    if info.offset_data + info.size > size:
                        break
                    yield info.name, Member(str(path), "tar", info.offset_data, info.size)
            else:
                return
    except tarfile.ReadError as error:
        if "end of data" not in str(error):
            raise UserError(f"{path}: not a tar archive ({error}); download it again") from error
    report.add("archive_truncated", str(path))


def _zip(path: Path) -> Iterator[tuple[str, Member]]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: truncated or not a zip archive ({error}); download it again") from error
    for info in infos:
        if info.is_dir() or Path(info.filename).name.startswith("."):
            continue
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{path}: {info.filename} is encrypted or compressed in an unusual way; unpack the archive")
        how = "stored" if info.compress_type == zipfile.ZIP_STORED else "deflated"
        yield info.filename, Member(str(path), how, info.header_offset, info.compress_size, info.CRC)


def _check(source: Path, inventory: Inventory) -> None:
    missing = [kind for kind, found in (("image", inventory.images), ("cipo label", inventory.labels)) if not found]
    if missing:
        found = f"{len(inventory.images)} images and {len(inventory.labels)} labels of OpenLane"
        others = ", ".join(f"{count} {kind}" for kind, count in inventory.others.most_common(6)) or "nothing"
        raise UserError(f"{source}: no {' and no '.join(missing)} of OpenLane; found {found}, else {others}; {LAYOUT}")


class DamagedError(ValueError):
    """The bytes of a file are not all there, or not those that were packed."""


def read(member: Member) -> bytes:
    """The content of a file. Raises DamagedError if an archive is damaged there."""
    if member.how == "file":
        return Path(member.path).read_bytes()
    if member.how == "tar":
        return _read_at(member.path, member.offset, member.size)
    # A file inside a zip: its own header, whose two last fields are the lengths of what stands before the data.
    header = _read_at(member.path, member.offset, 30)
    name, extra = struct.unpack("<HH", header[26:30])
    data = _read_at(member.path, member.offset + 30 + name + extra, member.size)
    try:
        content = zlib.decompress(data, -zlib.MAX_WBITS) if member.how == "deflated" else data
    except zlib.error as error:
        raise DamagedError(f"damaged in its archive: {error}") from error
    if zlib.crc32(content) != member.crc:
        raise DamagedError("damaged in its archive: wrong checksum")
    return content


@lru_cache(maxsize=64)
def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY)


def _read_at(path: str, offset: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(_open(path), size, offset)
        if not part:
            raise DamagedError("the archive ends before it")
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Width and height of a JPEG image from its header. Raises DamagedError if it is none, or ends early.

    A decoder fills the missing part of a truncated image with grey and says nothing: only the end marker tells.
    """
    if data[:2] != b"\xff\xd8":
        raise DamagedError("not a JPEG image")
    if data.rfind(b"\xff\xd9", max(0, len(data) - 4096)) < 0:
        raise DamagedError("truncated: has no end marker")
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[place + 5 : place + 9])
            return int(width), int(height)
        place += 1 if marker == 0xFF else 2 + length
    raise DamagedError("has no JPEG frame header")
