"""The report of a study: what its timeline says, that the page holds everything, and how it looks in a browser."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpcjobs.budget import claim, finish
from hpcjobs.config import RunConfig, StudyConfig, StudyFile
from hpcjobs.errors import UserError
from hpcjobs.failures import Failure, FailureClass
from hpcjobs.heartbeat import NodeReport
from hpcjobs.journal_records import encode
from hpcjobs.owners import Owner
from hpcjobs.paths import StudyPaths
from hpcjobs.report import dashboard_command, main, write_report
from hpcjobs.report_data import ReportData
from hpcjobs.report_html import page as page_of
from hpcjobs.report_search import _label_places, _short
from hpcjobs.report_style import require_matplotlib
from hpcjobs.report_timeline import node_hours_at, node_spans, read_spans, recoveries, spans_of
from hpcjobs.report_work import gantt
from hpcjobs.sampling import suggest
from hpcjobs.study import OpenStudy, create_study, open_study
from hpcjobs.text import number_text
from tests.cluster.daemons import free_ports
from tests.hpcjobs.night import make_night

OWNER = {"element": "7_0", "node": "gpu1", "worker": 2, "token": "t"}


def stamp(second: int) -> str:
    return f"2026-05-04T22:00:{second:02d}+00:00"


def owner(trial: int, worker: int = 2) -> dict[str, Any]:
    return {"trial_id": trial, "user_attr": {"hpcjobs:owner": {**OWNER, "worker": worker}}}


def begins(trial: int, second: int) -> dict[str, Any]:
    return {"trial_id": trial, "state": 0, "datetime_start": stamp(second)}


def ends(trial: int, state: int, second: int) -> dict[str, Any]:
    return {"trial_id": trial, "state": state, "datetime_complete": stamp(second)}


def failure(trial: int, kind: str) -> dict[str, Any]:
    return {"trial_id": trial, "user_attr": {"hpcjobs:failure": {"class": kind}}}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    return make_night(tmp_path_factory.mktemp("night") / "une <b>nuit</b> & co", trials=60)


@pytest.fixture(scope="module")
def page(night: StudyPaths) -> str:
    write_report(open_study(night), with_final=True)
    return night.report.read_text()


def test_each_stretch_of_work_is_a_span_with_how_it_ended() -> None:
    waiting = {"trial_id": 0, "state": 4}
    records = [
        owner(0), begins(0, 1), waiting, owner(1), begins(1, 5), ends(1, 2, 9), owner(0), begins(0, 10),
        failure(0, "diverged"), ends(0, 3, 12), owner(2), begins(2, 13),
    ]  # fmt: skip
    spans = spans_of(records, now=ends_at(20))
    assert [(span.trial, span.outcome, round(span.seconds)) for span in spans] == [
        (0, "handed back", 0), (1, "pruned", 4), (0, "failed", 2), (2, "running", 7),
    ]  # fmt: skip
    assert {(span.element, span.node, span.worker) for span in spans} == {("7_0", "gpu1", 2)}


def ends_at(second: int) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp(second)).timestamp()


def test_a_fault_of_the_machine_is_a_loss_and_the_time_until_the_worker_works_again_a_recovery() -> None:
    records = [
        owner(0),
        begins(0, 1),
        failure(0, "worker died"),
        ends(0, 3, 8),
        owner(1),
        begins(1, 20),
        ends(1, 1, 30),
    ]
    spans = spans_of(records, now=0.0)
    assert spans[0].outcome == "lost"
    assert [(span.outcome, span.seconds) for span in recoveries(spans)] == [("recovering", 12.0)]


def test_node_hours_grow_from_a_nodes_first_trial_to_its_last() -> None:
    records = [owner(0), begins(0, 0), owner(1, worker=3), begins(1, 10), ends(0, 1, 36), ends(1, 1, 46)]
    nodes = node_spans(spans_of(records, now=0.0))
    assert [(node.element, node.workers, round(node.hours * 3600)) for node in nodes] == [("7_0", 2, 46)]
    assert node_hours_at(nodes, ends_at(18)) * 3600 == pytest.approx(18)


def test_the_timeline_of_a_real_study_has_every_trial_once(studies: Any) -> None:
    study = studies.create("dying_once", trials=2)
    studies.launch(study)
    studies.finish(study)
    spans = read_spans(study.paths.journal, now=0.0)
    assert sorted(span.outcome for span in spans) == ["completed", "completed", "lost", "lost"]
    assert all(span.seconds >= 0 for span in spans)


def test_each_stretch_of_work_is_one_box_in_the_lane_of_its_worker(
    night: StudyPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_matplotlib()
    from matplotlib.collections import PolyCollection

    drawn = []
    monkeypatch.setattr("hpcjobs.report_work.save", lambda figure, path: drawn.append(figure))
    data = ReportData.of(open_study(night))
    gantt(data, tmp_path / "gantt.png")
    axes = drawn[0].axes[0]
    of = {boxes.get_label(): boxes.get_paths() for boxes in axes.collections if isinstance(boxes, PolyCollection)}
    assert set(of) == {span.outcome for span in [*data.spans, *data.recoveries]}
    for outcome, boxes in of.items():
        spans = [span for span in [*data.spans, *data.recoveries] if span.outcome == outcome]
        widths = sorted(box.get_extents().width for box in boxes)
        assert widths == pytest.approx(sorted(span.seconds / 60 for span in spans))
    lanes = {round(box.get_extents().y0 + 0.43) for boxes in of.values() for box in boxes}
    assert lanes == set(range(len({(span.element, span.worker) for span in data.spans})))
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] >= (data.end - data.start) / 60


def test_a_recovered_trial_counts_once(night: StudyPaths) -> None:
    data = ReportData.of(open_study(night))
    assert len(data.trials) == 60
    assert len(data.trials) == data.counts.budget
    assert data.counts.recovered > 0
    assert data.best is not None
    assert data.best.values[0] == max(value for _, value in data.best_so_far)
    assert sum(data.importances.values()) == pytest.approx(1.0)
    assert 0.5 < data.busy_share <= 1.0


def test_the_page_needs_nothing_beside_it(page: str) -> None:
    assert page.count("data:image/png;base64,") == 8
    assert not re.search(r"(src|href)='(?!data:)", page)
    assert "://" not in page


def test_the_value_has_the_name_that_the_objective_gave_it(page: str) -> None:
    assert "<span>best mAP</span>" in page
    assert "<th>mAP</th>" in page


def test_names_cannot_write_into_the_page(page: str, night: StudyPaths) -> None:
    assert "<b>nuit</b>" not in page
    assert "optuna-dashboard" in page


def test_best_trials_failures_and_cost_are_told(page: str, night: StudyPaths) -> None:
    data = ReportData.of(open_study(night))
    assert data.best is not None
    text = re.sub(r"<[^>]+>", " ", page)
    for wanted in (
        f"in trial {data.best.number}",
        "node-hours",
        "GPU-hours",
        "OutOfMemoryError",
        "60 of 60",
    ):
        assert wanted in text


def test_the_best_value_stands_beside_that_of_the_defaults(night: StudyPaths) -> None:
    data = ReportData.of(open_study(night))
    assert data.best is not None

    def shown(defaults: dict[str, Any]) -> str:
        return page_of(replace(data, file=data.file.model_copy(update={"defaults": defaults})), [], None, [], "")

    other = next(trial for trial in data.completed if trial.number != data.best.number)
    assert f"in trial {data.best.number}; the defaults: {number_text(other.values[0])}<" in shown(other.params)
    assert f"in trial {data.best.number}, with the defaults<" in shown(data.best.params)
    without = shown({})
    assert f"in trial {data.best.number}<" in without
    assert "<th>default</th>" not in without


def test_a_study_without_a_completed_trial_has_a_report(studies: Any) -> None:
    study = studies.create("quadratic")
    write_report(study, with_final=False)
    assert "No trial has completed yet" in study.paths.report.read_text()
    assert list(study.paths.figures.iterdir()) == []


def ended_study(folder: Path, end: Callable[[int], float | TrialState | None], **more: Any) -> OpenStudy:
    """A study whose trials end as ``end`` says of their numbers: with a value, without one, or not at all."""
    space = {name: {"type": "uniform", "min": 0.0, "max": 1.0} for name in more.pop("names", ("x", "y"))}
    settings = {"objective": "m:f", "parameters": space, "trials": 12, "epochs": 3, "stop_after_errors": 0, **more}
    file = StudyFile(name="s", study=StudyConfig.model_validate(settings), run=RunConfig(workers_per_node=1))
    study = create_study(StudyPaths(folder), file)
    me = Owner.of_this_process(element="7_0", agent="a", worker=0, token="t")
    for number in range(file.study.trials):
        trial_id = claim(study, me)
        assert trial_id is not None
        suggest(optuna.Trial(study.optuna_study(), trial_id), file.study)
        for epoch in (1, 2):
            study.storage.set_trial_intermediate_value(trial_id, epoch, float(number))
        match end(number):
            case float(value):
                finish(study, trial_id, "t", TrialState.COMPLETE, value=value)
            case TrialState() as state:
                finish(study, trial_id, "t", state, failure=Failure(FailureClass.OBJECTIVE, "<b>bad\nvalue"))
            case None:
                break
    return study


@pytest.mark.parametrize(
    ("end", "more", "figures"),
    [
        (lambda number: 0.5, {}, "curves gantt history parallel slices"),
        (lambda number: 0.0, {}, "curves gantt history parallel slices"),
        (
            lambda number: float("inf") if number == 3 else float(number),
            {},
            "curves gantt history importances parallel slices",
        ),
        (lambda number: 1e300 * (number - 5), {}, "curves gantt history importances parallel slices"),
        (float, {"names": ("x",)}, "curves gantt history parallel slices"),
        (float, {"trials": 1}, "curves gantt history parallel slices"),
        (
            float,
            {"names": [f"{n}_{'long' * 9}" for n in range(25)]},
            "curves gantt history importances parallel slices",
        ),
        (lambda number: TrialState.PRUNED, {}, "curves gantt"),
        (lambda number: TrialState.FAIL, {}, "curves failures gantt"),
        (lambda number: None, {}, "curves gantt"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning")
def test_an_unusual_study_has_the_figures_that_say_something(
    end: Callable[[int], float | TrialState | None], more: dict[str, Any], figures: str, tmp_path: Path
) -> None:
    study = ended_study(tmp_path / "study", end, **more)
    write_report(study, with_final=False)
    assert sorted(path.stem for path in study.paths.figures.iterdir()) == figures.split()
    page = study.paths.report.read_text()
    assert ("<h2>The best trials</h2>" in page) == ("history" in figures)
    assert "e-0" not in re.sub(r"base64,[^']*", "", page), "hours of a study of seconds read badly so"


def test_where_none_completed_the_page_tells_what_became_of_the_trials(tmp_path: Path) -> None:
    study = ended_study(tmp_path / "s", lambda number: TrialState.PRUNED if number else TrialState.FAIL, trials=3)
    write_report(study, with_final=False)
    assert "No trial has completed (3 trials ended: 2 pruned, 1 failed)" in study.paths.report.read_text()


@pytest.mark.parametrize(("state", "told", "hours"), [
    ("ended", "not finished: 11 trials left, no node runs", 0.0),
    ("running", "still running: 11 trials left", 10.0),
])  # fmt: skip
def test_time_goes_on_only_while_a_node_runs(state: str, told: str, hours: float, tmp_path: Path) -> None:
    """The second trial has begun and its node has gone without a word, ten hours ago by the clock of the file."""
    study = ended_study(tmp_path / "s", lambda number: None if number else 1.0)
    NodeReport("7_0", "a", "elsewhere", "n1", 1, "x", state=state).write(study.paths)
    then = time.time() - 36000
    lines = study.paths.journal.read_text().splitlines(keepends=True)
    stamps = re.compile(r'"(datetime_\w+)":"[^"]+"')
    text = datetime.fromtimestamp(then).isoformat(timespec="microseconds")
    moved = (encode(json.loads(stamps.sub(rf'"\1":"{text}"', line)), n) for n, line in enumerate(lines))
    study.paths.journal.write_bytes(b"".join(moved))
    os.utime(study.paths.journal, (then, then))
    study = open_study(study.paths)
    os.utime(study.paths.journal, (then, then))
    data = ReportData.of(study)
    assert data.node_hours == pytest.approx(hours, abs=0.1)
    write_report(study, with_final=False)
    assert told in study.paths.report.read_text()


@pytest.mark.parametrize(
    ("labels", "aslant"), [(["16", "32", "64"], False), (["a name", "another one", "a third"], True)]
)
def test_labels_that_would_overlap_stand_aslant(labels: list[str], aslant: bool) -> None:
    require_matplotlib()
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(1.9, 1.9))
    axes.set_position((0, 0.3, 1, 0.7))
    axes.set_xlim(-0.5, 2.5)
    _label_places(axes, labels, 1.9 / 3)
    texts = axes.get_xticklabels()
    assert [text.get_rotation() > 0 for text in texts] == [aslant] * 3
    if not aslant:
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in texts]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    pyplot.close(figure)


def test_a_long_name_is_cut_in_its_midst() -> None:
    assert [_short(text, 9) for text in ("optimiser", "optimiser_adam", 12)] == ["optimiser", "opti…adam", "12"]


@pytest.mark.parametrize(
    ("objective", "named", "note"),
    [("with_final", True, ""), ("quadratic", False, ""), ("nowhere:train", False, "no module 'nowhere'")],
)
def test_the_page_names_the_final_training_where_the_objective_has_one(
    objective: str, named: bool, note: str, studies: Any, tmp_path: Path
) -> None:
    """Called in another folder than the one where the objective lies."""
    study = studies.create(objective)
    command = [sys.executable, "-m", "hpcjobs.report", str(study.paths.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("hpcjobs.final" in study.paths.report.read_text()) == named
    assert ("note:" in done.stdout) == bool(note) and note in done.stdout


@pytest.mark.parametrize("epochs", [1, 2])
def test_there_are_curves_where_a_trial_has_more_than_one_epoch(studies: Any, epochs: int) -> None:
    study = studies.create("epochs", trials=1, epochs=epochs)
    studies.launch(study)
    studies.finish(study)
    write_report(study, with_final=False)
    assert (study.paths.figures / "curves.png").exists() == (epochs > 1)


def test_who_may_only_read_is_told_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = ended_study(tmp_path / "s", float, trials=2)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(UserError, match=r"you cannot write there.* a copy of it"):
        main([str(study.paths.folder)])
    assert not study.paths.results.exists()


def test_without_matplotlib_the_extra_is_named(night: StudyPaths) -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from hpcjobs import report, errors\n"
    program += f"sys.exit(errors.run_entry(lambda: report.main([{str(night.folder)!r}])))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "pip install 'hpcjobs[plots]'" in done.stderr


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium: sudo tests/cluster/install-packages.sh")
def test_a_browser_shows_the_page_without_sideways_scrolling(page: str, night: StudyPaths, tmp_path: Path) -> None:
    """Rendered at the width of a laptop: the document is no wider than the window, and no picture is broken."""
    script = """<script>addEventListener('load', () => { const images = [...document.images];
      document.title = [document.documentElement.scrollWidth <= innerWidth,
      images.length, images.every(i => i.naturalWidth > 500)].join() })</script></body>"""
    probe = tmp_path / "page.html"
    probe.write_text(page.replace("</body>", script))
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1366,768", "--dump-dom", probe.as_uri()],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "<title>true,8,true</title>" in done.stdout, done.stderr[-2000:]


@pytest.mark.skipif(not (Path(sys.executable).parent / "optuna-dashboard").exists(), reason="needs optuna-dashboard")
def test_the_command_for_the_dashboard_opens_the_study(night: StudyPaths) -> None:
    port = free_ports(1)
    program, *arguments = shlex.split(dashboard_command(night))
    command = [str(Path(sys.executable).parent / program), *arguments, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        end = time.monotonic() + 300
        while True:
            try:
                answer = json.loads(direct.open(f"http://127.0.0.1:{port}/api/studies", timeout=10).read())
                break
            except OSError:
                assert time.monotonic() < end and server.poll() is None, "the dashboard does not answer"
                time.sleep(0.3)
    finally:
        server.kill()
        server.wait()
    assert [study["study_name"] for study in answer["study_summaries"]] == ["experiment1"]
