"""Loads the compiled operations, or registers the PyTorch reference in their place.

Whichever serves, the operations are ``torch.ops.hip_kernels.*`` with the same schemas, so that nothing that calls them
changes. That the reference serves is said once per process and backend, at the first call.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from hip_kernels import reference

NAMESPACE = "hip_kernels"
PACKAGE = Path(__file__).resolve().parent
# Another folder of compiled libraries (one per backend, say); an empty one means the reference.
LIBRARY = Path(os.environ.get("HIP_KERNELS_LIBRARY", PACKAGE)) / "_hip_kernels.so"


class ReferenceWarning(UserWarning):
    """The PyTorch reference serves where a compiled operation could."""


def schemas() -> dict[str, str]:
    """Name to schema of every operation, from the file that the C++ library includes too."""
    text = (PACKAGE / "csrc" / "schemas.inc").read_text()
    found = re.findall(r'^HIP_KERNELS_SCHEMA\("((\w+)\(.*)"\)$', text, flags=re.MULTILINE)
    return {name: schema for schema, name in found}


def _serve_reference(library: torch.library.Library, name: str, key: str, said: set[str]) -> None:
    function: Callable[..., Any] = getattr(reference, name)

    @wraps(function)
    def serve(*arguments: Any, **named: Any) -> Any:
        if key not in said:
            said.add(key)
            warnings.warn(
                f"hip_kernels is not built for {key}: its PyTorch reference serves, many times slower. "
                "Build it with `python -m hip_kernels.build`.",
                ReferenceWarning,
                stacklevel=2,
            )
        return function(*arguments, **named)

    library.impl(name, serve, key)


def load() -> tuple[torch.library.Library, frozenset[str]]:
    """The library object that keeps the registrations alive, and the dispatch keys with compiled kernels.

    A compiled library that is there but does not load is an error (OSError), not a reason to use the reference.
    """
    compiled = LIBRARY.exists()
    if compiled:
        torch.ops.load_library(LIBRARY)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    said: set[str] = set()
    built = set()
    for name, schema in schemas().items():
        if not compiled:
            library.define(schema)
        for key in ("CPU", "CUDA"):
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key):
                built.add(key)
            else:
                _serve_reference(library, name, key, said)
    return library, frozenset(built)
