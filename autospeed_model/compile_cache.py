"""Compile once: the first process of a node compiles while the others wait for it; all later ones read what it made.

Where PyTorch can compile a function ahead of time, a file holds the whole of it, and a process that loads the file does
not trace the function again (tracing takes most of the time that PyTorch's own caches leave). The check whether such
code suits its arguments is left to the file's name, so that a key must name all that the traced function depends on.
Elsewhere every process traces, and PyTorch's caches hold the code.

A folder on the shared filesystem, if one is named, gives fresh nodes what others have compiled.

What nobody uses any more is deleted in both.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autospeed_model.accelerator import node_cache, shared_cache

log = logging.getLogger("autospeed_model")

# The modules whose code is compiled.
SOURCES = ("assignment", "augment", "iou", "layers", "loss", "network", "step")
# Of the memory that a step's activations would take: below 1, PyTorch computes cheap ones again in the backward pass.
# With so much it drops what is elementwise and computes no convolution twice; no cost in time was seen.
ACTIVATION_MEMORY_BUDGET = 0.7
# After so long compilation ahead of time is tried again: a full disk may have been what it failed for.
REFUSAL_SECONDS = 24 * 3600
# What goes from the node, or from the shared folder, when a new file comes there: what no process has loaded from there
# for so long, and the longest unused beyond so much. By disuse alone, since two releases of PyTorch or of our source
# may take turns. By their names, since a user may keep other things in such a folder.
UNUSED_SECONDS = 30 * 24 * 3600
MOST_BYTES = 10 * 1000**3
_KEY = "[0-9a-f]" * 20
NODE_FILES = (f"torch-*/{_KEY}.code",)
SHARED_FILES = (f"{_KEY}.code", f"{_KEY}.bin")

# What this process has compiled or loaded, by key.
_made: dict[str, Callable[..., Any]] = {}


def cache_key(*shape: object) -> str:
    """A name for what is compiled: Python, PyTorch and its backend, the devices, our source, and ``shape``."""
    release = sys.version_info[:3], torch.__version__, torch.version.cuda, torch.version.hip
    devices = [torch.backends.cpu.get_cpu_capability()]
    if torch.cuda.is_available():
        # AMD GPUs of two architectures may have the same name.
        architecture = getattr(torch.cuda.get_device_properties(), "gcnArchName", "")
        devices += torch.cuda.get_device_name(), architecture
    digest = hashlib.sha256(repr((release, devices, ACTIVATION_MEMORY_BUDGET, shape)).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:20]


@contextmanager
def compiled(function: Callable[..., Any], arguments: tuple[Any, ...], key: str) -> Iterator[Callable[..., Any]]:
    """``function`` compiled for arguments like these, or the same code from an earlier process or call.

    Call it, and run its backward pass, for the first time inside of the context: without compilation ahead of time that
    is when PyTorch compiles.
    """
    code = _made.get(key) or _ahead_of_time(function, arguments, key)
    if code is not None:
        _made[key] = code
        yield code
        return
    with first_compilation(key):
        yield _traced(function)
    _made[key] = _traced(function)


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all shapes of a process."""
    import torch._dynamo.config  # late: takes seconds
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = ACTIVATION_MEMORY_BUDGET
    # A study may try more sizes and batches than the default of 8 variants, after which PyTorch would compile no more.
    torch._dynamo.config.recompile_limit = 64
    return _made.setdefault(function.__qualname__, torch.compile(function, dynamic=False, fullgraph=True))


def _ahead_of_time(function: Callable[..., Any], arguments: tuple[Any, ...], key: str) -> Callable[..., Any] | None:
    """The code of the node's file, which the first process makes. None where this PyTorch cannot."""
    file, refused = (node_cache() / f"{key}.{kind}" for kind in ("code", "refused"))
    if _is_recent(refused) or not _can_compile_ahead_of_time():
        return None
    with contextlib.ExitStack() as stack:
        code = _load(file)
        if code is None:
            stack.enter_context(_alone(key))
            code = _load(file)
        if code is not None:
            _mark_used(file)
            return code
        if _is_recent(refused):
            return None
        shared = _shared(f"{key}.code")
        if shared is not None:
            _mark_used(shared)  # before it is read: other nodes make room there at any time
            code = _load(shared)
        if shared is not None and code is not None:
            _copy(shared, file)
            _remove_unused(file.parent.parent, NODE_FILES)
            return code
        log.info("compiling; later processes find the code in %s", file.parent)
        try:
            code = _compile(function, arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # an experimental part of PyTorch: the well-trodden way remains
            log.warning("cannot compile ahead of time, so every process traces for itself: %s", error)
            _write(refused, b"")
            return None
        try:
            with _new(file) as partial:
                code.save_compiled_function(str(partial))
        except OSError as error:
            _unusable(file, error)
        except Exception as error:  # noqa: BLE001  # as above
            log.warning("what was compiled cannot be kept, so every other process traces for itself: %s", error)
            _write(refused, b"")
        else:
            _remove_unused(file.parent.parent, NODE_FILES)
            if shared is not None:
                _copy(file, shared)
                _remove_unused(shared.parent, SHARED_FILES)
        return code  # type: ignore[no-any-return]


def _mark_used(file: Path) -> None:
    with contextlib.suppress(OSError):  # removed meanwhile, or a disk that takes no more changes
        os.utime(file)


def _remove_unused(base: Path, patterns: tuple[str, ...]) -> None:
    """Make room below ``base``, also of other releases. A process of this node that is loading a file keeps it until it
    is done; one of another node may find it gone, and compiles."""
    found = []
    try:
        for file in itertools.chain.from_iterable(base.glob(pattern) for pattern in patterns):
            with contextlib.suppress(FileNotFoundError):  # another process makes room, too
                found.append((file.stat(), file))
        room = MOST_BYTES
        for state, file in sorted(found, key=lambda pair: pair[0].st_mtime, reverse=True):
            room -= state.st_size
            if room < 0 or time.time() - state.st_mtime > UNUSED_SECONDS:
                file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: old compiled code cannot be removed: %s", base, error)


def _is_recent(mark: Path) -> bool:
    try:
        return time.time() - mark.stat().st_mtime < REFUSAL_SECONDS
    except FileNotFoundError:
        return False


def _can_compile_ahead_of_time() -> bool:
    """From PyTorch 2.10 on."""
    import torch._dynamo.config

    return hasattr(torch._dynamo.config, "enable_aot_compile")


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch._dynamo.config
    import torch._functorch.config

    def no_guards(entries: Any) -> list[bool]:
        return [False for _ in entries]

    with (
        torch._dynamo.config.patch(enable_aot_compile=True),
        torch._functorch.config.patch(activation_memory_budget=ACTIVATION_MEMORY_BUDGET),
    ):
        wrapper: Any = torch.compile(function, dynamic=False, fullgraph=True, options={"guard_filter_fn": no_guards})
        return wrapper.aot_compile((arguments, {}))


def _load(file: Path) -> Callable[..., Any] | None:
    """The code in a file; None if there is none, or none that this process can use."""
    try:
        with file.open("rb") as stream:
            code: Callable[..., Any] = torch.compiler.load_compiled_function(stream)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  # whatever reading damaged or foreign code raises
        log.warning("%s: cannot be loaded, so it is compiled anew: %s", file, error)
        return None
    return code


@contextmanager
def first_compilation(key: str) -> Iterator[None]:
    """Compile inside, with PyTorch's own caches: alone if nothing was compiled for ``key`` on this node, else at once
    and beside others."""
    done = node_cache() / f"{key}.done"
    if done.exists():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(key))
        if done.exists():
            stack.close()
            yield
            return
        artifacts, found = _shared(f"{key}.bin"), None
        if artifacts is not None:
            _mark_used(artifacts)
            found = _read(artifacts)
        if found is not None and torch.compiler.load_cache_artifacts(found) is not None:
            yield
        else:
            log.info("compiling; later processes find the code in %s", done.parent)
            yield
            made = torch.compiler.save_cache_artifacts()
            if artifacts is not None and made is not None:
                _write(artifacts, made[0])
                _remove_unused(artifacts.parent, SHARED_FILES)
        _write(done, b"")


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """One process of the node at a time. Whoever dies lets the next one in, since the kernel drops its lock."""
    with (node_cache() / f"{key}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s: no lock there, so processes may compile the same at once: %s", lock.name, error)
        yield


def _shared(name: str) -> Path | None:
    """A file of the shared folder. None if no folder is named, or it cannot be reached."""
    try:
        folder = shared_cache()
    except OSError as error:
        _unusable(error.filename, error)
        return None
    return None if folder is None else folder / name


def _copy(source: Path, target: Path) -> None:
    content = _read(source)
    if content is not None:
        _write(target, content)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _unusable(path, error)
        return None


def _write(path: Path, content: bytes) -> None:
    try:
        with _new(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        _unusable(path, error)


def _unusable(path: object, error: OSError) -> None:
    """Training goes on without what only saves time."""
    log.warning("%s: of no use for compiled code, which other processes may have to make again: %s", path, error)


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A file that takes the place of ``path`` once it is whole.

    It is made in a folder of its own. Such folders that killed processes of this node have left are removed.
    """
    prefix = f".{path.name}.{os.uname().nodename}."
    for left in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent, ignore_cleanup_errors=True) as folder:
        partial = Path(folder) / path.name
        yield partial
        partial.replace(path)
