"""Figures of how the machine was used: who did what when, how fast, and what failed."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from pathlib import Path

from hpcjobs.report_data import ReportData
from hpcjobs.report_style import BLUE, GREEN, OUTCOMES, RED, new_figure, save, time_unit

# lanes of a node get thinner until this many inches of all nodes together
TALLEST = 9.0
# white edges between trials would hide thinner lanes
MOST_WITH_EDGES = 100


def gantt(data: ReportData, path: Path) -> None:
    """A lane for each worker of each node: at work, by how the work ended, recovering, or idle (blank)."""
    from matplotlib.collections import PolyCollection

    lanes = {
        key: row for row, key in enumerate(sorted({(_order(data, span.element), span.worker) for span in data.spans}))
    }
    edge = 0.4 if len(lanes) <= MOST_WITH_EDGES else 0.0
    unit, seconds = time_unit(data.end - data.start)
    height = min(TALLEST, 1.6 + 0.16 * len(lanes))
    figure, (axes, below) = new_figure(height + 1.1, rows=2, sharex=True, height_ratios=(height, 1.2))
    for outcome, colour in OUTCOMES.items():
        own = [span for span in [*data.spans, *data.recoveries] if span.outcome == outcome]
        if not own:
            continue
        # one collection: a bar of its own for each of ten thousand trials takes matplotlib half a minute
        boxes = []
        for span in own:
            row, half = lanes[_order(data, span.element), span.worker], 0.43 if edge else 0.5
            left, right = ((moment - data.start) / seconds for moment in (span.start, span.end))
            boxes.append([(left, row - half), (left, row + half), (right, row + half), (right, row - half)])
        axes.add_collection(
            PolyCollection(
                boxes, facecolors=colour, label=outcome, linewidths=edge, edgecolors="white",
                alpha=0.55 if outcome == "recovering" else 1.0, hatch="////" if outcome == "recovering" else None,
            )
        )  # fmt: skip
    for node in data.nodes:
        rows = [row for (order, _), row in lanes.items() if order == _order(data, node.element)]
        axes.axhline(min(rows) - 0.5, color="#8a93a0", linewidth=0.8)
        label = f"{node.node}\n{node.element}" if len(rows) > 3 else f"{node.node} {node.element}"
        axes.text(-0.01, (min(rows) + max(rows)) / 2, label, transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontsize=8)  # fmt: skip
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.set_title(f"What each worker did; {data.busy_share:.0%} of their time went into trials", pad=20)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(OUTCOMES), borderaxespad=0.1)
    moments, busy = _steps([(span.start, span.end, 1.0) for span in data.spans])
    below.fill_between([(m - data.start) / seconds for m in moments], busy, step="post", color=GREEN, alpha=0.7)
    below.set(xlabel=f"time since the first trial ({unit})", ylabel="busy workers")
    below.set_ylim(bottom=0)
    below.set_xlim(left=0)
    save(figure, path)


def speed(data: ReportData, path: Path) -> None:
    """Images per second of all workers together over time, and of the single trials."""
    rates = {trial.number: data.figures(trial).get("images_per_s") for trial in data.trials}
    figure, (left, right) = new_figure(2.7, columns=2, width_ratios=(2, 1))
    unit, seconds = time_unit(data.end - data.start)
    moments, sums = _steps([(span.start, span.end, rates.get(span.trial) or 0.0) for span in data.spans])
    left.fill_between([(m - data.start) / seconds for m in moments], sums, step="post", color=BLUE, alpha=0.7)
    left.set(title="All workers together", xlabel=f"time since the first trial ({unit})", ylabel="images/s")
    left.set_ylim(bottom=0)
    left.set_xlim(left=0)
    right.hist([rate for rate in rates.values() if rate], bins=20, color=BLUE)
    right.set(title="Single trials", xlabel="images/s", ylabel="trials")
    right.locator_params(axis="y", integer=True)
    save(figure, path)


def failures(data: ReportData, path: Path) -> None:
    """How many trials failed, by class; those that a fault of the machine took went on under a new number."""
    counted = Counter(data.counts.failures).most_common()[::-1]
    figure, axes = new_figure(0.9 + 0.3 * len(counted))
    axes.barh([kind for kind, _ in counted], [number for _, number in counted], color=RED, height=0.6)
    for row, (_, number) in enumerate(counted):
        axes.text(number, row, f" {number}", va="center", fontsize=8)
    axes.set_title("Failures by class")
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=False, axis="y")
    save(figure, path)


def _order(data: ReportData, element: str) -> int:
    return next(index for index, node in enumerate(data.nodes) if node.element == element)


def _steps(pieces: list[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """The sum of ``(start, end, height)`` over time, as moments and the height from each on."""
    changes = sorted([(start, height) for start, _, height in pieces] + [(end, -height) for _, end, height in pieces])
    return [moment for moment, _ in changes], list(accumulate(change for _, change in changes))
