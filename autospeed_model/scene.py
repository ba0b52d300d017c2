"""Traffic on a curved road, and the level of each object that follows from its place relative to the ego path.

Axes: ``u`` metres to the right of the ego path, measured across it; ``z`` metres ahead of the camera along it; the path
itself bends away from the camera's axis by ``bend(z)``. A segment is simulated at 10 frames/s, everything in it follows
from one random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

WIDTH, HEIGHT = 1920, 1280
FOCAL, CENTRE, HORIZON = 2000.0, 960.0, 600.0  # pixels
CAMERA_HEIGHT = 2.0  # metres
FRAME_TIME = 0.1  # seconds
LANE = 3.6  # metres
PATH_HALF_WIDTH = 1.5  # metres
FARTHEST = 110.0  # metres, objects beyond are neither drawn nor labelled
NEAR = 1.2  # metres, the near plane
VEHICLE, PEDESTRIAN, CYCLIST = 1, 2, 4  # OpenLane's types

# kind: OpenLane's type, then ranges of length, width and height in metres
KINDS: dict[str, tuple[int, tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "car": (VEHICLE, (4.1, 4.8), (1.75, 1.9), (1.4, 1.52)),
    "suv": (VEHICLE, (4.4, 5.0), (1.85, 2.0), (1.65, 1.85)),
    "van": (VEHICLE, (4.9, 6.0), (1.95, 2.1), (2.1, 2.6)),
    "truck": (VEHICLE, (7.5, 11.0), (2.3, 2.5), (3.0, 3.8)),
    "bus": (VEHICLE, (10.5, 12.0), (2.45, 2.55), (3.0, 3.3)),
    "cyclist": (CYCLIST, (1.7, 1.8), (0.55, 0.65), (1.65, 1.8)),
    "pedestrian": (PEDESTRIAN, (0.35, 0.45), (0.5, 0.65), (1.55, 1.9)),
}
VEHICLE_KINDS, VEHICLE_SHARES = ("car", "suv", "van", "truck", "bus"), (0.5, 0.25, 0.1, 0.1, 0.05)
# kilometres per hour of the ego vehicle, radius of the tightest bend in metres
PLACES = {
    "urban": ((18, 45), 220.0),
    "suburb": ((30, 60), 260.0),
    "rural": ((50, 90), 450.0),
    "highway": ((80, 120), 900.0),
}


@dataclass(frozen=True)
class Actor:
    """One moving or parked object. ``u``, ``z`` and ``slide`` hold one value a frame: place of the centre in metres and
    lateral speed in m/s. ``facing`` is 1 for the ego's direction of travel, -1 for the opposite, 0 for across."""

    kind: str
    size: tuple[float, float, float]
    u: np.ndarray
    z: np.ndarray
    slide: np.ndarray
    facing: int
    look: int

    @property
    def type(self) -> int:
        return KINDS[self.kind][0]


@dataclass(frozen=True)
class Road:
    """Lane centres in metres to the right of the ego path; ``left`` and ``right`` are the edges of the asphalt."""

    lanes: tuple[float, ...]
    oncoming: tuple[float, ...]
    left: float
    right: float


@dataclass(frozen=True)
class Scene:
    """A segment before it is painted. ``curvature`` (1/m), ``drift`` and ``travelled`` (m) hold one value a frame."""

    place: str
    weather: str
    night: bool
    road: Road
    speed: float  # of the ego vehicle, m/s
    curvature: np.ndarray
    drift: np.ndarray
    travelled: np.ndarray
    actors: tuple[Actor, ...]
    seed: tuple[int, ...]

    def bend(self, frame: int, z: np.ndarray) -> np.ndarray:
        """Metres by which the ego path lies right of the camera's axis, ``z`` metres ahead."""
        near = np.minimum(z, 150.0)  # straight on from there: a parabola would leave the picture
        return np.asarray(self.curvature[frame] * near * (z - 0.5 * near) - self.drift[frame])


@dataclass(frozen=True)
class Seen:
    """An object of one frame: its CIPO level, its box (x1, y1, x2, y2) in pixels and its corners (8, 3) in metres."""

    number: int
    actor: Actor
    level: int
    box: tuple[float, float, float, float]
    corners: np.ndarray
    distance: float


def make_scene(seed: tuple[int, ...], frames: int) -> Scene:
    """Simulate one segment. The same ``seed`` gives the same segment, and a longer one begins in another way."""
    rng = np.random.default_rng(seed)
    place = str(rng.choice(list(PLACES), p=[0.4, 0.25, 0.15, 0.2]))
    weather = str(rng.choice(["clear", "cloudy", "rain", "fog"], p=[0.4, 0.3, 0.18, 0.12]))
    night = bool(rng.random() < 0.2)
    (slow, fast), radius = PLACES[place]
    speed = rng.uniform(slow, fast) / 3.6
    time = np.arange(frames) * FRAME_TIME
    swing = rng.uniform(0.05, 0.25)
    curvature = (rng.uniform(-0.75, 0.75) + 0.25 * np.sin(swing * time + rng.uniform(0, 6))) / radius
    drift = 0.2 * np.sin(rng.uniform(0.2, 0.6) * time + rng.uniform(0, 6))
    road = _road(rng, place)
    actors = _remove_collisions(_traffic(rng, place, road, speed, time), len(time))
    return Scene(place, weather, night, road, speed, curvature, drift, speed * time + rng.uniform(0, 500), actors, seed)


def _road(rng: np.random.Generator, place: str) -> Road:
    most = {"urban": 2, "suburb": 2, "rural": 1, "highway": 4}[place]
    count = int(rng.integers(max(1, most - 1), most + 1))
    ego = int(rng.integers(count))  # 0 is the leftmost lane
    lanes = tuple(LANE * (lane - ego) for lane in range(count))
    gap = 3.0 if place == "highway" else 0.0
    oncoming = tuple(lanes[0] - gap - LANE * (lane + 1) for lane in range(count))
    verge = 0.5 if place == "rural" else 2.6  # parked cars, or a hard shoulder
    return Road(lanes, oncoming, oncoming[-1] - LANE / 2 - verge, lanes[-1] + LANE / 2 + verge)


def _traffic(rng: np.random.Generator, place: str, road: Road, speed: float, time: np.ndarray) -> list[Actor]:
    actors = []
    for lane in (*road.lanes, *road.oncoming):
        facing = -1 if lane in road.oncoming else 1
        other = speed * rng.uniform(0.8, 1.1) if facing == 1 else -speed * rng.uniform(0.7, 1.2)
        relative = other - speed
        if lane == 0.0:
            relative = rng.uniform(-1.0, 1.0)
        gap = rng.uniform(14, 55) if facing == 1 else rng.uniform(22, 80)
        z = rng.uniform(-4, 25)
        if lane == 0.0:
            z = rng.uniform(7, 40) if rng.random() < 0.65 else FARTHEST + 10
        end = FARTHEST + max(0.0, -relative) * time[-1]
        while z < end:
            actors.append(_vehicle(rng, lane, z, relative, facing, time))
            z += gap * rng.uniform(0.7, 1.6) + 8
    actors = [_change_lane(rng, road, actor, time) for actor in actors]
    reach = FARTHEST + speed * time[-1]
    if place in ("urban", "suburb"):
        for side, facing in ((road.right - 1.3, 1), (road.left + 1.3, -1)):
            for z in np.arange(rng.uniform(0, 20), reach, 7.5):
                if rng.random() < 0.3:
                    actors.append(_vehicle(rng, side + rng.uniform(-0.1, 0.1), z, -speed, facing, time, parked=True))
        actors += _people(rng, road, speed, time, reach)
    return actors


def _vehicle(
    rng: np.random.Generator, u: float, z: float, relative: float, facing: int, time: np.ndarray, parked: bool = False
) -> Actor:
    kind = str(rng.choice(VEHICLE_KINDS[:3])) if parked else str(rng.choice(VEHICLE_KINDS, p=VEHICLE_SHARES))
    sway = 0.0 if parked else 0.18
    rate = rng.uniform(0.2, 0.6)
    wander = sway * np.sin(rate * time + rng.uniform(0, 6))
    surge = 0.0 if parked else rng.uniform(0, 1.2)
    along = z + relative * time + surge * np.sin(0.5 * time + rng.uniform(0, 6))
    return _actor(rng, kind, u + wander, along, np.zeros_like(time), facing)


def _actor(rng: np.random.Generator, kind: str, u: np.ndarray, z: np.ndarray, slide: np.ndarray, facing: int) -> Actor:
    length, width, height = (float(rng.uniform(*span)) for span in KINDS[kind][1:])
    return Actor(kind, (length, width, height), u, z + length / 2, slide, facing, int(rng.integers(1 << 30)))


def _change_lane(rng: np.random.Generator, road: Road, actor: Actor, time: np.ndarray) -> Actor:
    """Let some vehicles of the neighbouring lanes cut in, and some of the ego lane cut out."""
    lane = float(actor.u[0] - (actor.u[0] - round(actor.u[0] / LANE) * LANE))
    targets = [0.0] if abs(abs(lane) - LANE) < 0.1 else [u for u in road.lanes if abs(abs(u) - LANE) < 0.1]
    near = actor.z.min() > 5 and actor.z[0] < 60
    if actor.facing != 1 or abs(lane) > LANE + 0.1 or not targets or not near or rng.random() > 0.8:
        return actor
    target, duration = float(rng.choice(targets)), rng.uniform(3.0, 5.0)
    begin = rng.uniform(-0.5 * duration, max(time[-1] - 0.3 * duration, 0.0))
    progress = np.clip((time - begin) / duration, 0, 1)
    smooth = progress**2 * (3 - 2 * progress)
    slide = (target - lane) * 6 * progress * (1 - progress) / duration
    return replace(actor, u=actor.u + (target - lane) * smooth, slide=slide)


def _people(rng: np.random.Generator, road: Road, speed: float, time: np.ndarray, reach: float) -> list[Actor]:
    people = []
    for side in (road.right + 1.6, road.left - 1.6):
        for z in np.arange(rng.uniform(2, 12), reach, 9.0):
            if rng.random() < 0.5:
                facing = int(rng.choice([-1, 1]))
                walk = z + (facing * rng.uniform(0.9, 1.6) - speed) * time
                people.append(
                    _actor(rng, "pedestrian", side + rng.uniform(-0.8, 0.8) + 0 * time, walk, 0 * time, facing)
                )
    if rng.random() < 0.45:  # somebody crosses
        pace = float(rng.choice([-1, 1])) * rng.uniform(1.0, 1.7)
        across = -pace * rng.uniform(0, time[-1] + 1) + pace * time
        ahead = rng.uniform(14, 40) + speed * time[-1] * rng.uniform(0.2, 1.0) - speed * time
        people.append(_actor(rng, "pedestrian", across, ahead, pace + 0 * time, 0))
    for z in np.arange(rng.uniform(5, 40), reach, 30.0):
        if rng.random() < 0.35:
            u = road.right - (rng.uniform(2.8, 3.0) if road.lanes[-1] > 0 else 1.0) + 0 * time
            people.append(_actor(rng, "cyclist", u, z + (rng.uniform(3.5, 6) - speed) * time, 0 * time, 1))
    return people


def _remove_collisions(actors: Sequence[Actor], frames: int) -> tuple[Actor, ...]:
    """Leave out every actor that would run into an earlier one. Lane changers come last: they give way."""
    kept: list[Actor] = []
    for actor in sorted(actors, key=lambda actor: bool(np.any(actor.slide))):
        for other in kept:
            along = np.abs(actor.z - other.z) < (actor.size[0] + other.size[0]) / 2 + 1.0
            across = np.abs(actor.u - other.u) < (actor.size[1] + other.size[1]) / 2 + 0.2
            if np.any(along & across):
                break
        else:
            kept.append(actor)
    return tuple(kept)


def project(points: np.ndarray) -> np.ndarray:
    """Points (..., 3) in metres (right, up from the ground, ahead) to pixels (..., 2). Those behind the near plane are
    brought onto it."""
    depth = np.maximum(points[..., 2], NEAR)
    x = CENTRE + FOCAL * points[..., 0] / depth
    y = HORIZON + FOCAL * (CAMERA_HEIGHT - points[..., 1]) / depth
    return np.stack([x, y], axis=-1)


def corners_of(scene: Scene, actor: Actor, frame: int) -> np.ndarray:
    """The corners (8, 3) of the actor's box in metres: bottom then top, each rear left, rear right, front right, front
    left, as seen by its driver."""
    length, width, height = actor.size
    z = actor.z[frame]
    yaw = scene.curvature[frame] * z
    if actor.facing == 0:
        yaw += np.pi / 2 * np.sign(actor.slide[frame] or 1.0)
    else:
        yaw += actor.slide[frame] / max(scene.speed, 4.0) + (np.pi if actor.facing == -1 else 0.0)
    side = np.array([-1, 1, 1, -1]) * width / 2
    along = np.array([-1, -1, 1, 1]) * length / 2
    x = scene.bend(frame, z) + actor.u[frame] + side * np.cos(yaw) + along * np.sin(yaw)
    depth = z - side * np.sin(yaw) + along * np.cos(yaw)
    base = np.stack([x, np.zeros(4), depth], axis=1)
    return np.concatenate([base, base + np.array((0.0, height, 0.0))])


def look_at(scene: Scene, frame: int) -> list[Seen]:
    """The visible objects of a frame, nearest first, with their levels.

    Level 1 is the nearest object that lies at least three quarters inside the ego path, 2 are those that overlap its
    border, 3 those near by in the same direction of travel, 4 all others.
    """
    found = []
    for number, actor in enumerate(scene.actors):
        if not 2.5 < actor.z[frame] - actor.size[0] / 2 < FARTHEST:
            continue
        corners = corners_of(scene, actor, frame)
        pixels = project(corners)
        (x1, y1), (x2, y2) = pixels.min(axis=0), pixels.max(axis=0)
        shown = (min(x2, WIDTH) - max(x1, 0)) / (x2 - x1)
        if shown > 0.15 and y2 - y1 > 14 and x2 - x1 > 5:
            box = (float(x1), float(y1), float(x2), float(y2))
            found.append(Seen(number, actor, 4, box, corners, float(corners[:, 2].min())))
    found.sort(key=lambda seen: seen.distance)
    shares = _visible_shares([seen.box for seen in found])
    visible = [seen for seen, share in zip(found, shares, strict=True) if share > 0.4]
    taken = False
    levels = []
    for seen in visible:
        level = _level(seen, frame, taken)
        taken = taken or level == 1
        levels.append(replace(seen, level=level))
    return levels


def _level(seen: Seen, frame: int, taken: bool) -> int:
    u, half = float(seen.actor.u[frame]), seen.actor.size[1] / 2
    inside = max(0.0, min(u + half, PATH_HALF_WIDTH) - max(u - half, -PATH_HALF_WIDTH)) / (2 * half)
    if inside >= 0.75:
        return 3 if taken else 1
    if inside > 0.0 and seen.distance < 60:
        return 2
    return 3 if seen.actor.facing == 1 and abs(u) < 1.5 * LANE and seen.distance < 25 else 4


def _visible_shares(boxes: Sequence[tuple[float, float, float, float]], cell: int = 8) -> list[float]:
    """Share of each box inside the image that no earlier (nearer) box covers, on a coarse grid."""
    covered = np.zeros((HEIGHT // cell, WIDTH // cell), dtype=bool)
    shares = []
    for x1, y1, x2, y2 in boxes:
        rows = slice(int(np.clip(y1 // cell, 0, covered.shape[0] - 1)), int(max(y2 // cell, 0)) + 1)
        columns = slice(int(np.clip(x1 // cell, 0, covered.shape[1] - 1)), int(max(x2 // cell, 0)) + 1)
        window = covered[rows, columns]
        shares.append(1.0 - float(window.mean()))
        window[:] = True
    return shares
