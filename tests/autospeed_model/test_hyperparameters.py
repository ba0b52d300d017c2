import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autospeed_model.errors import UserError
from autospeed_model.hyperparameters import (
    PARAMETERS,
    Hyperparameters,
    RuntimeOptions,
    TrainingOptions,
    from_flat_mapping,
)


def test_without_values_everything_has_its_default() -> None:
    assert from_flat_mapping({}, "here") == (Hyperparameters(), TrainingOptions(), RuntimeOptions())


def test_values_find_their_place_and_their_type() -> None:
    values = {"min_lr": "1e-6", "warmup_epochs": 2.0, "box": 5, "size": "s", "epochs": "3", "compile": "never"}
    hyperparameters, options, runtime = from_flat_mapping(values, "here")
    assert hyperparameters.min_lr == 1e-6
    assert hyperparameters.warmup_epochs == 2 and isinstance(hyperparameters.warmup_epochs, int)
    assert isinstance(hyperparameters.box, float)
    assert type(from_flat_mapping({"momentum": np.float64(0.9)}, "here")[0].momentum) is float
    assert type(from_flat_mapping({"seed": np.int64(7)}, "here")[1].seed) is int
    assert (options.size, options.epochs, runtime.compile) == ("s", 3, "never")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_lrr": 0.1}, "unknown parameter 'max_lrr'; did you mean 'max_lr'?"),
        ({"unheard_of": 1}, "known are: min_lr, max_lr"),
        ({"box": "much"}, "box is 'much': allowed is a number from 0 to 1000"),
        ({"box": None}, "box is None"),
        ({"box": True}, "box is True"),
        ({"box": float("nan")}, "box is nan"),
        ({"batch_size": 2.5}, "batch_size is 2.5: allowed is a whole number from 1 to 4096"),
        ({"batch_size": True}, "batch_size is True"),
        ({"momentum": 1.5}, "momentum is 1.5: allowed is a number from 0 to 0.9999"),
        ({"size": "xl"}, "size is 'xl': allowed are n, s, m, l, x"),
        ({"precision": "fp8"}, "precision is 'fp8': allowed are auto, fp32, bf16, fp16"),
        ({"batch_size": 10**400}, "batch_size is 1000"),
        ({"min_lr": 10**400}, "allowed is a number from 0 to 1"),
        ({"size": np.array(["n", "s"])}, "allowed are n, s, m, l, x"),
        ({"compile": "perhaps"}, "compile is 'perhaps': allowed are auto, always, never"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_flat_mapping(values, "best.yaml")
    assert str(caught.value).startswith("best.yaml: ")
    assert message in str(caught.value)


def test_the_declared_defaults_are_valid_and_complete() -> None:
    defaults = {name: info["default"] for name, info in PARAMETERS.items()}
    hyperparameters, options, runtime = from_flat_mapping(defaults, "defaults")
    assert (hyperparameters, options, runtime) == (Hyperparameters(), TrainingOptions(), RuntimeOptions())
    assert set(Hyperparameters().to_mapping()) < set(PARAMETERS)
    for info in PARAMETERS.values():
        assert info["type"] in ("float", "int", "bool", "str")
        assert "choices" in info or info["type"] == "bool" or info["min"] <= info["default"] <= info["max"]


@pytest.mark.parametrize("module", ["hyperparameters", "objective"])
def test_importing_what_submit_needs_does_not_import_torch(module: str) -> None:
    code = f"import sys, autospeed_model.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_model_configuration_is_complete_and_holds_the_defaults() -> None:
    path = Path(__file__).parents[2] / "configs" / "models" / "autospeed.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert from_flat_mapping(content, str(path)) == from_flat_mapping({}, "defaults")
    assert set(content) == set(Hyperparameters().to_mapping()) | set(TrainingOptions().to_mapping())
