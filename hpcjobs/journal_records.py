"""One line of the journal: how a record is written, how it is checked, and what is kept of a damaged line.

A record is a JSON object on a line of its own, as Optuna's file journal has it, with two keys more at its end, which
stock Optuna ignores: ``n`` counts the records of one writer, ``crc`` is the CRC-32 of all bytes of the line before it.

Which lines count is one rule for every reader, stock Optuna included: a line counts if it is a JSON object with an
``op_code``. Everything else (blank, NUL bytes, a torn record) does not count and is made blanks in place, so that no
byte behind it moves and no record gets another number.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

_BLANK = b" \t\r\x00"
_START = b'{"op_code":'
_CRC_KEY = b',"crc":"'
ALTERED = "altered since it was written"
_CRC_LENGTH = len(_CRC_KEY) + len('01234567"}')


def encode(record: dict[str, Any], n: int) -> bytes:
    """The line of ``record``, with its number and checksum and the newline."""
    body = json.dumps({**record, "n": n}, separators=(",", ":"))[:-1].encode()
    return b'%b,"crc":"%08x"}\n' % (body, zlib.crc32(body))


def checksum_fits(line: bytes) -> bool:
    """Whether the checksum of a line (without newline) is right. A record of stock Optuna has none and passes."""
    line = line.strip(_BLANK)
    if line[-_CRC_LENGTH:-10] != _CRC_KEY:
        return True
    return line[-10:-2] == b"%08x" % zlib.crc32(line[:-_CRC_LENGTH])


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None where the line does not count."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if is_record(record) else None


def is_record(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("op_code"), int)


@dataclass(frozen=True)
class Damage:
    """Bytes of the journal that are no record, or no longer the one written: where, what, and whether one was lost."""

    offset: int
    length: int
    reason: str
    text: str

    @property
    def lost(self) -> bool:
        """False for blanks, empty lines and NUL bytes, which never were a record, and for what still is one."""
        return self.reason not in ("empty", ALTERED)

    def describe(self) -> str:
        found = {"empty": "nothing was lost", ALTERED: "the record counts as it stands"}
        what = found.get(self.reason, "a record was lost")
        return f"byte {self.offset}, {self.length} bytes, {self.reason}: {what}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def damage(offset: int, data: bytes, reason: str) -> Damage:
    if not data.strip(_BLANK + b"\n"):
        reason = "empty"
    return Damage(offset, len(data), reason, data.decode("utf-8", errors="backslashreplace"))


def whole_record_at_end(line: bytes) -> int | None:
    """Where the last whole record of a damaged line starts: a record that was appended behind a torn one."""
    at = line.find(_START, 1)
    while at >= 0:
        if parse(line[at:]) is not None and checksum_fits(line[at:]):
            return at
        at = line.find(_START, at + 1)
    return None


def find_damage(data: bytes, offset: int) -> Iterator[Damage]:
    """Every span of ``data`` that is no record. ``data`` are whole lines that start at ``offset`` in the file."""
    at = 0
    for line in data.split(b"\n")[:-1]:
        end = at + len(line) + 1
        if parse(line) is None:
            start = whole_record_at_end(line)
            if start is None:
                yield damage(offset + at, data[at:end], "not a record")
            else:
                yield damage(offset + at, line[:start], "torn, and the next record ran into it")
        at = end


def find_altered(data: bytes, offset: int) -> Iterator[Damage]:
    """Every record of whole lines that start at ``offset`` whose checksum is wrong: of a flipped bit, say."""
    at = 0
    for line in data.split(b"\n")[:-1]:
        if not checksum_fits(line):
            yield damage(offset + at, line + b"\n", ALTERED)
        at += len(line) + 1


# A report of ours, whole: its trial and what follows; the strict set of characters leaves out every torn or joined one.
_LINE = re.compile(
    rb'\{"op_code":7,"worker_id":"[-\w]{1,80}","trial_id":(\d+),("step":[-\w":,.+]{1,200},"crc":"\w{8}"\})\n|(.*)\n'
)

Record = dict[str, Any]
Report = tuple[bytes, bytes, bytes]  # trial id, what follows it, nothing


def parse_lines(data: bytes) -> list[Record | Report] | None:
    """The records of whole lines; None if any line is no record.

    Reports, most of all records, are only recognised and come as text, for ``parse_reports``. All others are parsed in
    one call, which is twice as quick as one for each.
    """
    lines = _LINE.findall(data)
    others = [other for trial_id, _, other in lines if not trial_id]
    try:
        parsed = json.loads(b"[%b]" % b",".join(others))
    except ValueError:
        return None
    if len(parsed) != len(others) or not all(map(is_record, parsed)):
        return None
    following = iter(parsed)
    return [line if line[0] else next(following) for line in lines]


def parse_reports(texts: list[bytes]) -> Iterator[tuple[int, float]]:
    """Steps and values of reports."""
    for record in json.loads(b"[{%b]" % b",{".join(texts)):
        yield record["step"], record["intermediate_value"]
