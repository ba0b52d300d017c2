from collections import Counter

import numpy as np
import pytest

from autospeed_model.scene import FOCAL, HEIGHT, PATH_HALF_WIDTH, WIDTH, look_at, make_scene, project


@pytest.fixture(scope="module")
def frames():
    """Every tenth frame of 40 segments: (scene, frame, what is seen)."""
    scenes = [make_scene((0, 0, number), 40) for number in range(40)]
    return [(scene, frame, look_at(scene, frame)) for scene in scenes for frame in range(0, 40, 10)]


def test_the_same_seed_gives_the_same_scene_and_another_one_does_not():
    first, second, other = make_scene((3, 0, 1), 20), make_scene((3, 0, 1), 20), make_scene((3, 0, 2), 20)
    assert look_at(first, 7)[0].box == look_at(second, 7)[0].box
    assert not np.array_equal(first.curvature, other.curvature)


def test_level_1_occurs_at_most_once_and_is_the_nearest_inside_the_path(frames):
    for _, frame, seen in frames:
        inside = [
            item
            for item in seen
            if abs(item.actor.u[frame]) + item.actor.size[1] / 2 <= PATH_HALF_WIDTH  # wholly inside: no doubt
        ]
        first = [item for item in seen if item.level == 1]
        assert len(first) <= 1
        if inside:
            assert first and first[0].distance <= inside[0].distance


def test_level_2_overlaps_the_border_of_the_path(frames):
    for _, frame, seen in frames:
        for item in seen:
            if item.level == 2:
                u, half = abs(item.actor.u[frame]), item.actor.size[1] / 2
                assert u - half < PATH_HALF_WIDTH < u + half


def test_every_level_occurs_and_most_are_4(frames):
    levels = Counter(item.level for _, _, seen in frames for item in seen)
    assert set(levels) == {1, 2, 3, 4}
    assert levels[4] > sum(levels.values()) / 2
    with_level = {level: sum(any(i.level == level for i in seen) for _, _, seen in frames) for level in (1, 2)}
    assert 0.4 < with_level[1] / len(frames) < 0.9
    assert 0.05 < with_level[2] / len(frames) < 0.4


def test_boxes_enclose_the_projected_corners_and_reach_into_the_image(frames):
    for _, _, seen in frames:
        for item in seen:
            x1, y1, x2, y2 = item.box
            assert x1 < WIDTH and x2 > 0 and y1 < HEIGHT and y2 > y1
            pixels = project(item.corners)
            assert pixels[:, 0].min() == pytest.approx(x1) and pixels[:, 1].max() == pytest.approx(y2)


def test_what_is_twice_as_far_looks_half_as_wide():
    near, far = (project(np.array([[0, 0, z], [2.0, 0, z]])) for z in (10.0, 20.0))
    assert near[1, 0] - near[0, 0] == pytest.approx(FOCAL * 2 / 10)
    assert near[1, 0] - near[0, 0] == pytest.approx(2 * (far[1, 0] - far[0, 0]))


def test_actors_never_run_into_each_other():
    for number in range(10):
        actors = make_scene((1, 0, number), 40).actors
        for index, actor in enumerate(actors):
            for other in actors[:index]:
                along = np.abs(actor.z - other.z) < (actor.size[0] + other.size[0]) / 2
                across = np.abs(actor.u - other.u) < (actor.size[1] + other.size[1]) / 2
                assert not np.any(along & across)
