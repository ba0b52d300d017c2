"""Why a trial or a worker ended, and what follows from it: one class of failure, one policy."""

from __future__ import annotations

import enum
import errno
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcjobs.journal_lock import FencedError, JournalTimeoutError

# Exit codes by which a worker tells its node what happened; sysexits.h names 75 a temporary failure.
EXIT_DONE = 0
EXIT_HANDED_BACK = 75
EXIT_DEVICE_FAULT = 76
EXIT_UNUSABLE = 77

# The longest traceback kept in the journal; the whole one is in the worker's log.
TRACEBACK_CHARACTERS = 4000


class FailureClass(str, enum.Enum):
    """The classes shown in status. The journal keeps their values."""

    GPU_MEMORY = "out of GPU memory"
    HOST_MEMORY = "out of host memory"
    DIVERGED = "diverged"
    OBJECTIVE = "objective error"
    DEVICE = "device fault"
    WORKER = "worker died"
    NODE = "node lost"
    STORAGE = "storage full"
    TIME_LIMIT = "time limit"
    PREEMPTION = "preemption"
    CANCELLED = "cancelled"


#: Faults of the machine: the trial runs again elsewhere, and the budget does not count them.
INFRASTRUCTURE = frozenset(
    {FailureClass.HOST_MEMORY, FailureClass.DEVICE, FailureClass.WORKER, FailureClass.NODE, FailureClass.STORAGE}
    | {FailureClass.TIME_LIMIT, FailureClass.PREEMPTION, FailureClass.CANCELLED}
)
#: Faults that the trial itself may have caused; without progress in between they are believed only so often.
SUSPICIOUS = frozenset({FailureClass.HOST_MEMORY, FailureClass.DEVICE, FailureClass.WORKER})

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_QUOTA_TEXT = "disk quota exceeded"
_NO_ROOM_TEXTS = ("no space left on device", _QUOTA_TEXT)
# What torch.save says of a path instead: the text of a C++ stream, without the system's error. All parts together.
_TORCH_WRITE_TEXTS = (("inline_container", "unexpected pos"), ("basic_ios::clear", "iostream error"))
_GPU_MEMORY_TEXTS = ("hip out of memory", "cuda out of memory", "hiperroroutofmemory", "cuda error: out of memory")
_DEVICE_TEXTS = (
    "hip error",
    "cuda error",
    "hiperror",
    "hsa_status_error",
    "no hip gpus are available",
    "no cuda gpus are available",
    "uncorrectable ecc",
    "miopenstatusinternalerror",
)


@dataclass(frozen=True)
class Failure:
    """One failure of a trial, as the journal keeps it."""

    kind: FailureClass
    message: str
    details: str = field(default="", repr=False)
    elsewhere: bool = False  # of a full disk: it is not the study's

    def as_dict(self) -> dict[str, str]:
        return {"class": self.kind.value, "message": self.message, "traceback": self.details}

    @property
    def is_infrastructure(self) -> bool:
        return self.kind in INFRASTRUCTURE


def is_storage_full(error: BaseException) -> bool:
    """Whether a full disk or quota is behind an exception, also one that a library raised while it handled another."""
    for cause in _causes(error):
        text = _text(cause).lower()
        if getattr(cause, "errno", None) in _NO_ROOM or any(known in text for known in _NO_ROOM_TEXTS):
            return True
        if isinstance(cause, RuntimeError) and any(all(part in text for part in parts) for parts in _TORCH_WRITE_TEXTS):
            return True
    return False


def is_quota(error: BaseException) -> bool:
    """Whether an exception tells of a quota, so that its disk has room for others."""
    return any(
        getattr(cause, "errno", None) == errno.EDQUOT or _QUOTA_TEXT in _text(cause).lower() for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it was raised from or while it was handled, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001  # an exception class of the user's own can do anything
        return f"<its text raises {type(second).__name__}>"


def writable(text: str) -> str:
    """Halves of characters, from undecodable file names say, stand in no file."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_journal_out_of_reach(error: OSError) -> bool:
    """Whether the journal cannot be had now, but will be later: others hold its lock for long, this process stood still
    and its lock was taken from it, or its disk is full."""
    return isinstance(error, (JournalTimeoutError, FencedError)) or is_storage_full(error)


def classify(error: BaseException) -> Failure:
    """Name the failure behind an exception of an objective, without importing torch to look at its classes."""
    text = _text(error).lower()
    names = {cls.__name__ for cls in type(error).__mro__}
    if "OutOfMemoryError" in names or any(known in text for known in _GPU_MEMORY_TEXTS):
        kind = FailureClass.GPU_MEMORY
    elif isinstance(error, MemoryError):
        kind = FailureClass.HOST_MEMORY
    elif "JournalTimeoutError" in names or is_storage_full(error):  # a report that could not be written
        kind = FailureClass.STORAGE
    elif isinstance(error, ArithmeticError):
        kind = FailureClass.DIVERGED
    elif isinstance(error, RuntimeError) and ("AcceleratorError" in names or any(t in text for t in _DEVICE_TEXTS)):
        kind = FailureClass.DEVICE
    else:
        kind = FailureClass.OBJECTIVE
    details = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = f"{type(error).__name__}: {_text(error)}"
    if kind == FailureClass.STORAGE and is_storage_full(error) and not any(known in text for known in _NO_ROOM_TEXTS):
        message = f"a file could not be written, probably for lack of room: {message}"
    return Failure(kind, writable(message[:500]), writable(details[-TRACEBACK_CHARACTERS:]))
