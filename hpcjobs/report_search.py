"""Figures of what was searched and found: history, parameters, curves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

from hpcjobs.config import Categorical
from hpcjobs.progress import ordered_by_value
from hpcjobs.report_data import ReportData
from hpcjobs.report_style import (
    BLUE,
    COLOURS,
    GREY,
    INK,
    RED,
    WIDTH,
    new_figure,
    rank_limits,
    save,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# more lines than these are a carpet
MOST_LINES = 300
MOST_CURVES = 1000
# longer names are cut
LONGEST_NAME, LONGEST_CHOICE = 28, 14
# inches: of a figure of four slices side by side, of a character for each point of its size, between labels aslant
SLICE_WIDTH, INCHES_A_POINT, NEAREST_ASLANT = 1.9, 0.0085, 0.17


def history(data: ReportData, path: Path) -> None:
    """Every trial's value and the best so far, over time and over node-hours."""
    figure, (left, right) = new_figure(3.3, columns=2, sharey=True, width_ratios=(1, 1))
    unit, seconds = time_unit(data.end - data.start)
    ended = [trial for trial in data.completed if trial.datetime_complete is not None]
    moments = [trial.datetime_complete.timestamp() for trial in ended if trial.datetime_complete]
    values = [trial.values[0] for trial in ended]
    best_moments = [moment for moment, _ in data.best_so_far]
    best_values = [value for _, value in data.best_so_far]
    for axes, scaled in (
        (left, lambda moment: (moment - data.start) / seconds),
        (right, data.node_hours_until),
    ):
        axes.scatter([scaled(m) for m in moments], values, s=13, color=GREY, label="completed trial")
        axes.step(
            [scaled(m) for m in best_moments], best_values, where="post", color=BLUE, linewidth=2, label="best so far"
        )
        if best_moments:
            axes.plot(scaled(data.end), best_values[-1], ".", color=BLUE)
            axes.hlines(best_values[-1], scaled(best_moments[-1]), scaled(data.end), color=BLUE, linewidth=2)
    left.set_xlim(left=0)
    right.set_xlim(left=0)
    left.set(title="Over time", xlabel=f"time since the first trial ({unit})", ylabel=data.file.value_name)
    right.set(title="Over cost", xlabel="node-hours")
    if values:
        left.set_ylim(*_padded(rank_limits(values)))
    left.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)  # above: inside it would hide trials
    save(figure, path)


def curves(data: ReportData, path: Path) -> None:
    """What trials reported after each epoch. Pruned ones end early, in red."""
    figure, axes = new_figure(3.6)
    best = data.best.number if data.best else None
    reported = [trial for trial in data.trials if trial.intermediate_values]
    every = math.ceil(len(reported) / MOST_CURVES)
    shown = sorted(reported[::every], key=lambda trial: trial.state != TrialState.COMPLETE) if reported else []
    values: list[float] = []
    for trial in shown:
        points = sorted(trial.intermediate_values.items())
        values += [value for _, value in points]
        steps, heights = [step for step, _ in points], [value for _, value in points]
        if trial.number == best:
            continue
        if trial.state == TrialState.PRUNED:
            axes.plot(steps, heights, color=RED, linewidth=0.8, alpha=0.5, marker="x", markevery=[-1], markersize=4)
        elif trial.state == TrialState.COMPLETE:
            axes.plot(steps, heights, color=BLUE, linewidth=0.8, alpha=0.35)
        else:
            axes.plot(steps, heights, color=GREY, linewidth=0.8)
    if data.best is not None and data.best.intermediate_values:
        points = sorted(data.best.intermediate_values.items())
        axes.plot(*zip(*points, strict=True), color=INK, linewidth=2.2)
    states = [trial.state for trial in shown]
    for colour, label, present in (
        (INK, f"best: trial {best}", data.best is not None),
        (BLUE, "completed", TrialState.COMPLETE in states),
        (RED, "pruned", TrialState.PRUNED in states),
        (GREY, "failed or not ended", bool({TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING} & set(states))),
    ):
        if present:
            axes.plot([], [], color=colour, label=label)
    of_which = f" of one trial in {every}" if every > 1 else ""
    axes.set(title=f"Intermediate values{of_which}", xlabel="epoch", ylabel=data.file.value_name)
    axes.locator_params(axis="x", integer=True)
    if values:
        axes.set_ylim(*_padded(rank_limits(values, 0.02)))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def importances(data: ReportData, path: Path) -> None:
    """Share of each parameter in what decides over the value."""
    ordered = sorted(data.importances.items(), key=lambda item: item[1])
    figure, axes = new_figure(0.9 + 0.28 * len(ordered))
    axes.barh([name for name, _ in ordered], [share for _, share in ordered], color=BLUE, height=0.65)
    for row, (_, share) in enumerate(ordered):
        axes.text(share, row, f" {share:.0%}", va="center", fontsize=8)
    axes.set(title="Importance of each parameter (PED-ANOVA)", xlim=(0, max(share for _, share in ordered) * 1.12))
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(visible=False, axis="y")
    save(figure, path)


def slices(data: ReportData, path: Path) -> None:
    """The value over each parameter by itself; later trials are brighter. Pruned ones, whose last values are of other
    epochs, are ticks at the foot: where the search has been."""
    from matplotlib.ticker import MaxNLocator

    names = list(data.parameters)
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure, grid = new_figure(0.5 + 2.1 * rows, rows, columns, sharey=True, squeeze=False)
    values = [trial.values[0] for trial in data.completed]
    pruned = [trial for trial in data.trials if trial.state == TrialState.PRUNED]
    points = None
    for axes, name in zip(grid.flat, names, strict=False):
        own = [trial for trial in data.completed if name in trial.params]
        places = [_place(data, name, trial.params[name]) for trial in own]
        heights = [trial.values[0] for trial in own]
        points = axes.scatter(
            places, heights, c=[trial.number for trial in own], s=12 if len(own) < 1000 else 3, cmap=COLOURS
        )
        places = [_place(data, name, trial.params[name]) for trial in pruned if name in trial.params]
        foot = axes.get_xaxis_transform()
        axes.plot(places, [0.02] * len(places), "|", markersize=7, color=GREY, alpha=0.6, transform=foot)
        if data.best is not None and name in data.best.params:
            axes.plot(
                _place(data, name, data.best.params[name]), data.best.values[0], "*", markersize=13, color=RED,
                markeredgecolor="white",
            )  # fmt: skip
        _scale_x(axes, data, name)
        axes.set_xlabel(name)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_axis_off()
    if values:
        grid.flat[0].set_ylim(*_padded(rank_limits(values)))
    for row in grid:
        row[0].set_ylabel(data.file.value_name)
    if points is not None:
        figure.colorbar(points, ax=grid, label="trial", pad=0.01, aspect=40).locator = MaxNLocator(integer=True)
    save(figure, path)


def parallel(data: ReportData, path: Path) -> None:
    """A line for each completed trial through its parameters to its value; the better ones on top."""
    import matplotlib
    from matplotlib.colors import Normalize

    names = [*data.parameters]
    figure, axes = new_figure(4.0)
    worst_first = ordered_by_value(data.completed, data.file.study.direction)[:MOST_LINES][::-1]
    low, high = rank_limits([trial.values[0] for trial in worst_first]) if worst_first else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1)
    colours = matplotlib.colormaps[COLOURS if data.maximise else f"{COLOURS}_r"]
    for trial in worst_first:
        heights = [_unit(data, name, trial) for name in names] + [min(1.0, max(0.0, float(norm(trial.values[0]))))]
        is_best = data.best is not None and trial.number == data.best.number
        axes.plot(
            heights, color=RED if is_best else colours(norm(trial.values[0])), linewidth=2.4 if is_best else 0.9,
            alpha=1.0 if is_best else 0.6, clip_on=False,
        )  # fmt: skip
    for place, name in enumerate(names):
        first, last = _ends(data, name)
        axes.text(place, -0.04, first, ha="center", va="top", fontsize=7.5)
        axes.text(place, 1.03, last, ha="center", va="bottom", fontsize=7.5)
    axes.text(len(names), -0.04, f"{low:.4g}", ha="center", va="top", fontsize=7.5)
    axes.text(len(names), 1.03, f"{high:.4g}", ha="center", va="bottom", fontsize=7.5)
    labels = [_short(label, LONGEST_NAME) for label in (*names, data.file.value_name)]
    _label_places(axes, labels, (WIDTH - 1) / len(labels), size=9.5)
    axes.tick_params(axis="x", pad=20, length=0)
    axes.set_yticks([])
    axes.set_ylim(0, 1)
    axes.margins(x=0.03)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=True, axis="x", color="#c3c9d1")
    number = len(data.completed)
    which = "Completed trials" if number <= MOST_LINES else f"The best {MOST_LINES} of {number} completed trials"
    axes.set_title(f"{which}; the best one thick", pad=22)
    save(figure, path)


def _padded(limits: tuple[float, float]) -> tuple[float, float]:
    margin = 0.05 * ((limits[1] - limits[0]) or abs(limits[0]) or 1.0)
    return limits[0] - margin, limits[1] + margin


def _place(data: ReportData, name: str, value: Any) -> Any:
    """Where a value stands on its axis: choices by their number."""
    space = data.parameters[name]
    return space.values.index(value) if isinstance(space, Categorical) else value


def _scale_x(axes: Axes, data: ReportData, name: str) -> None:
    space = data.parameters[name]
    if isinstance(space, Categorical):
        axes.set_xlim(-0.5, len(space.values) - 0.5)
        _label_places(axes, [_short(value, LONGEST_CHOICE) for value in space.values], SLICE_WIDTH / len(space.values))
    elif data.is_log(name):
        axes.set_xscale("log")
        _label_few_ticks(axes)
    else:
        axes.locator_params(axis="x", nbins=4)


def _label_places(axes: Axes, labels: list[str], width: float, size: float = 9.0) -> None:
    """Labels for the places 0, 1, ... of an axis, each of which has so many inches: aslant where they would overlap,
    and then not all of them, if there are too many."""
    lines_up = max(map(len, labels)) * INCHES_A_POINT * size <= width
    every = 1 if lines_up else math.ceil(NEAREST_ASLANT / width)
    style: dict[str, Any] = {} if lines_up else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(0, len(labels), every), labels[::every], fontsize=size if lines_up else 7.5, **style)


def _short(value: object, longest: int) -> str:
    """As text that is no longer; cut in its midst, since names often differ at their ends."""
    text = str(value)
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[-half:]}"


def _label_few_ticks(axes: Axes) -> None:
    """On a logarithmic axis three labels at most: matplotlib's own run into each other on an axis this narrow."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

    low, high = axes.get_xlim()
    steps = (1,) if high > 100 * low else (1, 3) if high > 10 * low else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    inside = [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
    if len(inside) < 2:  # less than a decade
        inside = [tick for tick in MaxNLocator(3).tick_values(low, high) if low <= tick <= high]
    axes.xaxis.set_major_locator(FixedLocator(inside[:: math.ceil(len(inside) / 3)]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _unit(data: ReportData, name: str, trial: FrozenTrial) -> float:
    """A trial's parameter on the way from the lower to the upper end of its range; nan where it has none."""
    if name not in trial.params:
        return float("nan")
    value, space = trial.params[name], data.parameters[name]
    if isinstance(space, Categorical):
        return space.values.index(value) / (len(space.values) - 1)
    low, high = float(space.min), float(space.max)
    if data.is_log(name):
        value, low, high = math.log(value), math.log(low), math.log(high)
    return float((value - low) / (high - low))


def _ends(data: ReportData, name: str) -> tuple[str, str]:
    space = data.parameters[name]
    if isinstance(space, Categorical):
        return _short(space.values[0], LONGEST_CHOICE), _short(space.values[-1], LONGEST_CHOICE)
    return f"{space.min:.4g}", f"{space.max:.4g}"
