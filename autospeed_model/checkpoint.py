"""Files that hold a training or a trained network: written whole or not at all, read without running pickled code."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from autospeed_model.errors import UserError
from autospeed_model.network import AutoSpeed

TRAINING = "autospeed-training"  # everything to go on with a training
WEIGHTS = "autospeed-weights"  # a network to use
VERSION = 1


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file: whoever opens ``path`` sees the old one or the new one, whatever happens.

    :raises OSError: names ``path``, also where torch.save covers it with an error of its archive.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink()
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError) and cause.filename is None:
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def save(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Write tensors and plain values as a file of format ``kind``."""
    write_atomically(path, lambda file: torch.save({"format": kind, "version": VERSION, **content}, file))


def load(path: Path, *kinds: str) -> dict[str, Any]:
    """Read a file of one of ``kinds`` onto the CPU.

    :raises UserError: when there is none, it is damaged, or of another kind or version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # PyTorch reads over the checksums
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is a place outside the file
            raise
        raise UserError(f"{path}: not a checkpoint of this program, or not all of one") from None
    if damaged is not None:
        raise UserError(f"{path}: damaged: the checksum of {damaged} is wrong")
    with reading(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    found = content.get("format") if isinstance(content, dict) else None
    if found not in kinds:
        raise UserError(f"{path}: its format is {found!r}; needed is {' or '.join(kinds)}")
    if content.get("version") != VERSION:
        raise UserError(f"{path}: version {content.get('version')!r}, this program reads version {VERSION}")
    return dict(content)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Taking a file's content apart: where it is not what :func:`save` was given, the file is to blame.

    :raises UserError: in place of the errors of missing keys and of wrong types and shapes.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, pickle.UnpicklingError) as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(f"{path}: not a checkpoint of this program, or a damaged one ({what})") from error


def save_weights(path: Path, network: AutoSpeed, figures: dict[str, float]) -> None:
    """Write a network with what it takes to build it, and how good it was."""
    save(path, WEIGHTS, {"network": describe(network), "weights": network.state_dict(), "figures": figures})


def load_network(path: Path) -> AutoSpeed:
    """The network in a file of weights, or the averaged one of a training's checkpoint, in evaluation mode.

    :raises UserError: as :func:`load`.
    """
    content = load(path, WEIGHTS, TRAINING)
    with reading(path):
        network = AutoSpeed(**content["network"])
        network.load_state_dict(content["weights" if content["format"] == WEIGHTS else "average"])
    return network.eval()


def describe(network: AutoSpeed) -> dict[str, Any]:
    """The arguments of :class:`AutoSpeed` that make a network of this shape."""
    return {
        "height": network.height,
        "width": network.width,
        "size": network.size,
        "classes": network.classes,
    }
