import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from autospeed_model.errors import UserError
from autospeed_model.paint import Painter
from autospeed_model.render import Stretch, main, render_stretch, segment_name
from autospeed_model.scene import make_scene

ARGUMENTS = ["--segments", "2", "--validation-segments", "1", "--frames", "2", "--jobs", "2"]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("it's a façade") / "open lane"
    assert main([str(out), *ARGUMENTS, "--archives", str(out.parent / "archives")]) == 0
    return out


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_writes_the_layout_of_openlane(rendered):
    for split, segments in (("training", 2), ("validation", 1)):
        images = sorted((rendered / "images" / split).glob("segment-*/*.jpg"))
        labels = sorted((rendered / "cipo" / split).glob("segment-*/*.jpg.json"))
        assert len(images) == len(labels) == 2 * segments
        assert [path.parent.name + path.name + ".json" for path in images] == [p.parent.name + p.name for p in labels]
        assert len(list((rendered / "scene" / split).glob("segment-*.json"))) == segments
    assert len({path.name for path in rendered.glob("images/*/*")}) == 3


def test_images_have_the_size_of_openlane_and_of_its_files(rendered):
    paths = list(rendered.glob("images/*/*/*.jpg"))
    assert all(cv2.imread(str(path)).shape == (1280, 1920, 3) for path in paths)
    assert 90_000 < np.mean([path.stat().st_size for path in paths]) < 220_000


def test_labels_have_the_keys_of_openlane(rendered):
    for path in rendered.glob("cipo/*/*/*.json"):
        label = json.loads(path.read_text())
        split, segment = path.parts[-3:-1]
        assert label["raw_file_path"] == f"{split}/{segment}/images/{path.name.removesuffix('.json')}"
        for box in label["results"]:
            assert box["id"] in ("1", "2", "3", "4") and box["type"] in (1, 2, 4) and box["trackid"]
            assert box["width"] > 0 and box["height"] > 0


def test_the_same_arguments_give_the_same_files(rendered, tmp_path):
    main([str(tmp_path / "again"), *ARGUMENTS[:-1], "1"])
    assert files(tmp_path / "again") == files(rendered)


def test_a_frame_does_not_depend_on_where_a_process_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("autospeed_model.render.STRETCH", 3)
    render_stretch(Stretch(tmp_path / "a", "training", (0, 0, 0), 3, 0))
    render_stretch(Stretch(tmp_path / "b", "training", (0, 0, 0), 3, 2))
    last = sorted((tmp_path / "a" / "images" / "training" / segment_name((0, 0, 0))).iterdir())[-1]
    assert (tmp_path / "b" / last.relative_to(tmp_path / "a")).read_bytes() == last.read_bytes()


def test_what_was_made_is_told(tmp_path, capsys):
    main([str(tmp_path / "out"), "--segments", "1", "--validation-segments", "0", "--frames", "1", "--jobs", "1"])
    assert f"{tmp_path / 'out'}: 1 image of 1 segment in " in capsys.readouterr().out


def test_archives_hold_the_same_files(rendered):
    archives = rendered.parent / "archives"
    names = ["cipo.zip", "images_training_0.tar", "images_validation_0.tar", "scene.zip"]
    assert sorted(path.name for path in archives.iterdir()) == names
    with tarfile.open(archives / "images_training_0.tar") as archive:
        member = archive.getmembers()[0]
        assert archive.extractfile(member).read() == (rendered / member.name).read_bytes()
    with zipfile.ZipFile(archives / "cipo.zip") as zipped:
        assert len(zipped.namelist()) == 6
        assert zipped.read(zipped.namelist()[0]) == (rendered / zipped.namelist()[0]).read_bytes()


def test_a_second_run_does_nothing_and_other_arguments_are_refused(rendered, capsys):
    before = files(rendered)
    assert main([str(rendered), *ARGUMENTS]) == 0
    assert "already rendered" in capsys.readouterr().out
    with pytest.raises(UserError, match="--overwrite"):
        main([str(rendered), *ARGUMENTS, "--seed", "1"])
    assert files(rendered) == before
    assert not [path for path in rendered.parent.iterdir() if path.name.startswith(".")]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not a rendered folder"):
        main([str(tmp_path), *ARGUMENTS, "--overwrite"])
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("option", "value"), [("--segments", "0"), ("--frames", "0"), ("--jobs", "0"), ("--seed", "-1")]
)
def test_values_out_of_range_are_refused(tmp_path, option, value):
    with pytest.raises(UserError, match=f"{option} {value}: must be at least"):
        main([str(tmp_path / "out"), option, value])


@pytest.mark.parametrize("number", [0, 18, 20, 42])  # by day, in rain, in rain at night, in fog at night
def test_an_object_differs_from_the_empty_road_inside_its_box(number):
    scene = make_scene((0, 0, number), 9)
    painter = Painter(scene)
    image, seen = painter.paint(8)
    object.__setattr__(scene, "actors", ())
    empty, _ = painter.paint(8)
    difference = cv2.absdiff(image, empty).max(axis=2)
    for item in (item for item in seen if item.level in (1, 2)):
        x1, y1, x2, y2 = (max(0, round(value)) for value in item.box)
        assert difference[y1:y2, x1:x2].mean() > 10
    assert difference[:50].mean() < 2


@pytest.mark.parametrize(("seed", "place"), [((1, 0, 251), "suburb"), ((1, 0, 640), "rural")])
def test_a_segment_that_has_hardly_travelled_is_painted(seed, place):
    scene = make_scene(seed, 1)
    assert scene.place == place and scene.travelled[0] < 1
    image, _ = Painter(scene).paint(0)
    assert image.std() > 10


@pytest.mark.parametrize(("travelled", "slots"), [(0.5, [2**32 - 1, *range(16)]), (1.5, [*range(16)])])
def test_what_stands_in_a_slot_of_the_roadside_stays_the_same(monkeypatch, travelled, slots):
    """A renderer that drew these numbers otherwise would give other pictures for the same arguments."""
    painter = Painter(replace(make_scene((1, 0, 251), 1), travelled=np.array([travelled])))
    make, seeds = np.random.default_rng, []
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or make(seed))
    painter.paint(0)
    used = {seed[3:] for seed in seeds if isinstance(seed, tuple) and seed[:4] == (1, 0, 251, 2)}
    assert used == {(2, slot, side) for slot in slots for side in (0, 2)}
