"""One line of the journal: how a record is written, how it is checked, and what is kept of a damaged line.

A record is a JSON object on a line of its own, as Optuna's file journal has it, with two keys more at its end, which
stock Optuna ignores: ``n`` counts the records of one writer, ``crc`` is the CRC-32 of all bytes of the line before it.

Which lines count is one rule for every reader, stock Optuna included: a line counts if it is a JSON object with an
``op_code``. Everything else (blank, NUL bytes, a torn record) does not count and is made blanks in place, so that no
byte behind it moves and no record gets another number.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from typing import Any

import msgspec

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
    except (ValueError, RecursionError):
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


class Record(msgspec.Struct, tag_field="op_code", gc=False):
    """A record with the keys that Optuna reads; a key that may be missing is None then. By attribute or by key."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


class CreateStudy(Record, tag=0):
    worker_id: str
    study_name: str
    directions: list[int]


class DeleteStudy(Record, tag=1):
    worker_id: str
    study_id: int


class SetStudyUserAttr(Record, tag=2):
    worker_id: str
    study_id: int
    user_attr: dict[str, Any]


class SetStudySystemAttr(Record, tag=3):
    worker_id: str
    study_id: int
    system_attr: dict[str, Any]


class CreateTrial(Record, tag=4):
    """All behind ``datetime_start`` is there only if the trial is more than started."""

    worker_id: str
    study_id: int
    datetime_start: str | None
    state: int | None = None
    distributions: dict[str, str] | None = None
    params: dict[str, Any] | None = None
    user_attrs: dict[str, Any] | None = None
    system_attrs: dict[str, Any] | None = None
    value: float | None = None
    values: list[float] | None = None
    intermediate_values: dict[str, float] | None = None
    datetime_complete: str | None = None


class SetTrialParam(Record, tag=5):
    worker_id: str
    trial_id: int
    param_name: str
    param_value_internal: float
    distribution: str


class SetTrialState(Record, tag=6):
    worker_id: str
    trial_id: int
    state: int
    values: list[float] | None
    datetime_start: str | None = None
    datetime_complete: str | None = None


class Report(Record, tag=7):
    """``before`` is not of the journal: the replay makes a chain of a trial's reports with it."""

    trial_id: int
    step: int
    intermediate_value: float
    before: Any = None


class SetTrialUserAttr(Record, tag=8):
    worker_id: str
    trial_id: int
    user_attr: dict[str, Any]


class SetTrialSystemAttr(Record, tag=9):
    worker_id: str
    trial_id: int
    system_attr: dict[str, Any]


OPERATIONS: dict[int, type[Record]] = {
    operation.__struct_config__.tag: operation  # type: ignore[misc]
    for operation in Record.__subclasses__()
}
_OPTIONAL = {
    field.name for operation in OPERATIONS.values() for field in msgspec.structs.fields(operation) if not field.required
}


class UnusualRecord:
    """A record that JSON allows and the structures above do not: with NaN, a key that is missing, another operation."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__ = fields

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONAL:
            return None
        raise KeyError(name)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


_decode = msgspec.json.Decoder(list[reduce(or_, OPERATIONS.values())]).decode  # type: ignore[misc, arg-type]


def parse_lines(data: bytes) -> list[Record | UnusualRecord] | None:
    """The records of whole lines; None if any line is no record."""
    lines = data.count(b"\n")
    # in one call only where every line begins as a record does, so that none can be a part of one
    if data.startswith(_START) and data.count(b"\n" + _START) == lines - 1:
        records = _parse_quickly(data[:-1].replace(b"\n", b","), lines)
        if records is not None:
            return records
    records = []
    for line in data.split(b"\n")[:-1]:
        found = _parse_quickly(line, 1)
        if found is None:
            fields = parse(line)
            if fields is None:
                return None
            found = [UnusualRecord(fields)]
        records += found
    return records


def _parse_quickly(data: bytes, count: int) -> list[Record | UnusualRecord] | None:
    """So many records with commas between them, or None: what this refuses may still be records, but not the contrary.

    msgspec does not look whether text that it passes over is UTF-8: of both writers it is ASCII.
    """
    if not data.isascii():
        return None
    try:
        records: list[Record | UnusualRecord] = _decode(b"[%b]" % data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return records if len(records) == count else None
