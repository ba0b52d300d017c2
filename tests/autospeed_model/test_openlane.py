import io
import os
import tarfile
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from autospeed_model.errors import UserError
from autospeed_model.odd import Report
from autospeed_model.openlane import DamagedError, Key, jpeg_size, read, take_inventory

SEGMENT = "segment-1_0_000_20_000_with_camera_labels"
KEY = Key("training", SEGMENT, "100")
IMAGE, LABEL = b"the image", b'{"results": []}' * 30


def put(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def put_zip(path: Path, files: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def contents(source: Path) -> tuple[dict[Key, bytes], dict[Key, bytes], Report]:
    report = Report()
    found = take_inventory(source, report)
    images = {key: read(member) for key, member in found.images.items()}
    return images, {key: read(member) for key, member in found.labels.items()}, report


LAYOUTS = {
    "unpacked": (f"images/training/{SEGMENT}/100.jpg", f"cipo/training/{SEGMENT}/100.jpg.json"),
    "below another folder": (f"a b/OpenLane/images/training/{SEGMENT}/100.jpg", f"x/cipo/training/{SEGMENT}/100.json"),
    "nasty names": (f'it\'s "ça"/images/training/{SEGMENT}/100.jpg', f'it\'s "ça"/cipo/training/{SEGMENT}/100.json'),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpacked_folders_are_read(tmp_path, layout):
    for name, content in zip(LAYOUTS[layout], (IMAGE, LABEL), strict=True):
        put(tmp_path / name, content)
    images, labels, report = contents(tmp_path)
    assert images == {KEY: IMAGE} and labels == {KEY: LABEL} and not report


@pytest.mark.parametrize("prefix", ["", "images/training/", "training/", "./training/"])
@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_are_read_whatever_their_members_begin_with(tmp_path, prefix, how):
    put_tar(tmp_path / "images_training_0.tar", {f"{prefix}{SEGMENT}/100.jpg": IMAGE})
    put_zip(tmp_path / "cipo.zip", {f"cipo/training/{SEGMENT}/100.jpg.json": LABEL}, how)
    images, labels, report = contents(tmp_path)
    assert images == {KEY: IMAGE} and labels == {KEY: LABEL} and not report


def test_archives_and_folders_mix(tmp_path):
    put_zip(tmp_path / "images_training_0.zip", {f"training/{SEGMENT}/100.jpg": IMAGE})
    put_tar(tmp_path / "sub" / "cipo.tar", {f"training/{SEGMENT}/100.jpg.json": LABEL})
    put(tmp_path / f"images/validation/{SEGMENT}/7.jpg", b"other")
    images, labels, _ = contents(tmp_path)
    assert images == {KEY: IMAGE, Key("validation", SEGMENT, "7"): b"other"} and labels == {KEY: LABEL}


def test_labels_of_other_kinds_and_hidden_files_are_not_taken(tmp_path):
    put(tmp_path / f"images/training/{SEGMENT}/100.jpg", IMAGE)
    put(tmp_path / f"images/training/{SEGMENT}/._100.jpg", b"of a Macintosh")
    put(tmp_path / f"cipo/training/{SEGMENT}/100.jpg.json", LABEL)
    put(tmp_path / f"lane3d_1000/training/{SEGMENT}/100.json", b"lanes")
    images, labels, report = contents(tmp_path)
    assert images == {KEY: IMAGE} and labels == {KEY: LABEL} and not report


def test_a_frame_found_twice_is_told_and_the_first_is_used(tmp_path):
    put_tar(tmp_path / "images_training_0.tar", {f"training/{SEGMENT}/100.jpg": IMAGE})
    put(tmp_path / f"images_training_1/training/{SEGMENT}/100.jpg", b"again")
    put(tmp_path / f"cipo/training/{SEGMENT}/100.json", LABEL)
    images, _, report = contents(tmp_path)
    assert images == {KEY: IMAGE} and report.counts == {"duplicate": 1}


def test_a_link_that_leads_nowhere_and_a_pipe_are_left_out_and_told(tmp_path):
    for name, content in zip(LAYOUTS["unpacked"], (IMAGE, LABEL), strict=True):
        put(tmp_path / name, content)
    folder = tmp_path / "images" / "training" / SEGMENT
    (folder / "200.jpg").symlink_to(tmp_path / "gone.jpg")
    os.mkfifo(folder / "300.jpg")
    images, _, report = contents(tmp_path)
    assert images == {KEY: IMAGE} and dict(report.counts) == {"no_file": 2}


def test_a_folder_that_links_to_itself_is_walked_once(tmp_path):
    put(tmp_path / f"images/training/{SEGMENT}/100.jpg", IMAGE)
    put(tmp_path / f"cipo/training/{SEGMENT}/100.json", LABEL)
    (tmp_path / "images" / "loop").symlink_to(tmp_path)
    assert not contents(tmp_path)[2]


def test_a_truncated_tar_gives_its_whole_files_and_is_told(tmp_path):
    path = tmp_path / "images_training_0.tar"
    put_tar(path, {f"training/{SEGMENT}/{number}.jpg": bytes(5000) for number in range(100, 104)})
    put(tmp_path / f"cipo/training/{SEGMENT}/100.json", LABEL)
    path.write_bytes(path.read_bytes()[:14000])
    images, _, report = contents(tmp_path)
    assert [key.timestamp for key in images] == ["100", "101"]
    assert report.counts == {"archive_truncated": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("images_training_0.tar", b"<html>404</html>" * 100, "not a tar archive"),
        ("cipo.zip", b"PK\x03\x04 half of it", "truncated or not a zip"),
        ("images_training_0.tar.gz", b"", "compressed archives cannot be read in pieces"),
    ],
)
def test_what_only_calls_itself_an_archive_is_refused(tmp_path, name, content, message):
    put(tmp_path / name, content)
    with pytest.raises(UserError, match=message):
        take_inventory(tmp_path, Report())


def test_damage_inside_a_zip_is_found(tmp_path):
    path = tmp_path / "images_training_0.zip"
    put_zip(path, {f"training/{SEGMENT}/100.jpg": bytes(range(256))}, zipfile.ZIP_STORED)
    put(tmp_path / f"cipo/training/{SEGMENT}/100.json", LABEL)
    content = bytearray(path.read_bytes())
    content[150] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="checksum"):
        contents(tmp_path)


def test_a_source_that_is_not_openlane_is_refused_with_what_was_found(tmp_path):
    put(tmp_path / "holiday.png"), put(tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"(?s)no image and no cipo label.*1 \.png, 1 \.txt.*images_training_0\.tar"):
        take_inventory(tmp_path, Report())
    put(tmp_path / f"images/training/{SEGMENT}/100.jpg")
    with pytest.raises(UserError, match=r"no cipo label of OpenLane; found 1 images and 0 labels"):
        take_inventory(tmp_path, Report())


def test_a_missing_source_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        take_inventory(tmp_path / "nowhere", Report())
    with pytest.raises(UserError, match="is a file"):
        take_inventory(put(tmp_path / "cipo.zip"), Report())


def test_the_fingerprint_changes_with_the_files_and_only_then(tmp_path):
    put(tmp_path / f"images/training/{SEGMENT}/100.jpg", IMAGE)
    label = put(tmp_path / f"cipo/training/{SEGMENT}/100.json", LABEL)
    first = take_inventory(tmp_path, Report()).fingerprint
    put(tmp_path / "unrelated.txt")
    assert take_inventory(tmp_path, Report()).fingerprint == first
    label.write_bytes(LABEL + b" ")
    assert take_inventory(tmp_path, Report()).fingerprint != first


def test_the_size_of_a_jpeg_is_read_from_its_header():
    _, encoded = cv2.imencode(".jpg", np.zeros((48, 80, 3), np.uint8))
    data = encoded.tobytes()
    assert jpeg_size(data) == (80, 48)
    assert jpeg_size(data + bytes(100)) == (80, 48)  # padding after the end does no harm
    for broken, message in ((data[:-20], "truncated"), (b"GIF89a" + data, "not a JPEG"), (b"", "not a JPEG")):
        with pytest.raises(DamagedError, match=message):
            jpeg_size(broken)
    with pytest.raises(DamagedError, match="no JPEG frame header"):
        jpeg_size(b"\xff\xd8" + bytes(30) + b"\xff\xd9")
