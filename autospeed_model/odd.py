"""What was odd in the input: counted by kind, with the names of the first of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

# kind: what it is, and what is done about it
KINDS: Mapping[str, str] = {
    "archive_truncated": "archive that ends early: the whole files in it are used",
    "no_file": "link that leads nowhere, or a pipe: left out",
    "duplicate": "file of a frame that was found before: the first one is used",
    "image_without_label": "image without a label file: left out",
    "label_without_image": "label file without an image: not used",
    "label_unreadable": "label file that cannot be read: its image is left out",
    "image_unreadable": "truncated or damaged image: left out",
    "image_of_wrong_size": "image that is not 1920 x 1280: left out",
    "box_incomplete": "box without x, y, width, height or level: left out",
    "box_not_a_number": "box with a value that is no finite number: left out",
    "box_number_as_text": "box with a number written as text: taken as that number",
    "box_without_area": "box of zero or negative width or height: left out",
    "box_of_unknown_level": "box whose level is not 1 to 4: left out",
    "several_level_1": "frame with more than one box of level 1: all are kept",
}
FIRST = 5


class Report:
    """Counts by kind, and the first :data:`FIRST` names of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = defaultdict(int)
        self.first: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, name: str, detail: str = "") -> None:
        """``kind`` is one of :data:`KINDS`; ``name`` a file or frame."""
        self.counts[kind] += 1
        if len(self.first[kind]) < FIRST:
            self.first[kind].append(f"{name}: {detail}" if detail else name)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def mapping(self) -> dict[str, dict[str, object]]:
        """For the manifest, in the order of :data:`KINDS`."""
        return {kind: {"count": self.counts[kind], "first": self.first[kind]} for kind in KINDS if kind in self.counts}

    def lines(self) -> Iterable[str]:
        """For people."""
        for kind in KINDS:
            if kind in self.counts:
                yield f"{self.counts[kind]:>8}  {kind}: {KINDS[kind]}"
                yield from (f"{'':>12}{name}" for name in self.first[kind])
                if self.counts[kind] > FIRST:
                    yield f"{'':>12}and {self.counts[kind] - FIRST} more"
