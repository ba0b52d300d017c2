import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from autospeed_model.labels import Geometry, LabelError, parse_label

CASES = Path(__file__).parent / "cases" / "openlane"
SAME_SIZE = Geometry(960, 1920)  # the cut alone: boxes move up by 320 rows
GOOD = {"x": 500, "y": 700, "width": 40, "height": 80, "id": "3", "type": 1}


def prepared(name: str, geometry: Geometry = SAME_SIZE) -> tuple[list[list[float]], list[str], Counter[str]]:
    boxes, odd = parse_label((CASES / f"{name}.json").read_bytes())
    counts: Counter[str] = Counter()
    return geometry.place(boxes, counts).tolist(), [kind for kind, _ in odd], +counts


def test_newest_keys_are_read():
    boxes, odd, _ = prepared("newest_key_results")
    assert boxes == [[1, 900, 280, 1020.5, 370.25], [3, 100, 290, 160, 340]]
    assert not odd


def test_older_keys_are_read():
    boxes, odd, _ = prepared("older_key_result_attribute")
    assert boxes == [[1, 900, 280, 1020.5, 370.25]]
    assert not odd


def test_a_frame_without_objects_has_no_boxes_and_is_not_odd():
    assert prepared("no_object") == ([], [], Counter())
    boxes, _ = parse_label((CASES / "no_object.json").read_bytes())
    assert SAME_SIZE.place(boxes, Counter()).shape == (0, 5)


def test_a_box_across_the_cut_keeps_its_visible_part():
    boxes, odd, counts = prepared("box_across_the_cut")
    assert boxes == [[2, 500, 0, 600, 180]]  # y 320 to 500 of the image
    assert not odd and counts == {"cut_short": 1}


def test_a_box_above_the_cut_is_dropped():
    assert prepared("box_above_the_cut") == ([], [], Counter(above_the_cut=1))


def test_a_box_beyond_the_border_is_clipped():
    boxes, odd, counts = prepared("box_beyond_the_border")
    assert boxes == [[3, 1850, 380, 1920, 530], [3, 0, 380, 60, 460]]
    assert not odd and counts == {"cut_short": 2}


def test_a_box_wholly_outside_is_dropped():
    counts: Counter[str] = Counter()
    boxes = np.array([[3, 1920, 700, 50, 50], [3, -60, 700, 60, 50], [3, 5, 1280, 9, 9]], dtype=float)
    assert len(SAME_SIZE.place(boxes, counts)) == 0
    assert counts["outside"] == 3


def test_a_box_of_zero_width_is_left_out_and_told():
    assert prepared("zero_width_box") == ([], ["box_without_area"], Counter())


def test_a_box_of_unknown_level_is_left_out_and_told():
    assert prepared("unknown_level") == ([], ["box_of_unknown_level"], Counter())


def test_a_truncated_file_is_no_label():
    with pytest.raises(LabelError, match="not JSON"):
        prepared("truncated")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"x": float("nan")}, "box_not_a_number"),
        ({"y": float("inf")}, "box_not_a_number"),
        ({"width": "wide"}, "box_not_a_number"),
        ({"width": "nan"}, "box_not_a_number"),
        ({"x": None}, "box_not_a_number"),
        ({"x": [1]}, "box_not_a_number"),
        ({"x": True}, "box_not_a_number"),
        ({"x": 10**400}, "box_not_a_number"),
        ({"x": ...}, "box_incomplete"),
        ({"height": ...}, "box_incomplete"),
        ({"id": ...}, "box_incomplete"),
        ({"id": None}, "box_incomplete"),
        ({"width": -5}, "box_without_area"),
        ({"height": 0}, "box_without_area"),
        ({"id": "0"}, "box_of_unknown_level"),
        ({"id": ""}, "box_of_unknown_level"),
        ({"id": 1.5}, "box_of_unknown_level"),
        ({"id": True}, "box_of_unknown_level"),
        ({"id": {"level": 1}}, "box_of_unknown_level"),
    ],
)
def test_a_broken_box_is_left_out_and_its_neighbour_kept(changes, kind):
    broken = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    boxes, odd = parse_label(json.dumps({"results": [broken, GOOD]}).encode())
    assert boxes.tolist() == [[3, 500, 700, 40, 80]]
    assert [found for found, _ in odd] == [kind]


@pytest.mark.parametrize("entry", [None, 3, "box", [1, 2, 3, 4]])
def test_an_entry_that_is_no_box_is_left_out(entry):
    boxes, odd = parse_label(json.dumps({"results": [entry]}).encode())
    assert boxes.shape == (0, 5) and [kind for kind, _ in odd] == ["box_incomplete"]


def test_numbers_as_text_are_read_and_told():
    boxes, odd = parse_label(json.dumps({"results": [GOOD | {"x": "500.5", "id": 2}]}).encode())
    assert boxes.tolist() == [[2, 500.5, 700, 40, 80]]
    assert [kind for kind, _ in odd] == ["box_number_as_text"]


def test_two_boxes_of_level_1_are_kept_and_told():
    boxes, odd = parse_label(json.dumps({"results": [GOOD | {"id": "1"}, GOOD | {"id": "1", "x": 9}]}).encode())
    assert len(boxes) == 2 and [kind for kind, _ in odd] == ["several_level_1"]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"{}", b'{"results": null}', b'{"results": {"x": 1}}', b"\xff\xfe\x00", b"[" * 100_000],
)
def test_what_is_no_label_is_refused(content):
    with pytest.raises(LabelError):
        parse_label(content)


def test_values_too_large_for_a_picture_are_clipped():
    boxes, _ = parse_label(json.dumps({"results": [GOOD | {"width": 1e308, "height": 1e308, "x": -1e300}]}).encode())
    assert SAME_SIZE.place(boxes, Counter()).tolist() == [[3, 0, 380, 1920, 960]]


def test_both_variants_scale_boxes_as_they_scale_images():
    box = np.array([[4, 960, 800, 192, 96]], dtype=float)
    scale = 1024 / 1920
    np.testing.assert_allclose(
        Geometry(512, 1024).place(box, Counter()), [[3, 512, 480 * scale, 1152 * scale, 576 * scale]], rtol=1e-6
    )
    # 640 x 320 pixels of picture, 160 rows of padding above and below
    np.testing.assert_allclose(Geometry(640, 640).place(box, Counter()), [[3, 320, 320, 384, 352]], rtol=1e-6)
