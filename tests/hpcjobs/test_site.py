"""From what Slurm says to a profile that submit takes, and to a table of what is right, doubtful and wrong."""

from __future__ import annotations

import getpass
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpcjobs.doctor import examine, findings_table
from hpcjobs.doctor_quota import Room, quotas, rooms
from hpcjobs.filesystem import Mount
from hpcjobs.load import load_cluster
from hpcjobs.site import Site, look, parse_modules, parse_partitions, parse_settings, parse_time, rocm_release
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
LOCK = ("kernel", "NFS turns flock into a lock of the server")
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
    rows = findings(nothing, [], LOCK)
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
    rows = findings(site(SWITCHED, **more), [Room("of all", 100.0, 10**9)], LOCK)
    row = next(row for row in rows if row.what == what)
    assert row.verdict == verdict
    assert bool(row.remedy) == (verdict != "right")


def test_the_table_of_findings_cuts_nothing_at_80_columns() -> None:
    problem = "sacctmgr --noheader: sacctmgr: error: slurm_persist_conn_open_without_init: Unable to contact slurmdbd"
    rows = findings(site(SWITCHED, torch=None, problems=[problem]), [Room("of all", 100.0, 10**9)], LOCK)
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
    rows = findings(site(LUMI), [Room("of all", free_gb, None), Room("of me", None, 99_999)], LOCK)
    assert {row.what: row.verdict for row in rows if " of " in row.what} == {
        "space of all": verdict, "files of me": "doubtful", "lock of a study": "right",
    }  # fmt: skip


def test_a_lock_file_is_told_with_its_reason() -> None:
    row = next(row for row in findings(site(LUMI), [], ("soft", "flock does not work here")) if "lock" in row.what)
    assert (row.verdict, row.found) == ("doubtful", "soft: flock does not work here")


@pytest.mark.parametrize(("kind", "verdict"), [("ext4", "doubtful"), ("tmpfs", "doubtful"), ("gpfs", "right")])
def test_a_folder_that_other_nodes_may_not_see_is_doubtful(
    kind: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("filesystem", "doctor"):
        monkeypatch.setattr(f"hpcjobs.{module}.mount_of", lambda folder: Mount(kind, (), "/"))
    examine(tmp_path / "mine.yaml", "mine", tmp_path, as_json=True)
    (row,) = [row for row in json.loads(capsys.readouterr().out)["findings"] if row["what"] == "lock of a study"]
    assert row["verdict"] == verdict
    assert ("do other nodes see this folder?" in row["found"]) == bool(row["remedy"]) == (verdict == "doubtful")


LUSTRE = """\
    /scratch 1073741824* 1048576000 1153433600       -  123456       0       0       -
"""
QUOTA = """\
Disk quotas for user anna (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
 server:/home   20971520  0       52428800   0      1000    0     200000       0
      /dev/sdb1    20    10     10       0      20      0       0       0
"""


@pytest.mark.parametrize(
    ("said", "place", "expected"),
    [
        (LUSTRE, "/scratch", [("me", 81.6, None)]),
        (QUOTA, "server:/home", [("me", 32.2, 199_000)]),
        (QUOTA, "/dev/sdb1", [("me", 0.0, None)]),
        (QUOTA, "/elsewhere", []),
        ("    /scratch 5 0 0 - 7 0 0 -\n", "/scratch", []),
        ("quota: none here\n", "/scratch", []),
    ],
)
def test_what_is_left_of_a_quota_is_read(said: str, place: str, expected: list[tuple[Any, ...]]) -> None:
    found = rooms(said, {place}, "me")
    assert [(r.whose, r.free_gb and round(r.free_gb, 1), r.free_files) for r in found] == expected


@pytest.mark.parametrize("kind", ["lustre", "nfs4"])
def test_the_command_for_a_filesystems_quota_is_asked(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcjobs.doctor_quota.mount_of", lambda folder: Mount(kind, (), "/scratch"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "lfs").write_text(f"""#!/bin/sh
if [ "$1" = project ]; then echo '7 P /scratch/x'; exit; fi
case "$*" in *"-p 7 /scratch") echo '{LUSTRE.strip()}' ;; *"-u "*"/scratch") echo '/scratch 5 0 0 - 7 0 9 -' ;; esac
""")
    (tmp_path / "quota").write_text("#!/bin/sh\necho ' /scratch 5 0 0 0 7 0 9 0'; exit 1\n")
    for command in ("lfs", "quota"):
        (tmp_path / command).chmod(0o755)
    me = Room(f"of {getpass.getuser()}", None, 2)
    project = [room for room in quotas(tmp_path) if room != me]
    assert me in quotas(tmp_path)
    assert [(room.whose, round(room.free_gb or 0)) for room in project] == [("of project 7", 82)] * (kind == "lustre")


def test_a_quota_that_nobody_tells_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpcjobs.doctor_quota.ANSWER_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "quota").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "quota").chmod(0o755)
    examine(tmp_path / "mine.yaml", "mine", tmp_path, as_json=True)
    rows = json.loads(capsys.readouterr().out)["findings"]
    assert [row["found"] for row in rows if "quota" in row["found"] and "timed out" in row["found"]]


@pytest.mark.parametrize(
    ("rocm", "amdsmi", "verdict", "told"),
    [
        ("6.4.1", "6.4.3", "right", ""),
        ("6.4.1", "6.2.0", "doubtful", "pip install 'amdsmi==6.4.*'"),
        ("6.4.1", None, "doubtful", "pip install 'amdsmi==6.4.*'"),
        (None, "6.4.3", "right", ""),
        (None, None, "doubtful", "pip install 'amdsmi==RELEASE.*'"),
    ],
)
def test_the_package_amdsmi_must_be_of_the_release_of_rocm(
    rocm: str | None, amdsmi: str | None, verdict: str, told: str
) -> None:
    rows = findings(site(SWITCHED, rocm=rocm, amdsmi=amdsmi), [], LOCK)
    (row,) = [row for row in rows if row.what == "ROCm"]
    assert row.verdict == verdict and row.remedy.startswith(told)
    boost = findings(site(LEONARDO, rocm=rocm, amdsmi=amdsmi), [], LOCK)
    assert not [row for row in boost if row.what == "ROCm"]


def test_the_release_of_rocm_is_where_rocm_writes_it(tmp_path: Path) -> None:
    assert rocm_release(tmp_path) is None
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text("6.4.1-83\n")
    assert rocm_release(tmp_path) == "6.4.1"


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
