"""What a journal's records have come to, so that opening a long study does not replay all of them.

A snapshot is JSON, not a pickle: reading it runs no code. It says up to which byte of the journal it goes and the
checksum of the bytes before; where that does not fit the journal, the snapshot is passed over and the journal is
replayed. It may be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.study._frozen import FrozenStudy
from optuna.study._study_direction import StudyDirection
from optuna.trial import FrozenTrial

from hpcjobs.journal_replay import Replay, no_garbage_collection
from hpcjobs.journal_trial import STATES, LazyTrial, parse_distribution
from hpcjobs.paths import write_atomically

log = logging.getLogger(__name__)

_VERSION = 1
_CHECKED_BYTES = 4096


def snapshot_file(journal: Path) -> Path:
    return journal.with_suffix(".snapshot")


def save(replay: Replay, journal: Path, descriptor: int, offset: int) -> None:
    """Write the state that the first ``offset`` bytes of the journal lead to. A failure is logged: it is only speed."""
    distributions: dict[int, int] = {}
    texts: list[str] = []

    def index(distribution: BaseDistribution) -> int:
        key = id(distribution)
        if key not in distributions:
            distributions[key] = len(texts)
            texts.append(distribution_to_json(distribution))
        return distributions[key]

    content = {
        "version": _VERSION,
        "offset": offset,
        "checksum": _checksum(descriptor, offset),
        "records": replay.log_number_read,
        "next_study_id": replay._next_study_id,
        "studies": [
            [study._study_id, study.study_name, study._directions, study.user_attrs, study.system_attrs]
            for study in replay.get_all_studies()
        ],
        "trials": [
            _trial_row(replay._trial_id_to_study_id[trial_id], trial, [index(d) for d in trial.distributions.values()])
            for trial_id, trial in replay._trials.items()
        ],
        "distributions": texts,
    }
    try:
        write_atomically(snapshot_file(journal), json.dumps(content, separators=(",", ":")))
    except OSError as error:
        log.info("no snapshot of %s was written: %s", journal, error)


def load(worker_id_prefix: str, journal: Path, descriptor: int) -> tuple[Replay, int] | None:
    """The state of the newest snapshot and the offset to go on from; None if there is none that fits the journal."""
    try:
        with snapshot_file(journal).open("rb") as file:
            if os.fstat(file.fileno()).st_uid not in (os.getuid(), os.fstat(descriptor).st_uid):
                return None
            with no_garbage_collection():
                content = json.load(file)
                if content["version"] != _VERSION or content["checksum"] != _checksum(descriptor, content["offset"]):
                    return None
                return _restore(worker_id_prefix, content), content["offset"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be used, the journal is replayed instead: %s", snapshot_file(journal), error)
        return None


def _checksum(descriptor: int, offset: int) -> int:
    start = max(0, offset - _CHECKED_BYTES)
    data = os.pread(descriptor, offset - start, start)
    return zlib.crc32(data) if len(data) == offset - start else -1


def _trial_row(study_id: int, trial: FrozenTrial, distributions: list[int]) -> list[Any]:
    return [
        study_id,
        trial.state.value,
        trial._values,
        trial._datetime_start and trial._datetime_start.timestamp(),
        trial.datetime_complete and trial.datetime_complete.timestamp(),
        trial.params,
        distributions,
        trial._user_attrs,
        trial._system_attrs,
        list(trial.intermediate_values),
        list(trial.intermediate_values.values()),
    ]


def _restore(worker_id_prefix: str, content: dict[str, Any]) -> Replay:
    replay = Replay(worker_id_prefix)
    replay.log_number_read = content["records"]
    replay._next_study_id = content["next_study_id"]
    for study_id, name, directions, user_attrs, system_attrs in content["studies"]:
        replay._studies[study_id] = FrozenStudy(
            study_name=name,
            direction=None,
            user_attrs=user_attrs,
            system_attrs=system_attrs,
            study_id=study_id,
            directions=[StudyDirection(direction) for direction in directions],
        )
    # deleted studies too: their trials keep their ids
    replay._study_id_to_trial_ids = {study_id: [] for study_id in range(content["next_study_id"])}
    distributions = [parse_distribution(text) for text in content["distributions"]]
    known = replay._known_distributions
    seen: tuple[int, list[int]] | None = None
    local = datetime.fromtimestamp
    for trial_id, row in enumerate(content["trials"]):
        study_id, state, values, start, complete, params, indices, user_attrs, system_attrs, steps, reports = row
        of_names = {name: distributions[i] for name, i in zip(params, indices, strict=True)}
        numbers = replay._study_id_to_trial_ids[study_id]
        values_of_steps = dict(zip(steps, reports, strict=True))
        fields = {
            "_number": len(numbers),
            "state": STATES[state],
            "_values": values,
            "_datetime_start": start and local(start),
            "datetime_complete": complete and local(complete),
            "_params": params,
            "_user_attrs": user_attrs,
            "_system_attrs": system_attrs,
            "intermediate_values": values_of_steps,
            "_distributions": of_names,
            "_trial_id": trial_id,
        }
        trial = LazyTrial.of(fields, earlier=values_of_steps)
        numbers.append(trial_id)
        replay._trials[trial_id] = trial
        replay._trial_id_to_study_id[trial_id] = study_id
        replay._by_number[study_id].append(trial)
        replay.note_state(study_id, trial)
        if "retry_history" in system_attrs:
            replay.note_lineage(study_id, trial)
        if (study_id, indices) != seen:  # nearly all trials have the same ones
            seen = (study_id, indices)
            for name in of_names.keys() - known[study_id].keys():
                known[study_id][name] = of_names[name]
    return replay
