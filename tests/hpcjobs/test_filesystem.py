"""What a filesystem does is found out by trying and from its mount; the choice of a lock is made once for a study."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from hpcjobs import doctor, filesystem
from hpcjobs.errors import UserError, run_entry
from hpcjobs.filesystem import Mount, choose_lock, decide_lock, lock_kind, mount_of, probe
from hpcjobs.journal_lock import KernelLock
from hpcjobs.journal_soft_lock import SoftLock, lock_for


@pytest.mark.parametrize(
    ("type_", "options", "flock_works", "kind"),
    [
        ("lustre", ("flock", "rw"), True, "kernel"),
        ("lustre", ("localflock", "rw"), True, "soft"),
        ("lustre", ("rw",), False, "soft"),
        ("nfs4", ("rw", "vers=4.2"), True, "kernel"),
        ("nfs", ("rw", "nolock"), True, "soft"),
        ("nfs4", ("local_lock=all",), True, "soft"),
        ("ext4", ("rw",), True, "kernel"),
        ("gpfs", ("rw",), True, "kernel"),
        ("fuse.unheard-of", ("rw",), True, "soft"),
        ("ext4", ("rw",), False, "soft"),
    ],
)
def test_lock_follows_from_the_mount(type_: str, options: tuple[str, ...], flock_works: bool, kind: str) -> None:
    assert choose_lock(Mount(type_, options, "/"), flock_works)[0] == kind


@pytest.mark.parametrize("type_", ["ext4", "xfs", "btrfs", "tmpfs", "overlay"])
def test_of_a_filesystem_of_one_node_it_is_asked_whether_others_see_it(type_: str) -> None:
    assert choose_lock(Mount(type_, ("rw",), "/"), True)[1].endswith("alone: do other nodes see this folder?")


def test_mount_is_the_nearest_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "a b"
    inside.mkdir()
    point = str(tmp_path).replace(" ", r"\040")
    lines = [
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw",
        rf"22 21 0:40 / {point}/a\040b rw,relatime - lustre 10.0.0.1@o2ib:/fs rw,flock",
        f"23 21 0:41 / {point}/a rw - nfs4 server:/x rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self: real(tmp_path / "mountinfo" if str(self).endswith("mountinfo") else self)
    )
    found = mount_of(inside)
    assert (found.type, "flock" in found.options) == ("lustre", True)
    assert mount_of(tmp_path).type == "ext4"


def test_probe_of_a_local_disk(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found.flock and found.fcntl and found.hard_links and found.exclusive_create
    assert found.rename_over_open_file and found.append
    assert found.sync_ms > 0
    assert list(tmp_path.iterdir()) == []


def test_filesystem_without_flock_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(filesystem, "_try_flock", refuse)
    assert probe(tmp_path).lock == "soft"
    assert isinstance(lock_for(tmp_path / "journal.log"), SoftLock)


def kind_of(journal: Path) -> str:
    return lock_kind(journal)


def test_processes_that_start_at_once_choose_the_same_lock(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(kind_of, [tmp_path / "journal.log"] * 8))) == 1
    assert json.loads((tmp_path / "journal.locking").read_text())["lock"] == "kernel"


def test_first_choice_stays(tmp_path: Path) -> None:
    decide_lock(tmp_path / "journal.log", "soft", "found between two nodes")
    decide_lock(tmp_path / "journal.log", "kernel", "tried on one")
    assert isinstance(lock_for(tmp_path / "journal.log"), SoftLock)


def test_kernel_lock_where_it_works(tmp_path: Path) -> None:
    assert isinstance(lock_for(tmp_path / "journal.log"), KernelLock)


def test_doctor_reports_and_decides_for_a_study(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("version: 1\n")
    run = subprocess.run(
        [sys.executable, "-m", "hpcjobs.doctor", str(tmp_path), "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    assert (found["flock"], found["flock_between_nodes"], found["lock"]) == (True, None, "kernel")
    assert json.loads((tmp_path / "journal.locking").read_text())["lock"] == "kernel"


@pytest.mark.parametrize(("seen", "kind"), [(True, "kernel"), (False, "soft")])
def test_doctor_in_a_job_of_two_nodes_believes_the_try(
    seen: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "other_node", lambda: "node2")
    monkeypatch.setattr(doctor, "held_on_another_node", lambda path, node: seen)
    monkeypatch.setattr(sys, "argv", ["doctor", str(tmp_path), "--json"])
    assert doctor.main() == 0
    assert json.loads(capsys.readouterr().out)["lock"] == kind


def test_step_on_another_node_takes_the_lock_only_where_it_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun is replaced by a script that runs the step's command here: as on a node that sees the lock."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ] || [ "$1" = node2 ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert filesystem.held_on_another_node(tmp_path / "lock", "node2")
    srun.write_text("#!/bin/sh\necho free\n")
    assert not filesystem.held_on_another_node(tmp_path / "lock", "node2")
    for failing in ("exit 1", "echo no such node"):
        srun.write_text(f"#!/bin/sh\n{failing}\n")
        with pytest.raises(OSError, match="node2"):
            filesystem.held_on_another_node(tmp_path / "lock", "node2")


def test_doctor_refuses_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", str(tmp_path / "none")])
    with pytest.raises(UserError, match="no such folder"):
        doctor.main()
    assert run_entry(doctor.main) == 2


def test_doctor_refuses_a_name_for_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", str(tmp_path), "--name", "mine"])
    with pytest.raises(UserError, match="add --profile"):
        doctor.main()
