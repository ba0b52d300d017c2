import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from autospeed_model import checkpoint, evaluate, train
from autospeed_model.errors import UserError, run_entry
from autospeed_model.hyperparameters import PARAMETERS
from autospeed_model.packed import write_dataset

QUICK = ["--device", "cpu", "--no-tensorboard", "--set", "batch_size=4", "--set", "warmup_epochs=1"]


def arguments(data: Path, out: Path, *more: str) -> list[str]:
    return ["--data", str(data), "--out", str(out), *QUICK, *more]


@pytest.fixture(scope="module")
def trained(squares_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of one epoch with everything switched on."""
    out = tmp_path_factory.mktemp("run") / "out"
    given = [
        "--data",
        str(squares_folder),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--set",
        "batch_size=4",
    ]
    assert train.main(given) == 0
    return out


def test_a_training_leaves_its_weights_its_table_and_its_log(trained: Path) -> None:
    assert {"best.pt", "last.pt", "checkpoint.pt", "metrics.csv", "tensorboard"} <= {p.name for p in trained.iterdir()}
    with (trained / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1"]
    assert {"lr", "box_loss", "precision", "recall", "map50", "map", "images_per_s"} <= set(rows[0])
    assert list((trained / "tensorboard").glob("events*"))
    assert checkpoint.load_network(trained / "best.pt").size == "n"


def test_without_a_terminal_a_training_says_what_it_does_before_its_first_epoch_ends(
    squares_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autospeed_model.logs.SILENT_S", 0.0)
    train.main(arguments(squares_folder, tmp_path / "out", "--epochs", "1"))
    first, second, *_, last_of_epoch, best = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"epochs to train: 1, each of \d+ steps of 4 images on cpu, into .*", first)
    assert re.fullmatch(r"epoch 1/1  \d+/\d+ steps  [\d.]+ images/s", second)
    assert last_of_epoch.startswith("epoch 1/1  box ")
    assert best.startswith("best mAP")


def test_a_second_training_into_the_same_folder_is_refused(trained: Path, squares_folder: Path) -> None:
    with pytest.raises(UserError, match="go on with --resume, replace it with --overwrite"):
        train.main(arguments(squares_folder, trained))


def test_resume_takes_the_parameters_of_the_checkpoint(
    trained: Path, squares_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(squares_folder), "--out", str(trained), "--device", "cpu"]
    assert train.main([*given, "--resume"]) == 0
    assert "all 1 epochs are done" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="options epochs 1, not 5"):
        train.main([*given, "--resume", "--epochs", "5"])


def test_evaluate_measures_weights_on_any_split(
    trained: Path, squares_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for weights in ("best.pt", "checkpoint.pt"):
        given = ["--data", str(squares_folder), "--weights", str(trained / weights), "--device", "cpu"]
        assert evaluate.main([*given, "--batch-size", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("evaluation (4 images)") and lines[0] == lines[1]


def test_nothing_is_no_figure(trained: Path, tmp_path: Path) -> None:
    shape = (0, 64, 96, 3)
    write_dataset(tmp_path / "none", "autospeed-2", {"evaluation": (np.zeros(shape, np.uint8), [])})
    given = ["--data", str(tmp_path / "none"), "--weights", str(trained / "best.pt"), "--device", "cpu"]
    with pytest.raises(UserError, match="the split 'evaluation' has no image: nothing to measure"):
        evaluate.main(given)


def test_a_complete_configuration_is_taken_as_it_is(squares_folder: Path, tmp_path: Path) -> None:
    best = {name: info["default"] for name, info in PARAMETERS.items()} | {"batch_size": 4, "max_lr": 0.005}
    path = tmp_path / "best_params.yaml"
    path.write_text(yaml.safe_dump(best))
    given = ["--data", str(squares_folder), "--out", str(tmp_path / "out"), "--config", str(path), "--set", "box=5"]
    trainer = train.make_trainer(train.parse([*given, "--device", "cpu", "--epochs", "7", "--precision", "bf16"]))
    assert trainer.hyperparameters.max_lr == 0.005 and trainer.hyperparameters.box == 5
    assert trainer.options.epochs == 7
    assert trainer.runtime.precision == "bf16"


def test_the_profiler_writes_a_trace(squares_folder: Path, tmp_path: Path) -> None:
    given = arguments(squares_folder, tmp_path, "--epochs", "4", "--profile")
    assert train.main(given) == 0
    assert json.loads((tmp_path / "profile.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "max_lrr=1"], "--set: unknown parameter 'max_lrr'; did you mean 'max_lr'?"),
        (["--set", "max_lr"], "write it as NAME=VALUE"),
        (["--set", "box=many"], "box is 'many': allowed is a number"),
        (["--epochs", "0"], "epochs is 0: allowed is a whole number from 1"),
        (["--train-split", "all"], "no split 'all'; there are train, tune_val, evaluation"),
        (["--weights", "none.pt"], "none.pt: no such file"),
        (["--upstream", "none.pt"], "none.pt: no such file"),
        (["--weights", "/"], "/: Is a directory"),
        (["--upstream", "/"], "/: Is a directory"),
        (["--out", "/dev/null"], "/dev/null: File exists"),
        (["--out", "x" * 300], "File name too long"),
        (["--resume"], "checkpoint.pt: no such file"),
        (["--resume", "--weights", "best.pt"], "found --resume and --weights; allowed is one of them"),
        (["--weights", "best.pt", "--upstream", "their.pt"], "found --weights and --upstream; allowed is one"),
        (["--config", "none.yaml"], "none.yaml: not readable"),
    ],
)
def test_a_mistake_ends_with_exit_code_2_and_its_message(
    squares_folder: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_entry(lambda: train.main(arguments(squares_folder, tmp_path / "out", *more))) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "needed is a mapping"),
        ("a: [1\n", "no valid YAML"),
        ("max_lrr: 1\n", "unknown parameter 'max_lrr'"),
        ("box: -1\n", "box is -1"),
    ],
)
def test_a_broken_configuration_is_told_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        train.read_parameters(path, [])
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_a_folder_that_is_no_dataset_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"manifest\.json"):
        train.main(arguments(tmp_path, tmp_path / "out"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_saves_and_a_resume_finishes(squares_folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "autospeed_model.train", *arguments(squares_folder, out, "--epochs", "5000")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 400
        while not (out / "metrics.csv").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=400)
    assert process.returncode == 128 + number
    assert "--resume" in errors and "Traceback" not in errors
    saved: dict[str, Any] = checkpoint.load(out / "checkpoint.pt", checkpoint.TRAINING)
    assert 1 <= saved["epoch"] < 5000

    trainer = train.make_trainer(train.parse(arguments(squares_folder, out, "--resume")))
    assert (trainer.epoch, trainer.step) == (saved["epoch"], saved["step"])
    assert all(torch.equal(value, saved["weights"][name]) for name, value in trainer.network.state_dict().items())
