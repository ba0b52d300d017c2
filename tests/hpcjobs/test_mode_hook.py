"""What a root process makes of values that users write. The prolog and epilog themselves run in tests/cluster."""

from __future__ import annotations

import argparse
import logging
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjobs.mode_hook import holds_all_gpus, requested_mode, run_hook

ALLOWED = ["spx", "dpx", "qpx", "cpx"]


@pytest.mark.parametrize(
    ("constraints", "comment", "mode"),
    [
        ("cpx", "", "cpx"),
        ("mi300x&qpx", "", "qpx"),
        ("(mi300x|mi325x)&dpx", "", "dpx"),
        ("[rack1*2&cpx]", "", "cpx"),
        ("", "cpx", "cpx"),
        ("mi300x", "dpx", "dpx"),
        ("spx", "cpx", "spx"),  # the constraint is what the scheduler went by
        ("", "", None),
    ],
)
def test_a_mode_is_read_from_the_constraint_then_the_comment(constraints: str, comment: str, mode: str | None) -> None:
    assert requested_mode(constraints, comment, ALLOWED) == mode


@pytest.mark.parametrize(
    ("constraints", "comment"),
    [
        ("tpx", ""),  # a mode, but not one of this site's
        ("cpx|spx", ""),
        ("cpx&dpx", "cpx"),
        ("CPX", ""),
        ("cpx_nodes", ""),
        ("mi300x-cpx", ""),
        ("cpx;reboot", ""),
        ("cpx\nspx", ""),
        ("$(reboot)&cpx", ""),
        ("cpx" + "&a" * 600, ""),
        ("", "cpx;rm -rf /"),
        ("", "cpx\n"),
        ("", " cpx"),
        ("", "cpx dpx"),
        ("", "`cpx`"),
        ("", "--allowed cpx"),
        ("", "cpx" * 100_000),
    ],
)
def test_whatever_else_is_no_request(constraints: str, comment: str) -> None:
    assert requested_mode(constraints, comment, ALLOWED) is None


@given(st.text(max_size=40), st.text(max_size=40))
def test_the_answer_is_always_a_word_of_the_administrator(constraints: str, comment: str) -> None:
    assert requested_mode(constraints, comment, ["cpx"]) in (None, "cpx")


@pytest.mark.parametrize(
    ("devices", "all_of_them"),
    [
        ("0,1,2,3,4,5,6,7", True),
        ("0-7", True),
        ("0-3,4-7", True),
        ("0,1,2,3,4,5,6", False),
        ("0,0,0,0,0,0,0,0", False),
        ("", False),
        ("0-7;reboot", False),
        ("0-999999999", False),
    ],
)
def test_only_a_job_with_all_gpus_may_switch(devices: str, all_of_them: bool) -> None:
    assert holds_all_gpus(devices, 8) is all_of_them


@pytest.mark.parametrize(
    ("gpus", "logical", "missing", "lines"),
    [
        (1, 1, 0, ["mode cpx on 1 GPU, 1 logical GPU"]),
        (1, 7, 1, ["mode cpx on 1 GPU, 7 logical GPUs", "1 logical GPU missing"]),
        (8, 62, 2, ["mode cpx on 8 GPUs, 62 logical GPUs", "2 logical GPUs missing"]),
    ],
)
def test_what_was_set_is_logged(
    gpus: int,
    logical: int,
    missing: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = SimpleNamespace(modes=["cpx"] * gpus, gpus=[None] * logical, missing=missing)
    monkeypatch.setattr("hpcjobs.mode_hook.set_mode", lambda mode, patience_s: devices)
    options = argparse.Namespace(hook="epilog", allowed="spx cpx", default="cpx", gpus=gpus, patience=1.0)
    with caplog.at_level(logging.INFO, "partition-mode"):
        run_hook(options, {"SLURM_JOB_GPUS": "0" if gpus == 1 else "0-7"})
    assert [re.sub(r", [\d.]+ s$", "", message) for message in caplog.messages] == lines
