import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from autospeed_model import packing
from autospeed_model.errors import UserError
from autospeed_model.labels import Geometry
from autospeed_model.packed import SPLITS, PackedDataset
from autospeed_model.packing import prepare_image
from autospeed_model.preparation import split_of_segments
from autospeed_model.prepare import main

CASES = Path(__file__).parent / "cases" / "openlane"
SMALL = ["--height", "64", "--width", "128", "--jobs", "1"]
BOX = {"x": 960, "y": 800, "width": 192, "height": 96, "id": "1", "type": 1}


def picture(seed: int, size: tuple[int, int] = (1920, 1280)) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    _, encoded = cv2.imencode(".jpg", cv2.resize(coarse, size, interpolation=cv2.INTER_LINEAR))
    return encoded.tobytes()


PICTURES = [picture(seed) for seed in range(4)]


def segment(number: int) -> str:
    return f"segment-{number:04d}_0_000_20_000_with_camera_labels"


def image_path(source: Path, split: str, number: int, frame: int) -> Path:
    return source / "images" / split / segment(number) / f"{100 + frame}.jpg"


def label_path(source: Path, split: str, number: int, frame: int) -> Path:
    return source / "cipo" / split / segment(number) / f"{100 + frame}.jpg.json"


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_source(source: Path, training: int = 5, validation: int = 1, frames: int = 3) -> Path:
    for split, segments in (("training", training), ("validation", validation)):
        for number in range(segments):
            for frame in range(frames):
                write(image_path(source, split, number, frame), PICTURES[(number + frame) % len(PICTURES)])
                label = {"results": [BOX | {"x": 900 + 10 * number + frame}]}
                write(label_path(source, split, number, frame), json.dumps(label).encode())
    return source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / 'it\'s a "façade"')


def prepare(source: Path, out: Path, *options: str) -> PackedDataset:
    assert main([str(source), str(out), *SMALL, *options]) == 0
    return PackedDataset(out)


def odd(dataset: PackedDataset) -> dict[str, int]:
    return {kind: entry["count"] for kind, entry in dataset.manifest["odd"].items()}


def hashes(dataset: PackedDataset) -> dict[str, dict[str, str]]:
    return {name: dataset.manifest["splits"][name]["sha256"] for name in SPLITS}


def test_splits_by_segment_and_leaves_evaluation_alone(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")
    segments = {name: set(dataset.manifest["splits"][name]["segments"]) for name in SPLITS}
    assert len(segments["train"]) == 4 and len(segments["tune_val"]) == 1
    assert segments["train"] | segments["tune_val"] == {segment(number) for number in range(5)}
    assert [len(dataset.split(name)) for name in SPLITS] == [12, 3, 3]
    assert all(name.startswith("validation/") for name in dataset.split("evaluation").names)
    for name in SPLITS:
        dataset.verify(name)


def test_images_and_boxes_of_a_frame_stay_together(source, tmp_path):
    split = prepare(source, tmp_path / "out").split("train")
    for index, name in enumerate(split.names):
        _, of_segment, stamp = name.split("/")
        number, frame = int(of_segment[8:12]), int(stamp) - 100
        expected = prepare_image(PICTURES[(number + frame) % 4], Geometry(64, 128))
        np.testing.assert_array_equal(split.images[index], expected)
        x = (900 + 10 * number + frame) / 15
        np.testing.assert_allclose(split.boxes_of(index), [[1, x, 32, x + 12.8, 38.4]], rtol=1e-5)


def test_the_assignment_of_segments_follows_the_seed_alone():
    names = [segment(number) for number in range(50)]
    first = split_of_segments(names, 0)
    assert split_of_segments(list(reversed(names)), 0) == first
    assert split_of_segments(names, 1) != first
    assert list(first.values()).count("tune_val") == 10
    assert sorted(split_of_segments(names[:2], 0).values()) == ["train", "tune_val"]


def test_archives_folders_and_the_number_of_processes_make_no_difference(source, tmp_path):
    archives = tmp_path / "archives"
    archives.mkdir()
    with tarfile.open(archives / "images_training_0.tar", "w") as tar:
        tar.add(source / "images" / "training", arcname="training")
    with tarfile.open(archives / "images_validation_0.tar", "w") as tar:
        tar.add(source / "images" / "validation", arcname="validation")
    with zipfile.ZipFile(archives / "cipo.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        for path in sorted((source / "cipo").rglob("*.json")):
            zipped.write(path, arcname=str(path.relative_to(source)))
    one, two = prepare(source, tmp_path / "a"), prepare(archives, tmp_path / "b", "--jobs", "2")
    assert hashes(one) == hashes(two)


@pytest.mark.parametrize(("variant", "size"), [("autospeed", (640, 640)), ("autospeed-2", (512, 1024))])
def test_each_variant_has_its_size(tmp_path, variant, size):
    source = make_source(tmp_path / "in", training=2, validation=0, frames=1)
    out = tmp_path / "out"
    assert main([str(source), str(out), "--variant", variant, "--jobs", "1"]) == 0
    dataset = PackedDataset(out)
    assert dataset.manifest["variant"] == variant
    assert dataset.split("train").images.shape == (1, *size, 3)
    assert len(dataset.split("evaluation")) == 0


def test_the_picture_is_cut_scaled_and_centred():
    image = np.zeros((1280, 1920, 3), np.uint8)
    image[:320] = (0, 255, 0)
    image[320:, :960], image[320:, 960:] = (255, 0, 0), (0, 0, 255)  # in OpenCV's order: blue, then red
    result = prepare_image(cv2.imencode(".jpg", image)[1].tobytes(), Geometry(640, 640)).astype(int)
    assert (result[:160] == 114).all() and (result[480:] == 114).all()
    np.testing.assert_allclose(result[200:440, :310].mean(axis=(0, 1)), [0, 0, 255], atol=3)
    np.testing.assert_allclose(result[200:440, 330:].mean(axis=(0, 1)), [255, 0, 0], atol=3)
    assert result[160:480, :, 1].max() < 30  # nothing of what lies above the cut


@pytest.mark.parametrize("geometry", [Geometry(512, 1024), Geometry(640, 640), Geometry(64, 128)])
def test_decoding_at_a_reduced_size_gives_what_full_decoding_gives(geometry):
    data = picture(7)
    width, height = geometry.scaled
    full = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)[320:]
    expected = cv2.resize(full, (width, height), interpolation=cv2.INTER_AREA).astype(int)
    left, top = geometry.padding
    found = prepare_image(data, geometry)[top : top + height, left : left + width]
    assert np.abs(found - expected).mean() < 1.5


CASE_KINDS = {
    "zero_width_box": "box_without_area",
    "unknown_level": "box_of_unknown_level",
    "truncated": "label_unreadable",
}


@pytest.mark.parametrize("case", sorted(path.stem for path in CASES.glob("*.json")))
def test_every_case_is_prepared_and_told_and_refused_if_strict(source, tmp_path, capsys, case):
    shutil.copyfile(CASES / f"{case}.json", label_path(source, "training", 1, 0))
    dataset = prepare(source, tmp_path / "out")
    expected = {CASE_KINDS[case]: 1} if case in CASE_KINDS else {}
    assert odd(dataset) == expected
    images = sum(len(dataset.split(name)) for name in SPLITS)
    assert images == (17 if case == "truncated" else 18)
    for kind in expected:
        assert f"training/{segment(1)}/100" in capsys.readouterr().out
        assert dataset.manifest["odd"][kind]["first"][0].startswith(f"training/{segment(1)}/100")
    if expected:
        with pytest.raises(UserError, match=f"--strict.*\n.*{CASE_KINDS[case]}"):
            prepare(source, tmp_path / "strict", "--strict")
        assert not (tmp_path / "strict").exists()
    else:
        prepare(source, tmp_path / "strict", "--strict")


def break_image(kind: str, path: Path) -> None:
    data = path.read_bytes()
    if kind == "cut in half":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_bytes(b"<html>not found</html>")
    else:
        path.write_bytes(picture(0, (1280, 720)))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("cut in half", "image_unreadable"),
        ("empty", "image_unreadable"),
        ("text", "image_unreadable"),
        ("another size", "image_of_wrong_size"),
    ],
)
def test_an_image_that_cannot_be_used_is_left_out_and_told(source, tmp_path, kind, told):
    whole = prepare(source, tmp_path / "whole").split("train")
    name = whole.names[1]
    break_image(kind, image_path(source, "training", int(name.split("/")[1][8:12]), int(name[-3:]) - 100))
    dataset = prepare(source, tmp_path / "out")
    split = dataset.split("train")
    assert odd(dataset) == {told: 1} and name in dataset.manifest["odd"][told]["first"][0]
    kept = [row for row in range(len(whole)) if row != 1]
    assert split.names == [whole.names[row] for row in kept]
    np.testing.assert_array_equal(split.images, whole.images[kept])
    np.testing.assert_array_equal(split.boxes, whole.boxes[kept])
    dataset.verify("train")
    with pytest.raises(UserError, match=f"(?s)--strict.*{told}"):
        prepare(source, tmp_path / "strict", "--strict")


def test_gaps_close_over_several_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("autospeed_model.packed.HASH_IMAGES", 4)
    monkeypatch.setattr(packing, "HASH_IMAGES", 4)
    source = make_source(tmp_path / "in", training=3, frames=9)
    whole = prepare(source, tmp_path / "whole").split("train")
    broken = (3, 4, 9, 17)
    for row in broken:
        name = whole.names[row]
        break_image("empty", image_path(source, "training", int(name.split("/")[1][8:12]), int(name[-3:]) - 100))
    dataset = prepare(source, tmp_path / "out")
    kept = [row for row in range(len(whole)) if row not in broken]
    np.testing.assert_array_equal(dataset.split("train").images, whole.images[kept])
    dataset.verify("train")


def test_images_without_labels_and_labels_without_images_are_told(source, tmp_path):
    label_path(source, "training", 0, 0).unlink()
    image_path(source, "training", 0, 1).unlink()
    write(label_path(source, "training", 99, 0), b'{"results": []}')  # of a segment that is in another archive
    dataset = prepare(source, tmp_path / "out")
    assert odd(dataset) == {"image_without_label": 1, "label_without_image": 1}


def test_a_finished_dataset_is_not_made_again(source, tmp_path, capsys):
    out = tmp_path / "out"
    prepare(source, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    prepare(source, out)
    assert "already prepared" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize("change", ["input", "seed", "size"])
def test_a_dataset_of_something_else_is_replaced_only_if_asked(source, tmp_path, change):
    out = tmp_path / "out"
    prepare(source, out)
    before = (out / "manifest.json").read_bytes()
    options = {"input": (), "seed": ("--seed", "1"), "size": ("--height", "96")}[change]
    if change == "input":
        write(label_path(source, "training", 0, 0), b'{"results": []}')
    told = {"input": "other input files", "seed": "seed 0 instead of 1", "size": "height 64 instead of 96"}[change]
    with pytest.raises(UserError, match=f"{told}.*--overwrite"):
        prepare(source, out, *options)
    assert (out / "manifest.json").read_bytes() == before
    prepare(source, out, *options, "--overwrite").verify("train")
    assert (out / "manifest.json").read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".out.p")) == []


def test_a_folder_of_somebody_else_is_never_replaced(source, tmp_path):
    write(tmp_path / "out" / "thesis.txt", b"precious")
    with pytest.raises(UserError, match="not a prepared dataset"):
        prepare(source, tmp_path / "out", "--overwrite")
    assert (tmp_path / "out" / "thesis.txt").read_bytes() == b"precious"


def test_a_dry_run_writes_nothing(source, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main([str(source), str(tmp_path / "out"), *SMALL, "--dry-run"]) == 0
    assert "train: 12 images of 4 segments, 12 boxes" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_one_training_segment_is_too_few(tmp_path):
    with pytest.raises(UserError, match="at least 2 are needed"):
        prepare(make_source(tmp_path / "in", training=1), tmp_path / "out")


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"needs 0\.0 GB, 0\.0 GB are free"):
        prepare(source, tmp_path / "out")
    assert not list(tmp_path.glob(".out.partial*"))


def test_a_disk_that_fills_up_is_told_and_the_next_run_goes_on(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("autospeed_model.packed.HASH_IMAGES", 4)
    written = packing.write_piece
    calls = []

    def full(piece: packing.Piece) -> packing.Written:
        calls.append(piece)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return written(piece)

    monkeypatch.setattr("autospeed_model.preparation.write_piece", full)
    with pytest.raises(UserError, match=r"No space left.*run again"):
        prepare(source, tmp_path / "out")
    monkeypatch.setattr("autospeed_model.preparation.write_piece", written)
    capsys.readouterr()
    prepare(source, tmp_path / "out").verify("train")
    assert "8 images already there" in capsys.readouterr().out


def test_a_damaged_piece_of_an_earlier_run_is_written_again(source, tmp_path, monkeypatch):
    monkeypatch.setattr("autospeed_model.packed.HASH_IMAGES", 4)
    put_in_place = "autospeed_model.preparation.Preparation._put_in_place"
    with monkeypatch.context() as patch:
        patch.setattr(put_in_place, lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepare(source, tmp_path / "out")
    (building,) = tmp_path.glob(".out.partial-*")
    images = building / "train.images.npy"
    content = bytearray(images.read_bytes())
    content[-100:] = bytes(100)
    images.write_bytes(content)
    with (building / "progress.jsonl").open("a") as file:
        file.write('{"split": "train", "fir')  # as a process leaves it that is killed while it writes
    prepare(source, tmp_path / "out").verify("train")


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_hashes(tmp_path):
    source = make_source(tmp_path / "in", training=8, frames=24)
    expected = hashes(prepare(source, tmp_path / "expected"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "autospeed_model.prepare", str(source), str(out), *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while not any(path.stat().st_size for path in tmp_path.glob(".out.partial-*/progress.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "images already there from a run that did not end" in again.stdout
    assert hashes(PackedDataset(out)) == expected
    assert not list(tmp_path.glob(".out.partial-*"))


@pytest.mark.slow
def test_two_runs_at_once_do_no_harm(tmp_path):
    source = make_source(tmp_path / "in", training=6, frames=10)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "autospeed_model.prepare", str(source), str(out), *SMALL]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(3)]
    output = [run.communicate(timeout=400)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], output
    assert sorted("already prepared" in text for text in output) == [False, True, True]
    for name in SPLITS:
        PackedDataset(out).verify(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "out"], "missing: does not exist"),
        (["in", "out", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["in", "/proc/out"], "/proc/out: nothing can be made there"),
        (["in", "out", "--height", "100"], "--height 100: must be a multiple of 32"),
        (["in", "out", "--width", "32"], "--width 32: must be at least 64"),
    ],
)
def test_mistakes_end_with_code_2_and_no_traceback(tmp_path, arguments, message):
    make_source(tmp_path / "in", training=2, frames=1)
    command = [sys.executable, "-m", "autospeed_model.prepare", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_hashes_of_the_manifest_can_be_checked_by_hand(source, tmp_path):
    dataset = prepare(source, tmp_path / "out")
    split = dataset.split("train")
    piece = hashlib.sha256(split.images[:].tobytes()).hexdigest()  # all 12 images fit into one piece
    assert hashes(dataset)["train"]["images"] == hashlib.sha256(piece.encode()).hexdigest()
