"""What a root process makes of values that users write. The prolog and epilog themselves run in tests/cluster."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjobs.mode_hook import holds_all_gpus, main, requested_mode, run_hook

SITE_FILES = Path(__file__).parents[2] / "slurm"
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
        (7, 56, 0, ["mode cpx on 7 GPUs, 56 logical GPUs", "AMD SMI shows 7 of 8 GPUs"]),
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
    options = argparse.Namespace(
        hook="epilog", allowed="spx cpx", default="cpx", gpus=1 if gpus == 1 else 8, patience=1.0
    )
    with caplog.at_level(logging.INFO, "partition-mode"):
        run_hook(options, {"SLURM_JOB_GPUS": "0" if gpus == 1 else "0-7"})
    assert [re.sub(r", [\d.]+ s$", "", message) for message in caplog.messages] == lines


# ---- the entry: what drains a node, and what its log says then ----


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Arguments of a prolog on a node whose job holds its one GPU. Handlers of the log go with the test."""
    monkeypatch.setenv("SLURM_JOB_GPUS", "0")
    before = logging.getLogger().handlers[:]
    yield ["prolog", "--allowed", "spx cpx", "--default", "spx", "--gpus", "1"]
    for handler in [one for one in logging.getLogger().handlers if one not in before]:
        logging.getLogger().removeHandler(handler)
        handler.close()


def test_a_log_that_cannot_be_written_drains_no_node(
    hook: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def set_mode(mode: str, patience_s: float) -> SimpleNamespace:
        asked.append(mode)
        return SimpleNamespace(modes=[mode], gpus=[None], missing=0)

    monkeypatch.setattr("hpcjobs.mode_hook.set_mode", set_mode)
    assert main([*hook, "--log", str(tmp_path / "no such folder" / "log")]) == 0
    assert asked == ["spx"]
    assert "there is no log: " in caplog.text and "no such folder" in caplog.text


def test_an_error_that_nobody_foresaw_drains_the_node_and_is_in_the_log(
    hook: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_mode(mode: str, patience_s: float) -> SimpleNamespace:
        raise RuntimeError("the library has another layout")

    monkeypatch.setattr("hpcjobs.mode_hook.set_mode", set_mode)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu\n7")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert main([*hook, "--log", str(tmp_path / "log")]) == 1
    text = (tmp_path / "log").read_text()
    assert "gpu7 job 12 prolog: ERROR" in text and "RuntimeError: the library has another layout" in text


# ---- slurm/partition-mode.sh around an interpreter that only says what reached it ----


class Site:
    """The files of slurm/ in a folder of their own, as an administrator installs them."""

    def __init__(self, folder: Path) -> None:
        self.etc, self.log, self.said = folder / "etc", folder / "log", folder / "said"
        for name in ("prolog.d", "epilog.d"):
            shutil.copytree(SITE_FILES / name, self.etc / name)
        shutil.copy(SITE_FILES / "partition-mode.sh", self.etc)

    def install(self, interpreter: str, **more: str) -> None:
        """Write the configuration; ``interpreter`` is the text of a shell script in the place of Python."""
        python = self.etc / "python"
        python.write_text(f"#!/bin/sh\n{interpreter}\n")
        python.chmod(0o755)
        lines = {"python": str(python), "gpus": "8", "allowed_modes": "'spx cpx'", "default_mode": "spx", **more}
        (self.etc / "partition-mode.conf").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))

    def run(
        self, script: str = "prolog.d/50-partition-mode", *arguments: str, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        command = [str(self.etc / script), *arguments]
        return subprocess.run(command, env=environ, cwd=self.etc.parent, capture_output=True, text=True, timeout=300)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_nothing_from_outside_reaches_the_interpreter_but_five_variables(site: Site, tmp_path: Path) -> None:
    site.install(f'{{ env; echo "$@"; }} > {site.said}')
    evil = tmp_path / "evil"
    evil.mkdir()
    for name in ("timeout", "env", "date", "partition-mode.sh"):
        (evil / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/injected\n")
        (evil / name).chmod(0o755)
    asked = {"SLURM_JOB_GPUS": "0-7", "SLURM_JOB_CONSTRAINTS": f"$(touch {tmp_path}/injected)", "SLURM_JOB_ID": "7"}
    hostile = {
        "PATH": str(evil), "PYTHONPATH": str(evil), "PYTHONSTARTUP": str(evil / "env"), "ENV": str(evil / "env"),
        "BASH_ENV": str(evil / "env"), "IFS": "/", "HOME": str(evil), "SPANK_ROCM_PATH": str(evil),
        # names of the configuration, which here leaves them out
        "rocm": str(evil), "log": str(evil / "log"), "limit_s": "0", "patience_s": "1e9",
    }  # fmt: skip
    done = site.run(**asked, **hostile)
    assert done.returncode == 0, done.stderr
    *environ, arguments = site.said.read_text().splitlines()
    assert {line for line in environ if not line.startswith(("PWD=", "OLDPWD=", "_=", "SHLVL="))} == {
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "ROCM_PATH=/opt/rocm", "SLURMD_NODENAME=",
        "SLURM_JOB_COMMENT=", *(f"{name}={value}" for name, value in asked.items()),
    }  # fmt: skip
    assert arguments == (
        "-I -m hpcjobs.mode_hook prolog --allowed spx cpx --default spx --gpus 8 --patience 60 --log "
        "/var/log/partition-mode.log"
    )
    assert not (tmp_path / "injected").exists()


def test_a_link_to_a_script_looks_for_its_neighbours_beside_the_link(site: Site, tmp_path: Path) -> None:
    """As where /etc/slurm/prolog.d holds links into a checkout; the working folder has other files of these names."""
    site.install(f'echo "$4" > {site.said}')
    script = site.etc / "epilog.d" / "50-partition-mode"
    script.rename(tmp_path / "elsewhere")
    script.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "partition-mode.sh").write_text("#!/bin/sh\nexit 9\n")
    assert site.run("epilog.d/50-partition-mode").returncode == 0
    assert site.said.read_text() == "epilog\n"


@pytest.mark.parametrize(("interpreter", "code"), [("exec sleep 600", 124), ("trap '' TERM; exec sleep 600", 137)])
def test_what_hangs_is_ended_and_the_log_says_so(site: Site, interpreter: str, code: int) -> None:
    site.install(interpreter, limit_s="1", log=str(site.log))
    done = site.run(SLURMD_NODENAME="gpu1", SLURM_JOB_ID="7")
    assert done.returncode == code
    assert site.log.read_text().rstrip().endswith("gpu1 job 7 prolog: ERROR ended after limit_s=1 s")


def test_what_hangs_is_ended_where_there_is_no_log(site: Site) -> None:
    site.install("exec sleep 600", limit_s="1", log=str(site.log / "not here"))
    assert site.run().returncode == 124


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_interpreters_answer_is_the_hooks(site: Site, code: int) -> None:
    site.install(f"exit {code}")
    assert site.run().returncode == code


@pytest.mark.parametrize("missing", ["python", "gpus", "allowed_modes", "default_mode"])
def test_a_configuration_that_is_not_complete_fails_and_names_what_it_lacks(site: Site, missing: str) -> None:
    site.install("exit 0")
    configuration = site.etc / "partition-mode.conf"
    lines = [line for line in configuration.read_text().splitlines() if not line.startswith(f"{missing}=")]
    configuration.write_text("\n".join([*lines, ""]))
    done = site.run(**{missing: "spx"})
    assert done.returncode == 2
    assert missing in done.stderr


def test_without_its_configuration_the_hook_fails_and_names_the_file(site: Site) -> None:
    done = site.run("partition-mode.sh", "prolog")
    assert (done.returncode, done.stderr) == (1, f"partition-mode: {site.etc}/partition-mode.conf is missing\n")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_configuration_that_cannot_be_read_counts_as_missing(site: Site) -> None:
    site.install("exit 0")
    (site.etc / "partition-mode.conf").chmod(0)
    assert site.run().returncode == 1
