"""The agent's folder on the node's own disk does not outlive it for long."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpcjobs.node_folder import node_folder, remove_abandoned
from hpcjobs.owners import process_start


def test_the_folder_is_ours_alone_and_goes_with_the_agent() -> None:
    with node_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        remove_abandoned(folder.parent)
        assert folder.is_dir()
    assert not folder.exists()


def test_only_old_folders_of_agents_that_have_ended_are_removed(tmp_path: Path) -> None:
    alive = f"{os.getpid()} {process_start(os.getpid())}"
    dead = f"{os.getpid()} another-boot:1:1"
    made = {"old-dead": (dead, True), "old-alive": (alive, True), "new-dead": (dead, False), "other": (None, True)}
    for name, (agent, old) in made.items():
        folder = tmp_path / f"hpcjobs-node-{name}"
        folder.mkdir()
        if agent:
            (folder / "agent").write_text(agent)
        if old:
            os.utime(folder, (0, 0))
    remove_abandoned(tmp_path)
    left = sorted(path.name.removeprefix("hpcjobs-node-") for path in tmp_path.iterdir())
    assert left == ["new-dead", "old-alive", "other"]


def test_another_users_folder_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hpcjobs-node-hers"
    folder.mkdir()
    os.mkfifo(folder / "agent")  # who opens it waits for a writer
    os.utime(folder, (0, 0))
    monkeypatch.setattr("hpcjobs.node_folder.os.getuid", lambda: folder.stat().st_uid + 1)
    look = threading.Thread(target=remove_abandoned, args=(tmp_path,), daemon=True)
    look.start()
    look.join(20)
    assert not look.is_alive()
    assert folder.is_dir()
