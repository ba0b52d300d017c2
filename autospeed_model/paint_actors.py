"""Painting vehicles and people: boxes in perspective with lit faces, windows, wheels and lamps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cv2
import numpy as np

from autospeed_model.scene import CYCLIST, PEDESTRIAN, Seen, project

Colour = tuple[float, float, float]  # blue, green, red
# From a distance in metres and a colour to the colour that reaches the camera. A channel of 255 marks a lit lamp.
Air = Callable[[float, Colour], Colour]
Quad = Sequence[tuple[float, float]]  # fractions of a face: across from its left edge, up from its lower edge

PAINTS: tuple[Colour, ...] = (
    (235, 235, 235), (200, 202, 205), (150, 152, 155), (95, 95, 98), (40, 40, 42), (30, 30, 32), (40, 40, 150),
    (120, 70, 40), (85, 90, 60), (150, 110, 60), (70, 110, 160), (60, 130, 190),
)  # fmt: skip
CLOTHES: tuple[Colour, ...] = (
    (60, 60, 160),
    (150, 90, 50),
    (60, 60, 60),
    (190, 190, 190),
    (70, 140, 90),
    (60, 150, 200),
    (110, 70, 110),
)
SKIN: tuple[Colour, ...] = ((140, 170, 215), (90, 120, 165), (60, 80, 115))
GLASS: Colour = (62, 52, 44)
# A face of a box as indices of its corners: lower left, lower right, upper right, upper left, seen from outside.
FACES = {"rear": (0, 1, 5, 4), "right": (1, 2, 6, 5), "front": (2, 3, 7, 6), "left": (3, 0, 4, 7), "top": (4, 5, 6, 7)}
LIGHT = {"rear": 0.8, "right": 0.95, "front": 0.78, "left": 0.62, "top": 1.12}


def fill(image: np.ndarray, points: np.ndarray, colour: Colour) -> None:
    """Fill a polygon, points (n, 2) in pixels, with smooth edges."""
    clipped = np.clip(points, -8000, 8000)
    cv2.fillConvexPoly(image, np.round(clipped * 16).astype(np.int32), colour, cv2.LINE_AA, 4)


def scaled(colour: Colour, factor: float) -> Colour:
    blue, green, red = (min(250.0, channel * factor) for channel in colour)
    return blue, green, red


class Box:
    """A block of a vehicle between corners (8, 3); its faces are painted only where they look at the camera."""

    def __init__(self, image: np.ndarray, corners: np.ndarray, air: Air) -> None:
        self.image, self.air = image, air
        self.pixels, self.distance = project(corners), float(corners[:, 2].min())

    def shows(self, face: str) -> bool:
        a, b, _, d = (self.pixels[index] for index in FACES[face])
        return bool((b[0] - a[0]) * (d[1] - a[1]) - (b[1] - a[1]) * (d[0] - a[0]) < 0)

    def paint(self, colour: Colour, faces: Sequence[str] = tuple(FACES)) -> None:
        for face in faces:
            if self.shows(face):
                shade = self.air(self.distance, scaled(colour, LIGHT[face]))
                fill(self.image, self.pixels[list(FACES[face])], shade)

    def decal(self, face: str, quad: Quad, colour: Colour) -> None:
        """Paint a polygon that lies on a face."""
        if self.shows(face):
            a, b, c, d = (self.pixels[index] for index in FACES[face])
            across, up = np.asarray(quad, dtype=float).T[..., None]
            points = (1 - up) * ((1 - across) * a + across * b) + up * ((1 - across) * d + across * c)
            fill(self.image, points, self.air(self.distance, colour))


def part(corners: np.ndarray, along: tuple[float, float], up: tuple[float, float], taper: float = 0.0) -> np.ndarray:
    """A block inside a vehicle's box: fractions of its length from the rear and its height; ``taper`` thins the top."""
    base, top = corners[:4], corners[4:]
    ends = []
    for share, height, inset in ((along, up[0], 0.0), (along, up[1], taper)):
        floor = base + height * (top - base)
        rear_left, rear_right, front_right, front_left = floor
        first, last = share[0] + inset * 0.9, share[1] - inset * 1.5
        edges = [
            rear_left + first * (front_left - rear_left),
            rear_right + first * (front_right - rear_right),
            rear_right + last * (front_right - rear_right),
            rear_left + last * (front_left - rear_left),
        ]
        middle = [
            (edges[0] + edges[1]) / 2,
            (edges[0] + edges[1]) / 2,
            (edges[2] + edges[3]) / 2,
            (edges[2] + edges[3]) / 2,
        ]
        ends += [edge + inset * (centre - edge) for edge, centre in zip(edges, middle, strict=True)]
    return np.array(ends)


def rectangle(x1: float, x2: float, y1: float, y2: float) -> Quad:
    return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]


def wheel(centre: float, half_width: float, half_height: float) -> Quad:
    turn = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    return [(centre + half_width * float(np.cos(a)), half_height + half_height * float(np.sin(a))) for a in turn]


def paint_actor(image: np.ndarray, seen: Seen, air: Air, night: bool, frame: int) -> None:
    """Paint one object on the BGR image; nearer ones must come after it."""
    rng = np.random.default_rng(seen.actor.look)
    if seen.actor.type in (PEDESTRIAN, CYCLIST):
        _person(image, seen, air, rng, frame)
    elif seen.actor.kind in ("car", "suv"):
        _car(image, seen, air, rng, night, frame)
    else:
        _tall(image, seen, air, rng, night, frame)


def _wheels(body: Box, length: float, height: float, radius: float, places: Sequence[float]) -> None:
    for face in ("left", "right"):
        for place in places:
            across = 1 - place if face == "left" else place
            body.decal(face, wheel(across, radius * 1.12 / length, radius * 1.1 / height), (18, 18, 18))
            hub = wheel(across, radius * 0.62 / length, radius * 0.75 / height)
            body.decal(face, [(x, y + radius * 0.35 / height) for x, y in hub], (120, 120, 122))
    for face in ("rear", "front"):
        for left in (0.05, 0.8):
            body.decal(face, rectangle(left, left + 0.15, 0.0, 0.22), (16, 16, 16))


def _signal(seen: Seen, frame: int) -> str | None:
    """The side, seen from behind, on which the turn signal of a vehicle that changes lanes is lit in this frame."""
    slide = float(seen.actor.slide[frame])
    if abs(slide) < 0.15 or frame // 4 % 2:
        return None
    return "right" if slide > 0 else "left"


def _lamps(body: Box, seen: Seen, frame: int, night: bool, low: float, high: float, braking: bool) -> None:
    red: Colour = (40, 40, 255) if night or braking else (35, 35, 165)
    white: Colour = (255, 255, 255) if night else (225, 230, 230)
    signal = _signal(seen, frame)
    for side, left in (("left", 0.03), ("right", 0.80)):
        amber: Colour = (30, 170, 255)
        lit = signal == side
        body.decal("rear", rectangle(left, left + 0.17, low, high), amber if lit else red)
        body.decal(
            "front",
            rectangle(0.80 if side == "left" else 0.03, 0.97 if side == "left" else 0.20, low, high),
            amber if lit else white,
        )
    body.decal("rear", rectangle(0.39, 0.61, low - 0.16, low - 0.04), (200, 205, 205))
    body.decal("front", rectangle(0.25, 0.75, low - 0.22, low - 0.03), (25, 25, 25))


def _car(image: np.ndarray, seen: Seen, air: Air, rng: np.random.Generator, night: bool, frame: int) -> None:
    length, _, height = seen.actor.size
    paint = PAINTS[rng.integers(len(PAINTS))]
    square = seen.actor.kind == "suv" or rng.random() < 0.4
    body = Box(image, part(seen.corners, (0.0, 1.0), (0.12, 0.62)), air)
    whole = Box(image, part(seen.corners, (0.0, 1.0), (0.0, 0.62)), air)
    cabin_span = (0.02, 0.70) if square else (0.12, 0.72)
    cabin = Box(image, part(seen.corners, cabin_span, (0.60, 1.0), 0.13), air)

    whole.paint((22, 22, 22), ("rear", "right", "front", "left"))
    body.paint(paint)
    for face in ("rear", "right", "front", "left"):  # the lower part of the body lies in its own shade
        body.decal(face, rectangle(0, 1, 0, 0.3), scaled(paint, 0.62 * LIGHT[face]))
        body.decal(face, rectangle(0, 1, 0.86, 1), scaled(paint, 1.12 * LIGHT[face]))
    _wheels(whole, length, 0.62 * height, 0.33, (0.19, 0.81))
    _lamps(body, seen, frame, night, 0.55, 0.82, bool(rng.random() < 0.3))
    cabin.paint(scaled(paint, 0.95))
    for face in ("rear", "front"):
        cabin.decal(face, rectangle(0.07, 0.93, 0.08, 0.88), GLASS)
        cabin.decal(face, [(0.1, 0.55), (0.9, 0.7), (0.9, 0.86), (0.1, 0.86)], (112, 98, 84))
    for face in ("left", "right"):
        for first, last in ((0.06, 0.47), (0.52, 0.94)):
            cabin.decal(face, rectangle(first, last, 0.1, 0.84), GLASS)
            cabin.decal(face, rectangle(first, last, 0.6, 0.84), (104, 92, 80))
        body.decal(face, rectangle(0.495, 0.503, 0.1, 0.95), scaled(paint, 0.4))


def _tall(image: np.ndarray, seen: Seen, air: Air, rng: np.random.Generator, night: bool, frame: int) -> None:
    """Vans, trucks and buses."""
    length, _, height = seen.actor.size
    kind = seen.actor.kind
    paint = PAINTS[rng.integers(len(PAINTS))] if kind == "truck" else PAINTS[rng.choice([0, 1, 3, 7, 9, 11])]
    chassis = Box(image, part(seen.corners, (0.0, 1.0), (0.0, 0.3)), air)
    chassis.paint((28, 28, 28), ("rear", "right", "front", "left"))
    blocks = [((0.0, 1.0), paint)]
    if kind == "truck":
        blocks = [((0.77, 1.0), PAINTS[rng.integers(len(PAINTS))]), ((0.0, 0.74), paint)]
    if seen.corners[0, 2] > seen.corners[2, 2]:  # it comes towards us: the cab is nearer
        blocks.reverse()
    for (first, last), colour in blocks:
        upper = Box(
            image, part(seen.corners, (first, last), (0.14, 0.86 if kind == "truck" and first > 0.5 else 1.0)), air
        )
        upper.paint(colour)
        for face in ("rear", "right", "front", "left"):
            upper.decal(face, rectangle(0, 1, 0, 0.12), scaled(colour, 0.6 * LIGHT[face]))
        cab = last == 1.0
        if cab:
            upper.decal("front", rectangle(0.06, 0.94, 0.45, 0.86), GLASS)
            upper.decal("front", [(0.1, 0.7), (0.9, 0.78), (0.9, 0.85), (0.1, 0.85)], (112, 98, 84))
        if kind == "bus":
            for face in ("left", "right"):
                for pane in range(6):
                    upper.decal(face, rectangle(0.03 + pane * 0.16, 0.165 + pane * 0.16, 0.45, 0.82), GLASS)
        elif cab:
            near = 0.05 if kind == "truck" else 0.02
            upper.decal("left", rectangle(near, 0.7 if kind == "truck" else 0.24, 0.5, 0.85), GLASS)
            upper.decal("right", rectangle(0.3 if kind == "truck" else 0.76, 1 - near, 0.5, 0.85), GLASS)
        if first == 0.0:
            if kind == "truck":
                upper.decal("rear", rectangle(0.49, 0.51, 0.05, 0.95), scaled(colour, 0.5))
                for face in ("left", "right"):
                    upper.decal(face, rectangle(0.15, 0.85, 0.4, 0.7), scaled(colour, 0.8 * LIGHT[face]))
            else:
                upper.decal("rear", rectangle(0.12, 0.88, 0.5, 0.88), GLASS)
    lamps = Box(image, part(seen.corners, (0.0, 1.0), (0.1, 0.42)), air)
    _lamps(lamps, seen, frame, night, 0.35, 0.7, bool(rng.random() < 0.3))
    _wheels(
        chassis,
        length,
        0.3 * height,
        0.34 if kind == "van" else 0.48,
        (0.15, 0.84) if kind == "van" else (0.12, 0.24, 0.86),
    )


def _person(image: np.ndarray, seen: Seen, air: Air, rng: np.random.Generator, frame: int) -> None:
    """A pedestrian in mid-step, or a cyclist on the wheel."""
    base, top = seen.corners[:4].mean(axis=0), seen.corners[4:].mean(axis=0)
    foot, head = project(base), project(top)
    height = float(foot[1] - head[1])
    shirt, trousers, skin = (
        CLOTHES[rng.integers(len(CLOTHES))],
        CLOTHES[rng.integers(len(CLOTHES))],
        SKIN[rng.integers(len(SKIN))],
    )
    distance = float(base[2])

    def at(across: float, up: float) -> np.ndarray:
        return np.array([foot[0] + across * height, foot[1] - up * height])

    def limb(start: tuple[float, float], end: tuple[float, float], width: float, colour: Colour) -> None:
        a, b = at(*start), at(*end)
        normal = np.array([b[1] - a[1], a[0] - b[0]])
        normal = normal / (np.linalg.norm(normal) + 1e-6) * width * height / 2
        fill(image, np.array([a - normal, a + normal, b + normal * 0.8, b - normal * 0.8]), air(distance, colour))

    swing = 0.13 * np.sin(frame * 0.9 + rng.uniform(0, 6)) * (1.0 if seen.actor.facing == 0 else 0.55)
    seat = 0.0
    if seen.actor.type == CYCLIST:
        seat, swing = 0.08, swing * 0.5
        limb((0.0, 0.0), (0.0, 0.38), 0.045, (20, 20, 20))
        limb((-0.17, 0.56), (0.17, 0.56), 0.03, (40, 40, 40))
        limb((-0.02, 0.42), (0.02, 0.46), 0.14, (20, 20, 20))
        fill(
            image,
            np.array([at(-0.02, 0.36), at(0.02, 0.36), at(0.02, 0.4), at(-0.02, 0.4)]),
            air(distance, (30, 30, 230)),
        )
    for side in (-1, 1):
        limb(
            (side * 0.055, 0.5),
            (side * 0.06 + side * swing, 0.02 + seat + max(0.0, side * swing) * 0.3),
            0.1,
            scaled(trousers, 0.75),
        )
        limb((side * 0.15, 0.8), (side * 0.17 - side * swing, 0.5), 0.07, scaled(shirt, 0.8))
    fill(image, np.array([at(-0.1, 0.47), at(0.1, 0.47), at(0.15, 0.83), at(-0.15, 0.83)]), air(distance, shirt))
    fill(
        image,
        np.array([at(0.02, 0.47), at(0.1, 0.47), at(0.15, 0.83), at(0.06, 0.83)]),
        air(distance, scaled(shirt, 0.78)),
    )
    centre = at(0.0, 0.92)
    axes = (max(1, round(0.055 * height * 16)), max(1, round(0.078 * height * 16)))
    position = (round(centre[0] * 16), round(centre[1] * 16))
    if abs(position[0]) < 100_000 and height > 4:
        cv2.ellipse(
            image,
            (position[0] // 16, position[1] // 16),
            (axes[0] // 16, axes[1] // 16),
            0,
            0,
            360,
            air(distance, skin),
            -1,
            cv2.LINE_AA,
        )
        cv2.ellipse(
            image,
            (position[0] // 16, position[1] // 16),
            (axes[0] // 16, axes[1] // 16),
            0,
            180,
            360,
            air(distance, (35, 40, 50)),
            -1,
            cv2.LINE_AA,
        )
