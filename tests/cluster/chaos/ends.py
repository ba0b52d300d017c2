"""When the workers that wrote the diary ended, by the clock of the diary."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.cluster.chaos.world import process_state

LOOK_S = 0.2


class Ends(threading.Thread):
    """Looks at the workers' processes until it is stopped. Each has a file in the diary that begins with its number."""

    def __init__(self, diary: Path) -> None:
        super().__init__(name="ends", daemon=True)
        self._diary = diary
        self._stop_now = threading.Event()
        self._lived_at: dict[str, float] = {}
        self._ended: set[str] = set()

    def run(self) -> None:
        while not self._stop_now.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        now = time.monotonic()
        for file in self._diary.iterdir():
            if file.name not in self._ended:
                if process_state(_pid(file.name)) in ("", "Z", "X"):
                    self._ended.add(file.name)
                else:
                    self._lived_at[file.name] = now

    def stop(self) -> list[tuple[int, float]]:
        """Process and time of each end: when it was last seen alive, so that no recovery looks shorter than it was."""
        self._stop_now.set()
        self.join()
        return [(_pid(name), self._lived_at[name]) for name in self._ended if name in self._lived_at]


def _pid(name: str) -> int:
    return int(name.partition("-")[0])
