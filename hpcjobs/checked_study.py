"""The study file as workers read it: as JSON on the node's own disk, without pydantic.

The node's agent has checked study.yaml. Building pydantic's classes anew in each of its 64 workers would cost more than
everything else of ours that a worker does before its first trial.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from hpcjobs.paths import write_atomically

if TYPE_CHECKING:
    from hpcjobs.config import StudyFile


def _file(node_folder: Path) -> Path:
    return node_folder / "study.json"


def write_checked(file: StudyFile, node_folder: Path) -> None:
    """For the workers of this node. They do not need the cluster's profile."""
    write_atomically(_file(node_folder), file.model_dump_json(exclude={"cluster"}), durable=False)


def read_checked(node_folder: Path) -> StudyFile:
    """What the agent wrote: an object with the attributes of a :class:`StudyFile`, but without its methods."""
    data = json.loads(_file(node_folder).read_bytes())
    study, run = data["study"], data["run"]
    for named in ("sampler", "pruner"):
        study[named] = SimpleNamespace(**study[named])
    study["parameters"] = {name: SimpleNamespace(**space) for name, space in study["parameters"].items()}
    for place in ("data", "working_folder"):
        run[place] = Path(run[place]) if run[place] is not None else None
    parts = {"study": SimpleNamespace(**study), "run": SimpleNamespace(**run), "cluster": None}
    return cast("StudyFile", SimpleNamespace(**{**data, **parts}))
