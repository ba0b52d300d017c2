"""Whether the kernel has killed for want of host memory, as the cgroups of this process count it."""

from __future__ import annotations

from pathlib import Path


def kills() -> int | None:
    """Processes killed for memory in this process's cgroup and those above it; None where nothing counts them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    total = None
    for line in lines:
        number, _, place = line.split(":", 2)
        if number != "0":
            continue
        folder = Path("/sys/fs/cgroup") / place.lstrip("/")
        for level in (folder, *folder.parents):
            try:
                text = (level / "memory.events").read_text()
            except OSError:
                continue
            counted = [int(entry.split()[1]) for entry in text.splitlines() if entry.startswith("oom_kill ")]
            total = max(total or 0, *counted) if counted else total
            if level == Path("/sys/fs/cgroup"):
                break
    return total


class OutOfMemoryCount:
    """Tells whether somebody was killed for memory since the last time it was asked."""

    def __init__(self) -> None:
        self._known = kills()

    def has_grown(self) -> bool:
        now = kills()
        grown = now is not None and self._known is not None and now > self._known
        self._known = now
        return grown
