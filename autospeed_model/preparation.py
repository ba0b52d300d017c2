"""One preparation of OpenLane: select frames, spread the work, put the finished dataset in the place of the old one."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from autospeed_model.errors import UserError
from autospeed_model.labels import Geometry
from autospeed_model.odd import Report
from autospeed_model.openlane import Inventory, Key, take_inventory
from autospeed_model.packed import SPLITS, VARIANTS, VERSION, describe_split, packed_path, write_labels, write_manifest
from autospeed_model.packing import (
    LABELS_A_TASK,
    Frames,
    LabelTask,
    Progress,
    Written,
    close_gaps,
    pieces_of,
    read_labels,
    write_piece,
)
from autospeed_model.pool import Each
from autospeed_model.text import counted

PROGRESS = "progress.jsonl"
TUNE_SHARE = 0.2  # of the training segments, for the validation split of tuning


@dataclass(frozen=True)
class Request:
    """What decides the content of the dataset; its hash names the folder under construction."""

    variant: str
    height: int
    width: int
    seed: int
    fingerprint: str
    version: int = VERSION

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def split_of_segments(segments: Sequence[str], seed: int) -> dict[str, str]:
    """Assign training segments to ``train`` and ``tune_val``, 80 to 20, at least one to each.

    Whole segments: neighbouring frames of one video look alike, a split by frame would test what was trained.
    """
    ordered = sorted(segments)
    if len(ordered) < 2:
        raise UserError(
            f"{counted(len(ordered), 'training segment')} with usable frames: at least 2 are needed, one to train, "
            "one to validate"
        )
    chosen = np.random.default_rng(seed).permutation(len(ordered))[: max(1, round(TUNE_SHARE * len(ordered)))]
    held = {ordered[index] for index in chosen}
    return {segment: "tune_val" if segment in held else "train" for segment in ordered}


class Preparation:
    """One run: what was asked for, what was found, how to tell."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.source: Path = options.source.absolute()
        self.out: Path = options.out.absolute()
        self.jobs: int = options.jobs
        self.strict: bool = options.strict
        self.console = console
        self.report = Report()
        self.counts: Counter[str] = Counter()
        height, width = VARIANTS[options.variant]
        self.geometry = Geometry(options.height or height, options.width or width)
        self.inventory: Inventory = take_inventory(self.source, self.report)
        self.request = Request(
            options.variant, self.geometry.height, self.geometry.width, options.seed, self.inventory.fingerprint
        )

    @property
    def building(self) -> Path:
        return self.out.with_name(f".{self.out.name}.partial-{self.request.digest[:16]}")

    def refuse_odd_if_strict(self) -> None:
        if self.strict and self.report:
            raise UserError("--strict, and the input is odd:\n" + "\n".join(self.report.lines()))

    def select(self, each: Each) -> dict[str, Frames]:
        """Read all labels, leave out what cannot be used, and assign the frames to splits."""
        images, labels = self.inventory.images, self.inventory.labels
        for key in sorted(images.keys() - labels.keys()):
            self.report.add("image_without_label", str(key))
        present = {key[:2] for key in images}
        for key in sorted(key for key in labels.keys() - images.keys() if key[:2] in present):
            self.report.add("label_without_image", str(key))
        keys = sorted(images.keys() & labels.keys())
        boxes = self._boxes_of(keys, each)
        segments = {key.segment for key in boxes if key.split == "training"}
        assigned = split_of_segments(sorted(segments), self.request.seed)
        frames = {name: Frames([], [], []) for name in SPLITS}
        for key in (key for key in keys if key in boxes):
            chosen = frames[assigned[key.segment] if key.split == "training" else "evaluation"]
            chosen.keys.append(key)
            chosen.members.append(images[key])
            chosen.boxes.append(boxes[key])
        return frames

    def _boxes_of(self, keys: list[Key], each: Each) -> dict[Key, np.ndarray]:
        found: dict[int, Any] = {}
        members = [self.inventory.labels[key] for key in keys]
        starts = range(0, len(keys), LABELS_A_TASK)
        tasks = [LabelTask(start, members[start : start + LABELS_A_TASK], self.geometry) for start in starts]
        with self._bar() as bar:
            task = bar.add_task("labels", total=len(keys), rate="")
            for first, labels in each(read_labels, tasks):
                found |= enumerate(labels, first)
                bar.advance(task, len(labels))
        boxes = {}
        for number, key in enumerate(keys):
            label = found[number]
            self.counts += label.counts
            for kind, detail in label.odd:
                self.report.add(kind, str(key), detail)
            if label.boxes is not None:
                boxes[key] = label.boxes
        self.refuse_odd_if_strict()
        return boxes

    def _bar(self) -> Bar:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        return Bar(*columns, TimeRemainingColumn(), console=self.console)

    def pack(self, frames: dict[str, Frames], each: Each) -> None:
        """Write the arrays into the folder under construction, and put that in the place of OUT."""
        self.building.mkdir(parents=True, exist_ok=True)
        written = self._write_pieces(frames, each)
        described = {}
        for name in SPLITS:
            pieces = sorted((piece for piece in written if piece.split == name), key=lambda piece: piece.first)
            failed = {row: (kind, detail) for piece in pieces for row, kind, detail in piece.failed}
            for row in sorted(failed):
                self.report.add(failed[row][0], str(frames[name].keys[row]), failed[row][1])
            described[name] = self._finish_split(name, frames[name], set(failed), [piece.sha256 for piece in pieces])
        self.refuse_odd_if_strict()
        write_manifest(
            self.building, self.request.variant, self.geometry.height, self.geometry.width, described,
            geometry={"scaled": list(self.geometry.scaled), "padding": list(self.geometry.padding)},
            seed=self.request.seed,
            source={"folder": str(self.source), "files": len(self.inventory.files), "sha256": self.request.fingerprint},
            request=self.request.digest, boxes=dict(sorted(self.counts.items())), odd=self.report.mapping(),
        )  # fmt: skip
        for path in self.building.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self._put_in_place()

    def _finish_split(self, name: str, frames: Frames, failed: set[int], hashes: list[str]) -> dict[str, Any]:
        kept = frames
        if failed:
            path = packed_path(self.building, name, "images")
            hashes = close_gaps(path, len(frames.keys), failed, self.geometry, hashes)
            kept = frames.without(failed)
        segments = sorted({key.segment for key in kept.keys})
        if name != "evaluation" and not segments:
            raise UserError(f"{self.source}: no image of split {name} can be decoded; see the report above")
        write_labels(self.building, name, kept.boxes, [str(key) for key in kept.keys])
        return describe_split(self.building, name, segments, hashes)

    def _write_pieces(self, frames: dict[str, Frames], each: Each) -> list[Written]:
        progress = Progress(self.building / PROGRESS)
        tasks = [
            piece
            for name in SPLITS
            for piece in pieces_of(
                name, frames[name], packed_path(self.building, name, "images"), self.geometry, progress
            )
        ]
        done: list[Written] = []
        start, total = time.monotonic(), sum(len(split.keys) for split in frames.values())
        with self._bar() as bar:
            task = bar.add_task("images", total=total, rate="")
            for piece in each(write_piece, tasks):
                if not piece.kept:
                    progress.note(piece)
                done.append(piece)
                if piece.failed and self.strict:
                    self._tell_failed(piece, frames)
                fresh = sum(piece.count for piece in done if not piece.kept)
                bar.update(task, advance=piece.count, rate=f"{fresh / (time.monotonic() - start):.0f} images/s")
        self._tell_speed(done, time.monotonic() - start)
        return done

    def _tell_failed(self, piece: Written, frames: dict[str, Frames]) -> None:
        for row, kind, detail in piece.failed:
            self.report.add(kind, str(frames[piece.split].keys[row]), detail)
        self.refuse_odd_if_strict()

    def _tell_speed(self, done: list[Written], wall: float) -> None:
        fresh = sum(piece.count for piece in done if not piece.kept)
        kept = sum(piece.count for piece in done if piece.kept)
        if kept:
            self.console.print(f"{counted(kept, 'image')} already there from a run that did not end")
        cpu = sum(piece.cpu_seconds for piece in done)
        if fresh:
            rate = f"{fresh / wall:.0f} images/s, {fresh / max(cpu, 1e-9):.0f} images/s per core"
            self.console.print(f"{counted(fresh, 'image')} in {wall:.1f} s: {rate}")

    def _put_in_place(self) -> None:
        old = self.out.with_name(f".{self.out.name}.old")
        if self.out.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.out.rename(old)
        self.building.rename(self.out)
        (self.out / PROGRESS).unlink()
        shutil.rmtree(old, ignore_errors=True)
        for leftover in self.out.parent.glob(f".{self.out.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def bytes_needed(self, frames: dict[str, Frames]) -> int:
        images = sum(len(split.keys) for split in frames.values())
        return images * self.geometry.height * self.geometry.width * 3 + sum(
            64 * len(split.keys) for split in frames.values()
        )

    def check_space(self, frames: dict[str, Frames]) -> None:
        """Raise UserError if the disk is too small; what an earlier run left under construction is used again."""
        needed = self.bytes_needed(frames)
        if self.building.exists():
            needed -= sum(path.stat().st_blocks * 512 for path in self.building.iterdir())
        free = shutil.disk_usage(_existing(self.out.parent)).free
        if needed > free:
            raise UserError(
                f"{self.out}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there; "
                f"free some, or choose a folder on another disk"
            )

    def tell_plan(self, frames: dict[str, Frames]) -> None:
        for name in SPLITS:
            segments = len({key.segment for key in frames[name].keys})
            boxes = sum(len(rows) for rows in frames[name].boxes)
            images = counted(len(frames[name].keys), "image")
            self.console.print(f"{name:>11}: {images} of {counted(segments, 'segment')}, {boxes} boxes")
        if not frames["evaluation"].keys:
            self.console.print("no validation data of OpenLane was found: the evaluation split is empty")
        size = self.bytes_needed(frames) / 1e9
        self.console.print(f"{self.geometry.height} x {self.geometry.width} pixels, {size:.2f} GB in {self.out}")

    def tell_report(self) -> None:
        if self.report:
            self.console.print("odd in the input:")
            for line in self.report.lines():
                self.console.print(line)
        else:
            self.console.print("nothing odd in the input")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
