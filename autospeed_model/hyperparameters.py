"""Every hyper-parameter of a training with its default and its allowed range. Imports no torch: submit reads it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

from autospeed_model.errors import UserError

SIZES = ("n", "s", "m", "l", "x")
PRECISIONS = ("fp32", "bf16", "fp16")
SWITCH = ("auto", "always", "never")


def _number(default: float, low: float, high: float, help_text: str) -> Any:
    """A field with its allowed range, both ends included. The default's type is the field's type."""
    return field(default=default, metadata={"min": low, "max": high, "help": help_text})


def _choice(default: str, choices: tuple[str, ...], help_text: str) -> Any:
    """A field that takes one of a few words."""
    return field(default=default, metadata={"choices": choices, "help": help_text})


@dataclass(frozen=True)
class Hyperparameters:
    """What a study may search. Names and defaults are those of the public AutoSpeed configuration."""

    min_lr: float = _number(1e-4, 0.0, 1.0, "learning rate of the first and of the last step")
    max_lr: float = _number(1e-2, 1e-9, 1.0, "learning rate at the end of the warm-up")
    momentum: float = _number(0.937, 0.0, 0.9999, "Nesterov momentum of SGD")
    weight_decay: float = _number(
        5e-4, 0.0, 1.0, "weight decay at 64 images an update; scaled for others; none on biases and norms"
    )
    warmup_epochs: int = _number(3, 0, 1000, "epochs of linear warm-up from min_lr to max_lr, at least 100 steps")
    batch_size: int = _number(32, 1, 4096, "images a step")
    update_images: int = _number(64, 1, 65536, "images an update: steps accumulate up to about so many")
    clip_norm: float = _number(0.0, 0.0, 1e9, "largest norm of an update's gradients; 0: any")
    box: float = _number(7.5, 0.0, 1000.0, "gain of the CIoU loss")
    cls: float = _number(0.5, 0.0, 1000.0, "gain of the classification loss")
    dfl: float = _number(1.5, 0.0, 1000.0, "gain of the distribution focal loss")
    hsv_h: float = _number(0.015, 0.0, 0.5, "hue jitter, fraction of the circle")
    hsv_s: float = _number(0.7, 0.0, 1.0, "saturation jitter, fraction")
    hsv_v: float = _number(0.4, 0.0, 1.0, "value jitter, fraction")
    degrees: float = _number(0.0, 0.0, 180.0, "rotation, at most so many degrees to either side")
    translate: float = _number(0.1, 0.0, 0.9, "shift, fraction of the image")
    scale: float = _number(0.5, 0.0, 0.95, "scaling, factor 1 - scale to 1 + scale")
    shear: float = _number(0.0, 0.0, 45.0, "shear, at most so many degrees to either side")
    flip_ud: float = _number(0.0, 0.0, 1.0, "probability of an up-down flip")
    flip_lr: float = _number(0.5, 0.0, 1.0, "probability of a left-right flip")
    mosaic: float = _number(1.0, 0.0, 1.0, "probability that a sample is a mosaic of four images")
    mix_up: float = _number(0.0, 0.0, 1.0, "probability that a mosaic is mixed with a second one")

    def __post_init__(self) -> None:
        _check_fields(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "hyper-parameters") -> Hyperparameters:
        """Defaults overridden by ``values``.

        :raises UserError: for an unknown name (with the nearest known one), a wrong type or a value out of range.
        """
        return _build(cls, values, where)

    def to_mapping(self) -> dict[str, Any]:
        """A flat mapping that :meth:`from_mapping` takes."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TrainingOptions:
    """What makes a training, beside its data and its hyper-parameters."""

    size: str = _choice("n", SIZES, "size of the network")
    epochs: int = _number(30, 1, 100_000, "passes over the training images")
    seed: int = _number(0, 0, 2**31 - 1, "everything random follows from it")

    def __post_init__(self) -> None:
        _check_fields(self)

    def to_mapping(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class RuntimeOptions:
    """How a network is run: what changes its speed, and its results only by rounding. ``auto`` is what is fastest."""

    precision: str = _choice("auto", ("auto", *PRECISIONS), "number format; weights stay float32; auto: bf16 on a GPU")
    channels_last: str = _choice("auto", SWITCH, "keep activations in NHWC order; auto: on a GPU")
    compile: str = _choice("auto", SWITCH, "compile the network, and the loss with it; auto: on a GPU")
    graphs: str = _choice("auto", SWITCH, "launch a step as a CUDA or HIP graph; auto: on a GPU")
    images: str = _choice("auto", ("auto", "device", "host"), "where the images lie; auto: the GPU, if they fit well")

    def __post_init__(self) -> None:
        _check_fields(self)


Options = TypeVar("Options", Hyperparameters, TrainingOptions, RuntimeOptions)


def from_flat_mapping(values: Mapping[str, Any], where: str) -> tuple[Hyperparameters, TrainingOptions, RuntimeOptions]:
    """Read a flat configuration in which hyper-parameters and options stand side by side.

    :raises UserError: names ``where``, the key, what was found and what is allowed.
    """
    check_names(values, where)
    return (
        _build(Hyperparameters, _own(Hyperparameters, values), where),
        _build(TrainingOptions, _own(TrainingOptions, values), where),
        _build(RuntimeOptions, _own(RuntimeOptions, values), where),
    )


def _own(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {entry.name: values[entry.name] for entry in _fields(kind) if entry.name in values}


def check_names(values: Mapping[str, Any], where: str, known: tuple[str, ...] | None = None) -> None:
    """Raise :class:`UserError` for the first name that is no parameter, with the nearest one that is."""
    kinds = (Hyperparameters, TrainingOptions, RuntimeOptions)
    allowed = known or tuple(entry.name for kind in kinds for entry in _fields(kind))
    for name in values:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(allowed)}"
            raise UserError(f"{where}: unknown parameter '{name}'; {hint}")


def _fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _build(kind: type[Options], values: Mapping[str, Any], where: str) -> Options:
    check_names(values, where, tuple(entry.name for entry in _fields(kind)))
    try:
        return kind(
            **{entry.name: _convert(entry, values[entry.name]) for entry in _fields(kind) if entry.name in values}
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _convert(entry: dataclasses.Field[Any], value: Any) -> Any:
    """Take a whole float for an int, an int for a float and, since YAML 1.1 reads ``1e-6`` as text, numbers as text."""
    wanted: Any = type(entry.default)
    message = f"{entry.name} is {value!r}: {_allowed(entry)}"
    if isinstance(value, bool) or not isinstance(value, str if wanted is str else (Real, str)):
        raise UserError(message)
    if wanted is str:
        return value
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise UserError(message) from None
    if wanted is int:
        if not number.is_integer():
            raise UserError(message)
        return int(number)
    return number  # a plain float: PyTorch's fused optimisers refuse NumPy's


def _check_fields(instance: Hyperparameters | TrainingOptions | RuntimeOptions) -> None:
    for entry in dataclasses.fields(instance):
        value = getattr(instance, entry.name)
        if "choices" in entry.metadata:
            valid = value in entry.metadata["choices"]
        else:
            valid = math.isfinite(value) and entry.metadata["min"] <= value <= entry.metadata["max"]
        if not valid:
            raise UserError(f"{entry.name} is {value!r}: {_allowed(entry)}")


def _allowed(entry: dataclasses.Field[Any]) -> str:
    if "choices" in entry.metadata:
        return f"allowed are {', '.join(entry.metadata['choices'])}"
    kind = "a whole number" if isinstance(entry.default, int) else "a number"
    return f"allowed is {kind} from {entry.metadata['min']:g} to {entry.metadata['max']:g}"


def _describe(kind: type) -> dict[str, dict[str, Any]]:
    return {
        entry.name: {"default": entry.default, "type": type(entry.default).__name__, **entry.metadata}
        for entry in _fields(kind)
    }


# What a study's parameters are checked against before anything is queued. `epochs` belongs to the study itself.
PARAMETERS: dict[str, dict[str, Any]] = {
    **_describe(Hyperparameters),
    **{name: info for name, info in _describe(TrainingOptions).items() if name != "epochs"},
    **_describe(RuntimeOptions),
}
