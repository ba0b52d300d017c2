"""Everything that a report tells of a study, as one value."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from functools import cached_property

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpcjobs.budget import RESULT, Counts, count, predecessor
from hpcjobs.config import LogUniform, Parameter, StudyFile
from hpcjobs.progress import StudyWatch, best_trial, ordered_by_value
from hpcjobs.report_timeline import NodeSpan, Span, node_hours_at, node_spans, read_spans, recoveries
from hpcjobs.status_look import look_again
from hpcjobs.study import OpenStudy

# so few completed trials say nothing of which parameter matters
FEWEST_FOR_IMPORTANCES = 10


@dataclass(frozen=True)
class ReportData:
    """A study at one moment. ``trials`` are those of the budget: a recovered trial is left to its successor.

    ``nodes_run``: whether anybody works on it. If not, what began and did not end was lost at the latest with the
    journal's last record.
    """

    file: StudyFile
    trials: list[FrozenTrial]
    counts: Counts
    best: FrozenTrial | None
    spans: list[Span]
    importances: dict[str, float]
    nodes_run: bool

    @classmethod
    def of(cls, study: OpenStudy) -> ReportData:
        everything = study.trials()
        watched = StudyWatch(study)
        nodes_run = look_again(study.paths, watched, watched.look()).live_nodes > 0
        now = time.time() if nodes_run else study.paths.journal.stat().st_mtime
        continued = {predecessor(trial) for trial in everything}
        return cls(
            file=study.file,
            trials=[trial for trial in everything if trial.number not in continued],
            counts=count(study),
            best=best_trial(study),
            spans=read_spans(study.paths.journal, now),
            importances=importances(study),
            nodes_run=nodes_run,
        )

    @property
    def maximise(self) -> bool:
        return self.file.study.direction == "maximize"

    @property
    def parameters(self) -> dict[str, Parameter]:
        return self.file.study.parameters

    def is_log(self, name: str) -> bool:
        space = self.parameters[name]
        return isinstance(space, LogUniform) or bool(getattr(space, "log", False))

    @cached_property
    def completed(self) -> list[FrozenTrial]:
        return [trial for trial in self.trials if trial.state == TrialState.COMPLETE and trial.values]

    @cached_property
    def best_so_far(self) -> list[tuple[float, float]]:
        """(time, best value until then) at each completed trial in order; seconds since the epoch."""
        ended = [(trial.datetime_complete.timestamp(), trial.values[0]) for trial in self.completed
                 if trial.datetime_complete is not None]  # fmt: skip
        better = max if self.maximise else min
        steps: list[tuple[float, float]] = []
        for moment, value in sorted(ended):
            steps.append((moment, better(value, steps[-1][1]) if steps else value))
        return steps

    @cached_property
    def nodes(self) -> list[NodeSpan]:
        return node_spans(self.spans)

    @cached_property
    def recoveries(self) -> list[Span]:
        return recoveries(self.spans)

    @property
    def start(self) -> float:
        return min((node.start for node in self.nodes), default=0.0)

    @property
    def end(self) -> float:
        return max((node.end for node in self.nodes), default=0.0)

    @property
    def node_hours(self) -> float:
        return sum(node.hours for node in self.nodes)

    @property
    def gpu_hours(self) -> float:
        """Hours of whole GPUs that the nodes were held, whatever their partition mode; 0 where there were none."""
        cluster = self.file.cluster
        return self.node_hours * (cluster.gpus_per_node if cluster is not None else 0)

    @property
    def busy_hours(self) -> float:
        """Hours of workers that were at work on a trial."""
        return sum(span.seconds for span in self.spans) / 3600

    @property
    def busy_share(self) -> float:
        """Share of the workers' time that went into trials."""
        held = sum(node.hours * node.workers for node in self.nodes)
        return self.busy_hours / held if held else 0.0

    def node_hours_until(self, moment: float) -> float:
        return node_hours_at(self.nodes, moment)

    def figures(self, trial: FrozenTrial) -> dict[str, float]:
        """What the objective reported beside its value at the end of the trial."""
        found: dict[str, float] = (trial.user_attrs.get(RESULT) or {}).get("figures", {})
        return found


def importances(study: OpenStudy) -> dict[str, float]:
    """How much each parameter decides over the value, adding up to 1; empty where too little is known.

    By PED-ANOVA (Watanabe et al. 2023): which parameters part the best tenth of the trials from all. It needs neither
    scikit-learn nor a fitted model, and bears parameters of any kind. Nothing is said of a single parameter, nor where
    the best tenth is as good as the worst trial.
    """
    ordered = ordered_by_value(study.trials((TrialState.COMPLETE,)), study.file.study.direction)
    if len(ordered) < FEWEST_FOR_IMPORTANCES or len(study.file.study.parameters) < 2:
        return {}
    if ordered[math.ceil(len(ordered) / 10) - 1].values[0] == ordered[-1].values[0]:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study.optuna_study(), evaluator=evaluator)
    total = sum(found.values())
    return {name: value / total for name, value in found.items()} if total > 0 else {}
