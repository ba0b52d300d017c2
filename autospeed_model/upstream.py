"""Import of a checkpoint of the public AutoSpeed project, tensor by tensor, by name.

Such a file holds a whole pickled module, and unpickling runs whatever code the file names. :func:`read_tensors`
therefore puts an inert record in the place of every class that is not known to be harmless, and collects the tensors
from those.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autospeed_model.errors import UserError
from autospeed_model.layers import C2PSA, C3K, C3K2, SPPF, Attention, Context, Residual
from autospeed_model.network import AutoSpeed

# Names of children that differ upstream, per class of block.
UPSTREAM_CHILDREN: dict[type[nn.Module], dict[str, str]] = {
    AutoSpeed: {"backbone": "net", "neck": "fpn"},
    Residual: {"first": "conv1", "second": "conv2"},
    C3K: {"enter": "conv1", "bypass": "conv2", "leave": "conv3", "blocks": "res_m"},
    C3K2: {"enter": "conv1", "leave": "conv2", "blocks": "res_m"},
    Context: {"spread": "exp0", "squeeze": "ctx0", "excite": "ctx1", "project": "ctx2"},
    SPPF: {"enter": "cv1", "leave": "cv2"},
    Attention: {"position": "conv1", "project": "conv2"},
    C2PSA: {
        "enter": "cv1",
        "leave": "cv2",
        "attention": "middle_block.conv1",
        "feed_forward": "middle_block.conv2",
    },
}


def upstream_names(network: AutoSpeed) -> dict[str, str]:
    """Our name of every parameter and persistent buffer -> its upstream name."""
    names: dict[str, str] = {}

    def walk(module: nn.Module, ours: str, theirs: str) -> None:
        children = UPSTREAM_CHILDREN.get(type(module), {})
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, _ in own:
            if name not in module._non_persistent_buffers_set:
                names[ours + name] = theirs + name
        for name, child in module.named_children():
            walk(child, f"{ours}{name}.", f"{theirs}{children.get(name, name)}.")

    walk(network, "", "")
    return names


def load_upstream_tensors(network: AutoSpeed, tensors: dict[str, Tensor]) -> None:
    """Fill ``network`` from tensors under their upstream names, converted to its own precision.

    :raises UserError: for a missing tensor, a shape that does not fit, or a tensor nobody asked for.
    """
    names = upstream_names(network)
    own = network.state_dict()
    spread = {name + ".spread.weight" for name, module in network.named_modules() if isinstance(module, Context)}
    state: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        if theirs not in tensors:
            raise UserError(f"the checkpoint has no tensor '{theirs}'; is it of size {network.size}?")
        value = tensors[theirs]
        if ours in spread and value.ndim == 3:
            value = value[:, :, 1]  # the tap that sees data; see Context
        if value.shape != own[ours].shape:
            raise UserError(
                f"tensor '{theirs}' is {tuple(value.shape)}, the network needs {tuple(own[ours].shape)}; "
                f"the network here is size {network.size} for {network.height} x {network.width}"
            )
        state[ours] = value.to(own[ours].dtype)
    # The upstream head keeps the constants 0 .. 15 as a frozen convolution.
    unknown = set(tensors) - set(names.values()) - {"head.dfl.conv.weight"}
    if unknown:
        raise UserError(f"the checkpoint has tensors that this network does not: {', '.join(sorted(unknown)[:5])}")
    network.load_state_dict(state)


def load_upstream(network: AutoSpeed, path: Path) -> None:
    """Fill ``network`` from an upstream checkpoint file.

    :raises UserError: when the file is no such checkpoint or does not fit the network.
    """
    load_upstream_tensors(network, read_tensors(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint ``{'epoch', 'model'}``, or of a plain state dict, by their names.

    :raises UserError: when the file is none, or holds no tensors in the expected place.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # PyTorch would hand a TorchScript archive to a loader of its own, which knows no restriction.
            script = any(name.endswith("/constants.pkl") for name in archive.namelist())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except zipfile.BadZipFile:
        raise UserError(f"{path}: not a file of torch.save (of PyTorch 1.6 or later)") from None
    if script:
        raise UserError(f"{path}: a TorchScript archive; needed is the checkpoint that the training wrote")
    try:
        content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_inert_pickle)
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: not readable as a checkpoint ({error})") from error
    tensors = dict(_tensors_of(content.get("model", content) if isinstance(content, dict) else content, ""))
    if not tensors:
        raise UserError(f"{path}: holds no tensors where an upstream checkpoint has them ('model')")
    return tensors


class _Inert:
    """Stands for an object of a class, or the result of a function, that is not ours: keeps a state, does nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


# What rebuilding tensors and containers takes; none of these runs anything that a file chooses.
_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
}


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _HARMLESS.get((module, name), _Inert)


# What torch.load asks of a module that stands in for pickle.
_inert_pickle: Any = SimpleNamespace(Unpickler=_InertUnpickler, __name__="inert_pickle")


def _tensors_of(node: Any, prefix: str) -> list[tuple[str, Tensor]]:
    """Walk a plain state dict, or the inert record of a module."""
    if isinstance(node, dict):
        return [(prefix + str(name), value) for name, value in node.items() if isinstance(value, Tensor)]
    found: list[tuple[str, Tensor]] = []
    fields = getattr(node, "__dict__", {})
    for kind in ("_parameters", "_buffers"):
        entries = fields.get(kind) or {}
        found += [(prefix + name, value.detach()) for name, value in entries.items() if isinstance(value, Tensor)]
    for name, child in (fields.get("_modules") or {}).items():
        found += _tensors_of(child, f"{prefix}{name}.")
    return found
