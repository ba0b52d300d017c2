"""For those who look at a study once: whether nodes that work by their files still do."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from hpcjobs.heartbeat import BEAT_S, OLD_S
from hpcjobs.paths import StudyPaths
from hpcjobs.progress import LIVE, Snapshot, StudyWatch

# a node that lives has written its file in this time
LOOK_AGAIN_S = 2.5 * BEAT_S


def look_again(paths: StudyPaths, watched: StudyWatch, now: Snapshot) -> Snapshot:
    """``now``, the first picture, in which nodes that work by their files but write them no more are silent.

    Silence is measured between two looks. There is a second one where the time of a file says that it may be old; that
    alone, by the clocks of two machines, proves nothing.
    """
    ages = {line.report.element: _age_s(paths.node_file(line.report.element)) for line in now.nodes}
    doubtful = {line.report.element: line.report for line in now.nodes
                if line.state in LIVE and abs(ages[line.report.element]) > OLD_S}  # fmt: skip
    if not doubtful:
        return now
    time.sleep(LOOK_AGAIN_S)
    now = watched.look()
    nodes = []
    for line in now.nodes:
        before = doubtful.get(line.report.element)
        if before and (before.agent, before.beat) == (line.report.agent, line.report.beat) and line.state in LIVE:
            silent_s = max(ages[before.element], 0.0) + LOOK_AGAIN_S
            line = replace(line, state="silent", silent_s=silent_s)
        nodes.append(line)
    at_work = [worker for line in nodes if line.state in LIVE for worker in line.report.workers]
    speeds = [worker.images_per_s for worker in at_work if worker.state == "running" and worker.images_per_s]
    return replace(
        now,
        nodes=nodes,
        images_per_s=sum(speeds) if speeds else None,
        time_left_s=now.time_left_s if at_work or now.finished else None,
    )


def _age_s(file: Path) -> float:
    """How old a file is, by this machine's clock; 0 for one that has just gone."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
