"""What is refused before a study is made: folders that others can change, missing data, a machine without Slurm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcjobs import preflight
from hpcjobs.errors import UserError
from hpcjobs.paths import StudyPaths
from hpcjobs.preflight import check_data, check_new_folder, check_slurm, check_writers


def folder_refusal(folder: Path, *, group_writable: bool = False) -> str:
    with pytest.raises(UserError) as error:
        check_new_folder(StudyPaths(folder), group_writable=group_writable)
    return str(error.value)


def test_a_new_folder_and_an_empty_one_are_taken(tmp_path: Path) -> None:
    check_new_folder(StudyPaths(tmp_path / "a" / "b"), group_writable=False)
    check_new_folder(StudyPaths(tmp_path), group_writable=False)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_holds_a_study_names_the_way_to_resume_it(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine"
    folder.mkdir()
    (folder / "study.yaml").touch()
    assert f"python -m hpcjobs.submit --resume '{tmp_path}/it'\"'\"'s mine'" in folder_refusal(folder)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).touch()
    assert "found 4 entries that are no study (a, b, c...); allowed: a new or empty folder" in folder_refusal(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "found a file" in folder_refusal(tmp_path / "file")
    assert "is a file; allowed: folders all the way" in folder_refusal(tmp_path / "file" / "study")


def test_a_folder_that_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert "everybody can write to it (mode 777)" in folder_refusal(folder, group_writable=True)
    folder.chmod(0o1777)
    assert "everybody can write to it (mode 1777)" in folder_refusal(folder)
    assert "(mode 1777)" not in str(tmp_path)


def test_a_parent_that_everybody_can_write_to_is_safe_only_with_the_sticky_bit(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    message = folder_refusal(parent / "a" / "study")
    assert message.startswith(f"{parent}: everybody can write to it")
    assert f"chmod o-w {parent}" in message
    parent.chmod(0o1777)
    check_new_folder(StudyPaths(parent / "a" / "study"), group_writable=False)


def test_a_link_does_not_hide_an_open_parent(tmp_path: Path) -> None:
    target = tmp_path / "open" / "target"
    target.mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(target)
    assert f"{tmp_path}/open: everybody can write to it" in folder_refusal(tmp_path / "link" / "study")


def test_a_link_that_others_can_turn_is_refused(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    (shared / "link").symlink_to(own)
    (tmp_path / "to the link").symlink_to(shared / "link")
    shared.chmod(0o777)
    for folder in (shared / "link", tmp_path / "to the link"):
        assert f"{shared}: everybody can write to it" in folder_refusal(folder / "study")
    shared.chmod(0o1777)
    check_new_folder(StudyPaths(shared / "link" / "study"), group_writable=False)
    if os.getuid() == 0:
        os.chown(shared / "link", 12345, 12345, follow_symlinks=False)
        assert f"{shared}/link: this link belongs to another user" in folder_refusal(tmp_path / "to the link" / "study")


def test_a_link_in_a_loop_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        check_writers(tmp_path / "loop" / "study", group_writable=False)


def test_a_folder_that_the_group_can_write_to_needs_the_profiles_consent(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    assert "only with 'group_writable_folders: true' in the cluster's profile" in folder_refusal(tmp_path)
    check_new_folder(StudyPaths(tmp_path), group_writable=True)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, 12345)
    else:
        monkeypatch.setattr(preflight.os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to another user"):
        check_writers(tmp_path, group_writable=False)


def data_folder(folder: Path, manifest: object) -> Path:
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    return folder


def test_prepared_data_is_taken_and_data_that_is_not_needed_may_be_left_out(tmp_path: Path) -> None:
    data = data_folder(tmp_path, {"splits": {"train": {"images": 3}, "tune_val": {"images": 1}}})
    check_data(data, needed=True)
    check_data(None, needed=False)


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ({"splits": {"train": {"images": 0}}}, "found no image in the split 'train'"),
        ({"splits": {}}, "found no image in the split 'train'"),
        ({"splits": {"train": {}}}, "found no counts of images in it (KeyError"),
        ({"splits": []}, "found no counts of images in it"),
        ([], "found no counts of images in it"),
        ("{truncated", "found no counts of images in it (JSONDecodeError"),
    ],
)
def test_a_manifest_without_images_is_refused(tmp_path: Path, manifest: object, expected: str) -> None:
    with pytest.raises(UserError) as error:
        check_data(data_folder(tmp_path, manifest), needed=True)
    assert expected in str(error.value)
    assert "python -m autospeed_model.prepare SOURCE OUT" in str(error.value)


def test_missing_data_is_told_apart_from_data_that_is_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data: found nothing, but the objective needs prepared data"):
        check_data(None, needed=True)
    with pytest.raises(UserError, match="found no such folder"):
        check_data(tmp_path / "nothing", needed=False)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="found a file"):
        check_data(tmp_path / "file", needed=False)
    with pytest.raises(UserError, match=r"found no manifest\.json"):
        check_data(tmp_path, needed=True)


def test_a_machine_without_slurm_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("sbatch", "sacct"):
        (tmp_path / name).touch(mode=0o755)
    with pytest.raises(UserError, match="--cluster site: found no srun on this machine; allowed: a login node"):
        check_slurm("site")
    (tmp_path / "srun").touch(mode=0o755)
    check_slurm("site")
