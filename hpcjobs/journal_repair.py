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


def torn_tail(descriptor: int) -> tuple[int, Damage | None]:
    """Where the last whole line ends, and what stands behind it."""
    start = end = os.fstat(descriptor).st_size
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - _BLOCK)
        tail = os.pread(descriptor, end - start, start)
    keep = tail.rfind(b"\n") + 1
    torn = damage(start + keep, tail[keep:], "torn at the end") if tail[keep:] else None
    return start + keep, torn


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
    lines = [json.dumps({"time": when, **span.as_dict(), "lost": span.lost}) for span in spans]
    with journal.with_suffix(".lost.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    for span in spans:
        log.warning("%s: repaired damage at %s", journal, span.describe())
