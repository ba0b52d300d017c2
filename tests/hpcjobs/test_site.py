"""From what Slurm says to a profile that submit takes, and to a table of what is right, doubtful and wrong."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpcjobs.doctor import examine, findings_table
from hpcjobs.load import load_cluster
from hpcjobs.site import Site, look, parse_modules, parse_partitions, parse_settings, parse_time
from hpcjobs.site_profile import findings, profile_text

# partition, state, limit, nodes, CPUs, memory, gres, features: as sinfo prints them on sites of different kinds
LUMI = """\
standard-g|up|2-00:00:00|2928|128|491520|gpu:mi250:8(S:0-7)|AMD_EPYC_7A53,x1101
standard|up|2-00:00:00|2000|256|229376|(null)|AMD_EPYC_7763
dev-g|up|3:00:00|48|128|491520|gpu:mi250:8(S:0-7)|AMD_EPYC_7A53
"""
LEONARDO = """\
boost_usr_prod*|up|1-00:00:00|3456|32|494000|gpu:4|intel
lrd_all_serial|up|4:00:00|1|112|494000|(null)|(null)
broken|down|1:00|9999|32|1000|gpu:a100:8|(null)
"""
SWITCHED = "gpu*|up|infinite|4|64|256000|gpu:mi300x:8|mi300x,spx,dpx,qpx,cpx\n"
SETTINGS = {"MaxArraySize": "1001", "AccountingStorageType": "accounting_storage/slurmdbd"}


def site(partitions: str, **more: Any) -> Site:
    found = {"slurm": "23.02.7", "settings": SETTINGS, "partitions": parse_partitions(partitions), "accounting": True}
    return Site(**{**found, **more})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LUMI, ("standard-g", "amd", 8, "gpu:mi250:8", 128, 720, "none", ())),
        (LEONARDO, ("boost_usr_prod", "nvidia", 4, "gpu:4", 32, 720, "none", ())),
        (SWITCHED, ("gpu", "amd", 8, "gpu:mi300x:8", 64, 720, "constraint", ("spx", "dpx", "qpx", "cpx"))),
    ],
)
def test_the_profile_is_one_that_submit_takes(
    text: str, expected: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcjobs.site.shutil.which", lambda name: "/usr/bin/nvidia-smi")
    path = tmp_path / "site.yaml"
    path.write_text(profile_text(site(text, accounts=["project_1"]), 'a "site": #1'))
    cluster = load_cluster(str(path))
    found = (
        cluster.slurm_partition, cluster.gpu_vendor, cluster.gpus_per_node, cluster.gres, cluster.cores_per_node,
        cluster.timeout_min, cluster.mode.by, cluster.mode.modes,
    )  # fmt: skip
    assert found == expected
    assert (cluster.name, cluster.account, cluster.max_array_size) == ('a "site": #1', "project_1", 1000)


def test_several_accounts_are_named_and_none_is_chosen(tmp_path: Path) -> None:
    text = profile_text(site(LUMI, accounts=["project_1", "project_2"]), "lumi")
    assert "account: null" in text
    assert "project_1, project_2" in text


def test_a_machine_without_slurm_is_told_so_and_its_profile_can_still_be_read(tmp_path: Path) -> None:
    nothing = Site()
    path = tmp_path / "site.yaml"
    path.write_text(profile_text(nothing, "laptop"))
    assert load_cluster(str(path)).cores_per_node == 1
    rows = findings(nothing, free_gb=100.0, files=None)
    assert (rows[0].what, rows[0].verdict) == ("Slurm", "wrong")
    assert rows[0].remedy


@pytest.mark.parametrize(
    ("what", "verdict", "more"),
    [
        ("accounting", "wrong", {"accounting": False}),
        ("PyTorch", "doubtful", {"torch": None}),
        ("PyTorch", "doubtful", {"torch": "2.9.0+cpu"}),
        ("PyTorch", "right", {"torch": "2.9.0+rocm6.4"}),
        ("Slurm", "doubtful", {"slurm": "20.11.9"}),
        ("prolog", "doubtful", {"settings": {**SETTINGS, "Prolog": "/etc/p", "PrologFlags": "(null)"}}),
        ("question", "doubtful", {"problems": ["sinfo: no answer"]}),
    ],
)
def test_each_row_says_what_is_wrong_and_what_to_do(what: str, verdict: str, more: dict[str, Any]) -> None:
    rows = findings(site(SWITCHED, **more), free_gb=100.0, files=10**9)
    row = next(row for row in rows if row.what == what)
    assert row.verdict == verdict
    assert bool(row.remedy) == (verdict != "right")


def test_the_table_of_findings_cuts_nothing_at_80_columns() -> None:
    problem = "sacctmgr --noheader: sacctmgr: error: slurm_persist_conn_open_without_init: Unable to contact slurmdbd"
    rows = findings(site(SWITCHED, torch=None, problems=[problem]), free_gb=100.0, files=10**9)
    console = Console(width=80, file=io.StringIO())
    console.print(findings_table(rows))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    words = " ".join(" ".join(lines).split())
    for row in rows:
        assert row.found in words
        assert not row.remedy or f"-> {row.remedy}" in words
    assert "slurm_persist_conn_open_without_init:" in words
    assert len(lines) <= 2 * len(rows)


NO_CONFIGURATION = """\
: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
: error: fetch_config: DNS SRV lookup failed
: fatal: Could not establish a configuration source"""
NO_CONTROLLER = ": error: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    ("said", "told"),
    [(NO_CONFIGURATION, "find no slurm.conf here, and none by DNS"), (NO_CONTROLLER, "(connect failure)"), ("", "")],
)
def test_a_slurm_that_does_not_answer_is_one_row_with_its_remedy_and_no_profile(
    said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("scontrol", "sinfo", "sacctmgr", "sbatch"):
        path = tmp_path / command
        path.write_text(f"#!/bin/sh\ncat >&2 <<END\n{said.replace(': ', command + ': ')}\nEND\nexit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    profile = tmp_path / "mine.yaml"
    assert examine(profile, "mine", tmp_path, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    (row,) = [row for row in found["findings"] if row["verdict"] != "right" and row["what"] in ("Slurm", "question")]
    assert told in row["found"] and "DNS SRV" not in row["found"] and "SLURM_CONF" in row["remedy"]
    assert found["profile"] is None and not profile.exists()
    examine(profile, "mine", tmp_path, as_json=False)
    assert f"{profile} was not written" in capsys.readouterr().out


def test_of_a_command_that_fails_the_first_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (
        ("sinfo", "echo 'sinfo: error: no controller\nsinfo: fatal: gone' >&2\nexit 1"),
        ("scontrol", "echo MaxArraySize = 1001"),  # the others answer
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "sinfo --noheader: sinfo: error: no controller" in look(sys.executable).problems


@pytest.mark.parametrize(("free_gb", "verdict"), [(1.0, "wrong"), (20.0, "doubtful"), (500.0, "right")])
def test_little_space_is_told(free_gb: float, verdict: str) -> None:
    row = next(row for row in findings(site(LUMI), free_gb, None) if row.what == "free space")
    assert row.verdict == verdict


@pytest.mark.parametrize(
    ("text", "minutes"), [("2-00:00:00", 2880), ("3:00:00", 180), ("30:00", 30), ("1:00", 1), ("infinite", None)]
)
def test_time_limits_are_minutes(text: str, minutes: int | None) -> None:
    assert parse_time(text) == minutes


def test_what_commands_print_is_read_as_far_as_it_goes() -> None:
    assert parse_settings("Configuration data\nMaxArraySize            = 1001\nA = b = c\n") == {
        "MaxArraySize": "1001", "A": "b = c",
    }  # fmt: skip
    assert parse_partitions("nonsense\n\na|b\n") == []
    terse = "/opt/modules:\nrocm/6.3.0\nrocm/6.4.1(default)\nvim/9.0\npartition/G\npython/\n"
    assert parse_modules(terse) == ["rocm/6.3.0", "rocm/6.4.1", "partition/G"]
