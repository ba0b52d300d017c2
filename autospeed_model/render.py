"""Render driving scenes in OpenLane's own layout: ``python -m autospeed_model.render OUT``.

The pictures are drawn, not photographed, but the level of each object follows from its place relative to the ego path
as it does in OpenLane, so that a detector can learn it. Same arguments, same files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autospeed_model.errors import UserError, run_entry
from autospeed_model.paint import Painter
from autospeed_model.pool import spread
from autospeed_model.scene import HEIGHT, WIDTH, Seen, make_scene
from autospeed_model.text import counted

RENDER_VERSION = 1
QUALITY = 84  # of the JPEG files: about 150 kB each
STRETCH = 20  # frames that one task paints
MARGIN = 200  # pixels by which a box may stick out of the image
HOURS = {True: "night", False: "daytime"}


@dataclass(frozen=True)
class Order:
    """What is to be rendered. Kept in OUT/render.json, so that the same order is not rendered twice."""

    segments: int
    validation_segments: int
    frames: int
    seed: int
    version: int = RENDER_VERSION

    def segment_seeds(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for number, (split, count) in enumerate(
            (("training", self.segments), ("validation", self.validation_segments))
        ):
            for segment in range(count):
                yield split, (self.seed, number, segment)


def segment_name(seed: tuple[int, ...]) -> str:
    """A name that looks like one of OpenLane's, of the same length."""
    rng = np.random.default_rng((*seed, 9))
    number, start = int(rng.integers(10**18, 9 * 10**18)), int(rng.integers(0, 900)) * 10
    return f"segment-{number:019d}_{start}_000_{start + 20}_000_with_camera_labels"


def timestamp(seed: tuple[int, ...], frame: int) -> str:
    start = int(np.random.default_rng((*seed, 8)).integers(1_500_000_000, 1_560_000_000))
    return str(start * 10**8 + frame * 10**7)


def label_of(seen: list[Seen], path: str) -> dict[str, object]:
    """One file of ``cipo``: the boxes of a frame in pixels, nearest object first."""
    results = []
    for item in seen:
        x1, x2 = np.clip(item.box[0::2], -MARGIN, WIDTH + MARGIN)
        y1, y2 = np.clip(item.box[1::2], -MARGIN, HEIGHT + MARGIN)
        box = {"x": round(float(x1), 1), "y": round(float(y1), 1), "width": round(float(x2 - x1), 1)}
        box["height"] = round(float(y2 - y1), 1)
        results.append(box | {"id": str(item.level), "trackid": f"t{item.number}", "type": item.actor.type})
    return {"results": results, "raw_file_path": path}


@dataclass(frozen=True)
class Stretch:
    """Up to :data:`STRETCH` frames of one segment, from ``first`` on, of ``frames`` in all."""

    out: Path
    split: str
    seed: tuple[int, ...]
    frames: int
    first: int


def render_stretch(stretch: Stretch) -> int:
    """Render images, labels and (with the first frames) the tags of the scene; returns how many images."""
    cv2.setNumThreads(1)
    out, split, seed, first = stretch.out, stretch.split, stretch.seed, stretch.first
    scene, name = make_scene(seed, stretch.frames), segment_name(seed)
    painter = Painter(scene)
    images, labels = out / "images" / split / name, out / "cipo" / split / name
    images.mkdir(parents=True, exist_ok=True)
    labels.mkdir(parents=True, exist_ok=True)
    end = min(first + STRETCH, stretch.frames)
    for frame in range(first, end):
        picture, seen = painter.paint(frame)
        stamp = timestamp(seed, frame)
        _, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        (images / f"{stamp}.jpg").write_bytes(encoded.tobytes())
        label = label_of(seen, f"{split}/{name}/images/{stamp}.jpg")
        (labels / f"{stamp}.jpg.json").write_text(json.dumps(label, indent=1) + "\n")
    if first == 0:
        tags = {"segment": name, "weather": scene.weather, "scene": scene.place, "hours": HOURS[scene.night]}
        (out / "scene" / split).mkdir(parents=True, exist_ok=True)
        (out / "scene" / split / f"{name}.json").write_text(json.dumps(tags, indent=1) + "\n")
    return end - first


def render(order: Order, out: Path, jobs: int) -> None:
    """Render everything into the existing folder ``out`` with ``jobs`` processes."""
    stretches = [
        Stretch(out, split, seed, order.frames, first)
        for split, seed in order.segment_seeds()
        for first in range(0, order.frames, STRETCH)
    ]
    total = order.frames * (order.segments + order.validation_segments)
    columns = (TextColumn("rendering"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeRemainingColumn()) as bar, spread(jobs) as each:
        task, start = bar.add_task("", total=total, rate=""), time.monotonic()
        for count in each(render_stretch, stretches):
            bar.advance(task, count)
            bar.update(task, rate=f"{bar.tasks[0].completed / (time.monotonic() - start):.1f} images/s")


def write_archives(out: Path, folder: Path) -> None:
    """Pack a rendered folder as OpenLane is published: two ``.tar`` of images, ``cipo.zip`` and ``scene.zip``."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("training", "validation"):
        if (out / "images" / split).is_dir():
            with _replacing(folder / f"images_{split}_0.tar") as path, tarfile.open(path, "w") as archive:
                for file in sorted((out / "images" / split).rglob("*.jpg")):
                    archive.add(file, arcname=str(file.relative_to(out)))
    for kind in ("cipo", "scene"):
        with _replacing(folder / f"{kind}.zip") as path, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
            for file in sorted((out / kind).rglob("*.json")):
                zipped.write(file, arcname=str(file.relative_to(out)))


class _replacing:  # noqa: N801
    """A temporary path beside ``path`` that takes its place when the block ends well."""

    def __init__(self, path: Path) -> None:
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.temporary.replace(self.path)
        else:
            self.temporary.unlink(missing_ok=True)


def _is_done(out: Path, order: Order, overwrite: bool) -> bool:
    """Whether ``out`` holds this very order. Raises UserError for a folder that must not be touched."""
    if not out.exists():
        return False
    try:
        found = json.loads((out / "render.json").read_text())
    except (OSError, ValueError):
        if not out.is_dir() or any(out.iterdir()):
            raise UserError(f"{out}: exists and is not a rendered folder; name another one") from None
        return False
    if found == vars(order):
        return True
    if not overwrite:
        raise UserError(f"{out}: was rendered with {found}, not with {vars(order)}; use --overwrite or another folder")
    return False


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m autospeed_model.render",
        description="Render driving scenes with their labels in OpenLane's layout.",
        epilog="example:\n  python -m autospeed_model.render demo/openlane --segments 12 --frames 40",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make: OUT/images, OUT/cipo, OUT/scene")
    parser.add_argument("--segments", type=int, default=12, help="training segments (default 12)")
    parser.add_argument("--validation-segments", type=int, default=3, help="validation segments (default 3)")
    parser.add_argument("--frames", type=int, default=40, help="frames of a segment, 10 a second (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other scenes (default 0)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    parser.add_argument(
        "--archives", type=Path, metavar="FOLDER", help="also pack the files as .tar and .zip archives into FOLDER"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a folder rendered with other arguments")
    options = parser.parse_args(arguments)
    for name, least in (("segments", 1), ("validation_segments", 0), ("frames", 1), ("seed", 0), ("jobs", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    out: Path = options.out.absolute()
    order = Order(options.segments, options.validation_segments, options.frames, options.seed)
    if _is_done(out, order, options.overwrite):
        print(f"{out}: already rendered")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            start = time.monotonic()
            render(order, building, options.jobs)
            (building / "render.json").write_text(json.dumps(vars(order)) + "\n")
            building.chmod(0o755)
            if out.exists():
                shutil.rmtree(out)
            building.rename(out)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        segments = order.segments + order.validation_segments
        images = counted(order.frames * segments, "image")
        print(f"{out}: {images} of {counted(segments, 'segment')} in {time.monotonic() - start:.1f} s")
    if options.archives is not None:
        write_archives(out, options.archives)
        print(f"{options.archives}: the same as archives")
    return 0


if __name__ == "__main__":
    sys.exit(run_entry(main))
