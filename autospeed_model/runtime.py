"""How a network is run, which changes its speed and not what it computes: device, precision, layout, compilation."""

from __future__ import annotations

import argparse
import dataclasses
import re
from dataclasses import dataclass
from typing import TypeVar

import torch

from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import PRECISIONS, RuntimeOptions
from autospeed_model.text import counted

Network = TypeVar("Network", bound=torch.nn.Module)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """How and where, decided. ``device`` is a PyTorch device; AMD GPUs are ``cuda`` devices there, too."""

    device: str = "cpu"
    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False
    graphs: bool = False
    images: str = "auto"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UserError(f"precision is {self.precision!r}; allowed are {', '.join(PRECISIONS)}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UserError(f"device is {self.device!r}; allowed are cpu, cuda and cuda:N (AMD GPUs are cuda, too)")
        if self.on_gpu and not torch.cuda.is_available():
            found = f"this PyTorch ({torch.__version__}) sees no GPU"
            raise UserError(f"device is {self.device!r}, but {found}; allowed is cpu")
        if self.on_gpu and int(self.device.partition(":")[2] or 0) >= torch.cuda.device_count():
            found = f"this process sees {counted(torch.cuda.device_count(), 'GPU')}"
            raise UserError(f"device is {self.device!r}, but {found}, counted from cuda:0")
        if not self.on_gpu and (self.graphs or self.images == "device"):
            raise UserError(f"device is {self.device!r}; graphs and images on the device need a GPU")

    @classmethod
    def of(cls, options: RuntimeOptions, device: str) -> Runtime:
        """Decide what ``options`` leave open.

        :raises UserError: for a device that is not there, or options that it cannot do.
        """
        on_gpu = device.startswith("cuda")

        def decide(switch: str) -> bool:
            return on_gpu if switch == "auto" else switch == "always"

        return cls(
            device=device,
            precision=("bf16" if on_gpu else "fp32") if options.precision == "auto" else options.precision,
            channels_last=decide(options.channels_last),
            compile=decide(options.compile),
            graphs=decide(options.graphs),
            images=options.images,
        )

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of images and activations; weights are float32 always, and so is the loss."""
        return DTYPES[self.precision]

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def place(self, network: Network) -> Network:
        """Move a network to the device and bring its weights into the chosen order. From then on a GPU with a number is
        this process's current one, to which events, graphs and libraries belong that are made without naming a device.
        ``cuda`` is the current one anyway, and no name that PyTorch takes for choosing it."""
        if self.on_gpu and ":" in self.device:
            torch.cuda.set_device(self.device)
        moved: Network = network.to(self.device, memory_format=self.memory_format)  # type: ignore[call-overload]
        return moved

    def wait(self) -> None:
        """Let this thread sleep until the device has done what it was given. A plain synchronisation would spin."""
        if self.on_gpu:
            done = torch.cuda.Event(blocking=True)
            done.record()
            done.synchronize()


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that override a configuration's :class:`RuntimeOptions`, where they are given."""
    group = parser.add_argument_group("how to run")
    group.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is a GPU)")
    for entry in dataclasses.fields(RuntimeOptions):
        name = f"--{entry.name.replace('_', '-')}"
        group.add_argument(name, choices=entry.metadata["choices"], help=f"{entry.metadata['help']} (default: auto)")


def runtime_from(given: argparse.Namespace, options: RuntimeOptions) -> Runtime:
    """``options`` overridden by the arguments of :func:`add_runtime_arguments`.

    :raises UserError: for a device that is not there.
    """
    values = {entry.name: getattr(given, entry.name) for entry in dataclasses.fields(RuntimeOptions)}
    chosen = {name: value for name, value in values.items() if value is not None}
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Runtime.of(dataclasses.replace(options, **chosen), device)
