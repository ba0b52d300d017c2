"""Painting a scene: sky, ground in perspective, roadside, traffic, then light, weather and the camera's noise."""

from __future__ import annotations

import math

import cv2
import numpy as np

from autospeed_model.paint_actors import Box, Colour, fill, paint_actor, rectangle, scaled
from autospeed_model.scene import (
    CAMERA_HEIGHT,
    CENTRE,
    FARTHEST,
    FOCAL,
    HEIGHT,
    HORIZON,
    LANE,
    WIDTH,
    Scene,
    Seen,
    look_at,
    project,
)

ACROSS, ALONG = 0.05, 0.1  # metres of ground per texel
PERIOD = 48.0  # metres after which the ground repeats; lane dashes fit into it
SIDE = 32.0  # metres of ground to either side of the ego path
# Ground farther than this (metres) is taken from a texture blurred over so many texels along the road: one row of
# pixels covers z**2 / (FOCAL * CAMERA_HEIGHT) metres there.
BANDS = ((0.0, 1), (20.0, 3), (40.0, 9), (70.0, 25), (110.0, 97))
GLOW = 4  # pixels of the image per pixel of the layer of light
# visibility in metres, brightness, saturation
WEATHERS = {
    "clear": (1500.0, 1.0, 1.0),
    "cloudy": (900.0, 0.86, 0.8),
    "rain": (320.0, 0.7, 0.6),
    "fog": (85.0, 0.9, 0.5),
}
FOG: dict[str, Colour] = {
    "clear": (225, 205, 185),
    "cloudy": (205, 200, 195),
    "rain": (165, 160, 155),
    "fog": (205, 203, 200),
}


class Painter:
    """Paints the frames of one scene. What does not change between frames is made once."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.rng = np.random.default_rng((*scene.seed, 1))
        self.visibility, self.brightness, self.saturation = WEATHERS[scene.weather]
        self.fog = scaled(FOG[scene.weather], 0.17) if scene.night else FOG[scene.weather]
        self.sun = float(self.rng.uniform(-1, 1))
        self.sky = self._sky()
        self.ground = self._ground()
        self.trees = [self._tree() for _ in range(3)]
        grain = self.rng.normal(0, 1.3, (HEIGHT + 64, WIDTH + 64, 1)).round().astype(np.int8).repeat(3, axis=2)
        self.grain = np.maximum(grain, 0).astype(np.uint8), np.maximum(-grain, 0).astype(np.uint8)
        rows = np.arange(int(HORIZON) + 3, HEIGHT)
        self.depth = (FOCAL * CAMERA_HEIGHT / (rows - HORIZON)).astype(np.float32)
        self.lateral = ((np.arange(WIDTH, dtype=np.float32) - CENTRE) / FOCAL)[None] * self.depth[:, None]
        self.light = self._light() if scene.night else None

    def paint(self, frame: int) -> tuple[np.ndarray, list[Seen]]:
        """The picture, uint8 (HEIGHT, WIDTH, 3) in BGR, and the objects that can be seen in it."""
        seen = look_at(self.scene, frame)
        image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
        self._paint_sky(image, frame)
        self._paint_ground(image, frame)
        glow = np.zeros((HEIGHT // GLOW, WIDTH // GLOW, 3), np.uint8)
        things: list[tuple[float, Seen | tuple[float, ...]]] = [(thing[0], thing) for thing in self._roadside(frame)]
        things += [(item.distance, item) for item in seen]
        for _, thing in sorted(things, key=lambda thing: -thing[0]):
            if isinstance(thing, Seen):
                self._shadow(image, thing)
                paint_actor(image, thing, self.air, self.scene.night, frame)
                if self.scene.night:
                    self._glow(glow, thing)
            else:
                self._paint_roadside(image, frame, thing)
        return self._finish(image, glow, frame), seen

    def air(self, distance: float, colour: Colour) -> Colour:
        """The colour of a thing after light, distance and weather."""
        lamp = max(colour) >= 255
        clear = math.exp(-distance / self.visibility * (0.35 if lamp else 1.0))
        light = 1.0 if lamp else self.brightness
        if self.scene.night and not lamp:
            light = 0.2 + 0.75 * math.exp(-distance / 28.0)
        mean = sum(colour) / 3
        grey = self.saturation if not lamp else 1.0
        blue, green, red = (
            clear * light * (mean + grey * (channel - mean)) + (1 - clear) * haze
            for channel, haze in zip(colour, self.fog, strict=True)
        )
        return blue, green, red

    # --- the sky -----------------------------------------------------------------------------------------------

    def _sky(self) -> np.ndarray:
        """A panorama of the sky and the far land, (HORIZON + 4, 2 * WIDTH, 3); its second half mirrors its first."""
        height = int(HORIZON) + 4
        low, high = np.array(self.fog, np.float32), np.array((190, 130, 70), np.float32)
        if self.scene.night:
            high = np.array((36, 24, 16), np.float32)
        elif self.scene.weather != "clear":
            high = low * 0.82
        share = np.linspace(1, 0, height, dtype=np.float32)[:, None, None] ** 0.8
        sky = np.broadcast_to(low + share * (high - low), (height, WIDTH, 3)).copy()
        if self.scene.weather in ("clear", "cloudy", "rain"):
            clouds = sum(
                cv2.resize(
                    self.rng.normal(size=(4 * n, 5 * n)).astype(np.float32),
                    (WIDTH, height),
                    interpolation=cv2.INTER_CUBIC,
                )
                / n
                for n in (1, 2, 4, 8)
            )
            cover = np.clip((clouds - (0.5 if self.scene.weather == "clear" else -0.6)) * 0.6, 0, 0.85)[..., None]
            bright = np.array((240, 240, 240), np.float32) * np.float32(0.1 if self.scene.night else 1.0)
            sky += cover * ((bright if self.scene.weather == "clear" else low * np.float32(0.9)) - sky)
        land = {"urban": (110, 105, 100), "highway": (95, 110, 95)}.get(self.scene.place, (80, 110, 90))
        for distance, tall in ((900.0, 70), (500.0, 45)):
            profile = cv2.resize(
                self.rng.uniform(0, 1, (1, 40)).astype(np.float32), (WIDTH, 1), interpolation=cv2.INTER_CUBIC
            )[0]
            if self.scene.place == "urban":
                profile = np.repeat(self.rng.uniform(0.2, 1, 64), WIDTH // 64)
            top = np.maximum(0, HORIZON - 6 - tall * profile)
            far = self.air(min(distance, 2.2 * self.visibility), land)
            sky[np.arange(height)[:, None] >= top] = far
        painted = np.clip(sky, 0, 255).astype(np.uint8)
        return np.concatenate([painted, painted[:, ::-1]], axis=1)

    def _paint_sky(self, image: np.ndarray, frame: int) -> None:
        turned = float(np.sum(self.scene.curvature[:frame] * np.diff(self.scene.travelled)[:frame]))
        start = int(turned * FOCAL) % (2 * WIDTH)
        first = min(WIDTH, 2 * WIDTH - start)
        height = self.sky.shape[0]
        image[:height, :first] = self.sky[:, start : start + first]
        image[:height, first:] = self.sky[:, : WIDTH - first]

    # --- the ground ----------------------------------------------------------------------------------------------

    def _ground(self) -> list[np.ndarray]:
        """The ground from above, uint8 (along, across, 3), once for each band of distance."""
        road, place, rng = self.scene.road, self.scene.place, self.rng
        shape = (round(PERIOD / ALONG), round(2 * SIDE / ACROSS))
        u = (np.arange(shape[1]) + 0.5) * ACROSS - SIDE
        v = (np.arange(shape[0]) + 0.5) * ALONG
        verge = (120, 122, 124) if place == "urban" else (62, 108, 92)
        asphalt = rng.uniform(72, 100) * (0.75 if self.scene.weather == "rain" else 1.0)
        texture = np.empty((*shape, 3), np.float32)
        texture[:] = np.where(((u > road.left) & (u < road.right))[:, None], asphalt, np.array(verge, float))
        fine = rng.normal(size=shape).astype(np.float32)
        patches = cv2.GaussianBlur(np.tile(fine, (2, 1)), (0, 0), 9)[shape[0] // 2 : shape[0] // 2 + shape[0]]
        texture += (5.0 * fine + 60.0 * patches * np.where((u > road.left) & (u < road.right), 0.5, 1.2))[..., None]
        for lane in (*road.lanes, *road.oncoming):  # darker where the wheels run
            for track in (-0.85, 0.85):
                texture[:, np.abs(u - lane - track) < 0.3] *= 0.93
        if place in ("urban", "suburb"):
            for edge, outward in ((road.left, -1), (road.right, 1)):
                texture[:, np.abs(u - edge) < 0.12] = 165
                walk = (outward * (u - edge) > 0.12) & (outward * (u - edge) < 3.0)
                texture[:, walk] = 0.5 * texture[:, walk] + 0.5 * np.array((140, 145, 150), np.float32)
        self._markings(texture, u, v)
        flat = np.clip(texture, 0, 255).astype(np.uint8)
        edge = BANDS[-1][1]
        wrapped = np.concatenate([flat[-edge:], flat, flat[:edge]])
        return [cv2.blur(wrapped, (1 if size < 20 else 5, size))[edge:-edge].copy() for _, size in BANDS]

    def _markings(self, texture: np.ndarray, u: np.ndarray, v: np.ndarray) -> None:
        road = self.scene.road
        white, yellow = np.array((228, 230, 230), np.float32), np.array((70, 190, 225), np.float32)
        worn = np.clip(self.rng.normal(0.86, 0.08, (*texture.shape[:2], 1)), 0, 1).astype(np.float32)

        def line(at: float, colour: np.ndarray, dashed: bool) -> None:
            where = np.ix_((v % 12 < 4) | (not dashed), np.abs(u - at) < 0.08)
            texture[where] += worn[where] * (colour - texture[where])

        for group in (road.lanes, road.oncoming):
            ordered = sorted(group)
            for lane in ordered[:-1]:
                line(lane + LANE / 2, white, dashed=True)
            line(ordered[-1] + LANE / 2, white if group is road.lanes else yellow, dashed=False)
            line(ordered[0] - LANE / 2, yellow if group is road.lanes else white, dashed=False)

    def _paint_ground(self, image: np.ndarray, frame: int) -> None:
        scene, top = self.scene, HEIGHT - len(self.depth)
        bend = scene.bend(frame, self.depth).astype(np.float32)
        columns = np.clip((self.lateral - bend[:, None] + SIDE) / ACROSS, 1, 2 * SIDE / ACROSS - 2)
        along = ((self.depth + scene.travelled[frame]) % PERIOD) / ALONG
        ends = [limit for limit, _ in BANDS[1:]] + [np.inf]
        for (near, _), far, texture in zip(BANDS, ends, self.ground, strict=True):
            rows = np.nonzero((self.depth >= near) & (self.depth < far))[0]
            first, last = int(rows[0]), int(rows[-1]) + 1
            lines = np.repeat(along[first:last, None].astype(np.float32), WIDTH, axis=1)
            piece = cv2.remap(texture, columns[first:last], lines, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
            image[top + first : top + last] = piece
        if self.light is not None:
            cv2.multiply(image[top:], self.light, image[top:], scale=1 / 255)
        # Light and haze change with the row only: rows of nearly equal haze share one look-up table.
        steps = np.round(64 * np.exp(-self.depth / self.visibility)).astype(int)
        starts = np.nonzero(np.diff(steps, prepend=-1))[0]
        for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(steps)], strict=True):
            clear = steps[begin] / 64
            scale = clear * (1.0 if scene.night else self.brightness)
            table = np.arange(256)[:, None] * scale + (1 - clear) * np.array(self.fog)
            strip = image[top + begin : top + end]
            cv2.LUT(strip, table.astype(np.uint8)[None], strip)

    def _light(self) -> np.ndarray:
        """Share of 255 of the ground's colour that is seen at night: headlights ahead, little elsewhere."""
        beam = np.exp(-np.square(self.lateral / (2.5 + 0.12 * self.depth[:, None]))) * np.exp(-self.depth / 26)[:, None]
        share = 40 + 190 * np.clip(1.6 * beam, 0, 1)
        tint = np.array((0.95, 1.0, 1.0))
        return np.asarray(np.clip(share[..., None] * tint, 0, 255), dtype=np.uint8)

    # --- the roadside --------------------------------------------------------------------------------------------

    def _roadside(self, frame: int) -> list[tuple[float, ...]]:
        """Things beside the road: (distance, side, slot, metres across). They stand in slots along the road."""
        scene, spacing = self.scene, {"urban": 17.0, "highway": 22.0}.get(self.scene.place, 11.0)
        gone = float(scene.travelled[frame])
        things: list[tuple[float, ...]] = []
        for slot in range(math.ceil((gone - 12) / spacing), int((gone + 1.5 * FARTHEST) / spacing) + 1):
            for side in (-1, 1):
                edge = scene.road.right if side == 1 else -scene.road.left
                things.append((slot * spacing - gone, float(side), float(slot), edge))
        return things

    def _paint_roadside(self, image: np.ndarray, frame: int, thing: tuple[float, ...]) -> None:
        distance, side, slot, edge = thing
        # a slot behind the start of the segment has a negative number, which no seed may have
        rng = np.random.default_rng((*self.scene.seed, 2, int(slot) % 2**32, int(side) + 1))
        bend = float(self.scene.bend(frame, np.array(distance)))
        place = self.scene.place
        if place == "urban" and rng.random() < 0.75:
            self._building(image, bend, distance, side, edge + rng.uniform(4.0, 7.0), rng)
        elif rng.random() < (0.35 if place == "urban" else 0.75):
            across = edge + rng.uniform(3.5, 5.0 if place in ("urban", "suburb") else 18.0)
            self._plant(image, bend + side * across, distance, rng.uniform(4.5, 9.0), self.trees[rng.integers(3)])
        if place != "rural" and rng.random() < 0.5:
            self._post(image, bend + side * (edge + 0.8), distance, side)

    def _building(
        self, image: np.ndarray, bend: float, distance: float, side: float, across: float, rng: np.random.Generator
    ) -> None:
        front, deep, tall = rng.uniform(11, 16), 12.0, float(rng.uniform(6, 22))
        near = max(distance, 3.0)
        inner, outer = bend + side * across, bend + side * (across + deep)
        left, right = min(inner, outer), max(inner, outer)
        base = np.array([[left, 0, near], [right, 0, near], [right, 0, distance + front], [left, 0, distance + front]])
        block = Box(image, np.concatenate([base, base + np.array((0, tall, 0))]), self.air)
        wall = tuple(float(channel) for channel in rng.uniform(85, 185) * rng.uniform(0.85, 1.1, 3))
        block.paint((wall[0], wall[1], wall[2]), ("rear", "left", "right"))
        floors = max(2, int(tall / 3.2))
        if distance > 75:
            return
        face = "left" if side == 1 else "right"
        for floor in range(floors):
            low = (floor + 0.3) / floors
            for column in range(4):
                lit = self.scene.night and rng.random() < 0.35
                pane: Colour = (110, 190, 255) if lit else scaled((95, 85, 75), float(rng.uniform(0.6, 1.2)))
                block.decal(face, rectangle(0.06 + column * 0.24, 0.19 + column * 0.24, low, low + 0.45 / floors), pane)
                block.decal(
                    "rear", rectangle(0.06 + column * 0.24, 0.19 + column * 0.24, low, low + 0.45 / floors), pane
                )

    def _post(self, image: np.ndarray, x: float, distance: float, side: float) -> None:
        if distance < 7:
            return
        foot, top, tip = project(np.array([[x, 0, distance], [x, 7.0, distance], [x - side * 1.8, 7.2, distance]]))
        width = max(0.6, FOCAL * 0.06 / distance)
        grey = self.air(distance, (105, 105, 100))
        for a, b in ((foot, top), (top, tip)):
            normal = np.array([a[1] - b[1], b[0] - a[0]]) / (np.linalg.norm(b - a) + 1e-6) * width
            fill(image, np.array([a - normal, a + normal, b + normal, b - normal]), grey)
        if self.scene.night:
            cv2.circle(
                image,
                (int(tip[0]), int(tip[1])),
                max(2, int(2.5 * width)),
                self.air(distance, (190, 225, 255)),
                -1,
                cv2.LINE_AA,
            )

    def _tree(self) -> np.ndarray:
        """A tree, BGRA (256, 256, 4), colour already multiplied by the opacity."""
        rng, size = self.rng, 256
        sprite = np.zeros((size, size, 4), np.uint8)
        cv2.line(sprite, (128, 255), (128, 120), (45, 60, 75, 255), 12, cv2.LINE_AA)
        green = rng.uniform((30, 70, 45), (60, 120, 90))
        for shade in (0.55, 0.8, 1.0, 1.25):
            for _ in range(55):
                angle, reach = rng.uniform(0, 2 * np.pi), np.sqrt(rng.uniform()) * (1.1 - 0.25 * shade)
                x, y = 128 + 92 * reach * np.cos(angle), 100 + 82 * reach * np.sin(angle) - 14 * shade
                colour = (*(green * shade * rng.uniform(0.85, 1.15)), 255)
                cv2.circle(sprite, (int(x), int(y)), int(rng.uniform(7, 17)), colour, -1, cv2.LINE_AA)
        return sprite

    def _plant(self, image: np.ndarray, x: float, distance: float, tall: float, sprite: np.ndarray) -> None:
        if distance < 11:
            return
        (foot_x, foot_y), scale = project(np.array([x, 0.0, distance])), FOCAL / distance * tall / 256
        x1, y1 = int(max(0, foot_x - 128 * scale)), int(max(0, foot_y - 255 * scale))
        x2, y2 = int(min(WIDTH, foot_x + 128 * scale)), int(min(HEIGHT, foot_y))
        if x2 - x1 < 2 or y2 - y1 < 2:
            return
        matrix = np.array([[scale, 0, foot_x - 128 * scale - x1], [0, scale, foot_y - 255 * scale - y1]])
        picture = cv2.warpAffine(sprite, matrix, (x2 - x1, y2 - y1))
        black, white = np.array(self.air(distance, (0, 0, 0))), np.array(self.air(distance, (250, 250, 250)))
        table = np.clip(black + np.arange(256)[:, None] / 250 * (white - black), 0, 255).astype(np.uint8)[None]
        colour, opacity = cv2.LUT(picture[..., :3].copy(), table), cv2.merge([picture[..., 3]] * 3)
        window = image[y1:y2, x1:x2]
        kept = cv2.multiply(window, 255 - opacity, scale=1 / 255)
        cv2.add(kept, cv2.multiply(colour, opacity, scale=1 / 255), window)

    # --- light, weather, camera ----------------------------------------------------------------------------------

    def _shadow(self, image: np.ndarray, seen: Seen) -> None:
        strength = 0.6 if self.scene.weather == "clear" and not self.scene.night else 0.4
        strength *= math.exp(-seen.distance / self.visibility)
        base = seen.corners[:4]
        middle = base.mean(axis=0)
        lean = self.sun * 0.5 * seen.actor.size[2] if self.scene.weather == "clear" and not self.scene.night else 0.0
        cast = np.concatenate([base, base + np.array((lean, 0, 0))])
        points = project(middle + 1.06 * (cast - middle))
        hull = cv2.convexHull(points.astype(np.float32))[:, 0]
        soft = int(np.clip(0.25 * FOCAL / seen.distance / 2, 1, 30))
        x1, y1 = np.maximum(hull.min(axis=0).astype(int) - 2 * soft, 0)
        x2, y2 = np.minimum(hull.max(axis=0).astype(int) + 2 * soft, (WIDTH, HEIGHT))
        if x2 - x1 < 2 or y2 - y1 < 2:
            return
        mask = np.full((y2 - y1, x2 - x1), 255, np.uint8)
        fill(mask, hull - (x1, y1), (255 * (1 - strength),) * 3)
        mask = cv2.blur(mask, (2 * soft + 1, soft + 1))
        window = image[y1:y2, x1:x2]
        cv2.multiply(window, cv2.merge([mask] * 3), window, scale=1 / 255)

    def _glow(self, glow: np.ndarray, seen: Seen) -> None:
        """Add the light of its lamps to the layer of light, and cover what shines behind it."""
        x1, y1, x2, y2 = (round(float(np.clip(value, -4000, 8000))) // GLOW for value in seen.box)
        cv2.rectangle(glow, (x1, y1), (x2, y2), (0, 0, 0), -1)
        if seen.actor.type != 1:
            return
        ahead = seen.actor.facing == -1
        colour = (230, 245, 255) if ahead else (30, 30, 150)
        lamps = seen.corners[[2, 3]] if ahead else seen.corners[[0, 1]]
        for x, y in project(0.82 * lamps + 0.18 * lamps[::-1] + [0, 0.75, 0]):
            radius = int(np.clip((0.55 if ahead else 0.25) * FOCAL / seen.distance / GLOW, 1, 40))
            cv2.circle(
                glow, (int(np.clip(x, -9999, 9999)) // GLOW, int(np.clip(y, -9999, 9999)) // GLOW), radius, colour, -1
            )

    def _finish(self, image: np.ndarray, glow: np.ndarray, frame: int) -> np.ndarray:
        rng = np.random.default_rng((*self.scene.seed, 3, frame))
        if self.scene.night:
            light = cv2.add(cv2.GaussianBlur(glow, (0, 0), 5), cv2.GaussianBlur(glow, (0, 0), 16))
            cv2.add(image, cv2.resize(light, (WIDTH, HEIGHT), interpolation=cv2.INTER_LINEAR), image)
        if self.scene.weather == "rain":
            streaks = np.zeros((HEIGHT // 2, WIDTH // 2), np.uint8)
            starts = rng.uniform((-20, -20), (WIDTH / 2, HEIGHT / 2), (260, 2))
            for (x, y), reach in zip(starts, rng.uniform(10, 40, 260), strict=True):
                cv2.line(streaks, (int(x), int(y)), (int(x + 0.12 * reach), int(y + reach)), 46, 1, cv2.LINE_AA)
            big = cv2.resize(streaks, (WIDTH, HEIGHT), interpolation=cv2.INTER_LINEAR)
            cv2.add(image, cv2.merge([big] * 3), image)
        image = cv2.GaussianBlur(image, (3, 3), 0.7)
        y, x = rng.integers(64, size=2)
        brighter, darker = (grain[y : y + HEIGHT, x : x + WIDTH] for grain in self.grain)
        return np.asarray(cv2.subtract(cv2.add(image, brighter), darker))
