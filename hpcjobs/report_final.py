"""The figure of the final trainings: how they went, and what they reached with each seed."""

from __future__ import annotations

from pathlib import Path

from hpcjobs.final_plan import BEST, DEFAULT, FinalPlan
from hpcjobs.final_results import PERCENT, FinalResults, completed
from hpcjobs.report_style import BLUE, GREY, INK, new_figure, save, style
from hpcjobs.study import OpenStudy

_COLOURS = {DEFAULT: "#7a8491", BEST: BLUE}


def final_figure(study: OpenStudy, plan: FinalPlan, results: FinalResults, path: Path) -> None:
    """On the left what the trainings reported after each epoch; on the right every figure of every seed."""
    from matplotlib.ticker import MaxNLocator

    with style():
        figure, (left, right) = new_figure(3.4, columns=2)
        for trial in completed(study):
            # the last report may be the test's figure itself, on another scale than those of the training
            points = [item for item in sorted(trial.intermediate_values.items()) if item[1] != trial.values[0]]
            setting = plan.setting_of(trial.params)
            if points and setting is not None:
                colour = _COLOURS[setting]
                left.plot(*zip(*points, strict=True), color=colour, alpha=0.8, marker="o" if len(points) < 3 else None)
        if not left.lines:
            left.text(0.5, 0.5, "nothing before the test", ha="center", color=GREY, transform=left.transAxes)
        left.set(title="While training", xlabel="epoch", ylabel="reported value")
        left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        names = results.names
        for offset, setting in ((-0.12, DEFAULT), (0.12, BEST)):
            own = results.figures.get(setting)
            if own is None:
                continue
            colour = _COLOURS[setting]
            for place, name in enumerate(names):
                if name not in own:
                    continue
                scale = 100 if name in PERCENT else 1
                values = [scale * value for value in own[name].values]
                right.scatter([place + offset] * len(values), values, s=16, color=colour, alpha=0.6)
                mean = scale * own[name].mean
                right.hlines(mean, place + offset - 0.09, place + offset + 0.09, color=colour, linewidth=2.2)
                text = f"{mean:.1f}" if name in PERCENT else f"{mean:.4g}"
                side = 1 if offset > 0 else -1
                right.annotate(
                    text, (place + offset, mean), (10 * side, 0), textcoords="offset points", fontsize=7.5, color=INK,
                    ha="left" if side > 0 else "right", va="center",
                )  # fmt: skip
            right.plot([], [], color=colour, label=setting)
        right.set_xticks(range(len(names)), [PERCENT.get(name, name) for name in names])
        right.set_xlim(-0.6, len(names) - 0.4)
        right.set_title("Tested once; a dot is a seed, a line the mean")
        right.grid(visible=False, axis="x")
        right.legend(loc="best")
        right.spines["bottom"].set_color(GREY)
        save(figure, path)
