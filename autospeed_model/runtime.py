"""How a network is run, which changes its speed and not what it computes: device, precision, layout, compilation."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch

from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import PRECISIONS, RuntimeOptions

Network = TypeVar("Network", bound=torch.nn.Module)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Runtime(RuntimeOptions):
    """How and where. ``device`` is a PyTorch device; AMD GPUs are ``cuda`` devices there, too."""

    device: str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise UserError(f"device is {self.device!r}; allowed are cpu, cuda and cuda:N (AMD GPUs are cuda, too)")
        if kind == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device is {self.device!r}, but this PyTorch ({torch.__version__}) sees no GPU")

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def place(self, network: Network) -> Network:
        """Move a network to the device and bring its weights into the chosen order."""
        moved: Network = network.to(self.device, memory_format=self.memory_format)  # type: ignore[call-overload]
        return moved

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which the network runs in the chosen precision."""
        kind = self.device.partition(":")[0]
        return torch.autocast(kind, dtype=DTYPES[self.precision], enabled=self.precision != "fp32")


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that override a configuration's :class:`RuntimeOptions`, where they are given."""
    group = parser.add_argument_group("how to run")
    group.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is a GPU)")
    group.add_argument("--precision", choices=PRECISIONS, help="fp32 (default), bf16 or fp16")
    switch = argparse.BooleanOptionalAction
    group.add_argument("--channels-last", action=switch, default=None, help="keep activations in NHWC order")
    group.add_argument("--compile", action=switch, default=None, help="compile the network, and the loss with it")


def runtime_from(given: argparse.Namespace, options: RuntimeOptions) -> Runtime:
    """``options`` overridden by the arguments of :func:`add_runtime_arguments`.

    :raises UserError: for a device that is not there.
    """
    values = dataclasses.asdict(options)
    values.update({name: value for name in values if (value := getattr(given, name)) is not None})
    return Runtime(device=given.device or ("cuda" if torch.cuda.is_available() else "cpu"), **values)
