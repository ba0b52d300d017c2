"""What is done to the bytes of a damaged journal. The caller holds its lock."""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime, timezone
from pathlib import Path

from hpcjobs.journal_records import Damage, damage

log = logging.getLogger(__name__)

_BLOCK = 1 << 16


def append_whole(descriptor: int, data: bytes, *, synced: bool = False) -> None:
    """Append all of ``data`` or, where there is no room for all of it, nothing. ``synced``: it is then on the disk.

    Raises OSError as ``write`` and ``fdatasync`` do.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
        if synced:
            os.fdatasync(descriptor)
    except OSError:
        if written:
            os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR) - written)
        raise


def torn_tail(descriptor: int) -> Damage | None:
    """What stands behind the last whole line. Blanks do not matter there: the next record may follow them."""
    start = end = os.fstat(descriptor).st_size
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - _BLOCK)
        tail = os.pread(descriptor, end - start, start)
    torn = tail[tail.rfind(b"\n") + 1 :].lstrip(b" ")
    return damage(end - len(torn), torn, "torn at the end") if torn else None


def blank(journal: int, spans: list[Damage]) -> None:
    """Overwrite damage with blanks, so that no byte behind it moves. ``journal`` is open for appending."""
    # O_APPEND makes pwrite append. The same inode again, by whatever name it has, without it:
    descriptor = os.open(f"/proc/self/fd/{journal}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for span in spans:
            os.pwrite(descriptor, b" " * span.length, span.offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep(journal: Path, spans: list[Damage]) -> None:
    """Report damage, and keep its bytes in ``journal.lost.jsonl`` before they are removed from the journal."""
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    lines = [json.dumps({"time": when, **span.as_dict(), "lost": span.lost}) + "\n" for span in spans]
    descriptor = os.open(
        journal.with_suffix(".lost.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o664
    )
    try:
        append_whole(descriptor, "".join(lines).encode())
    finally:
        os.close(descriptor)
    for span in spans:
        log.warning("%s: damage at %s", journal, span.describe())


def kept(journal: Path) -> set[tuple[int, str]]:
    """Offset and text of all that ``journal.lost.jsonl`` has."""
    try:
        lines = journal.with_suffix(".lost.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return set()
    return {(span["offset"], span["text"]) for span in map(json.loads, lines)}
