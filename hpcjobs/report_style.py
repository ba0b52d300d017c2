"""How the figures of a report look, and matplotlib itself, which only reports need."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcjobs.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# colours that people with any colour vision tell apart (Okabe and Ito)
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, GREY, INK = "#cc79a7", "#56b4e9", "#b8bfc8", "#222833"
OUTCOMES = {
    "completed": GREEN,
    "pruned": SKY,
    "failed": RED,
    "lost": PURPLE,
    "handed back": ORANGE,
    "running": BLUE,
    "recovering": INK,
}
COLOURS = "viridis"
WIDTH = 9.6

_STYLE: dict[str, Any] = {
    "figure.dpi": 130,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a93a0",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
    "text.color": INK,
    "xtick.color": "#5a6472",
    "ytick.color": "#5a6472",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def require_matplotlib() -> None:
    """Raises UserError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "the figures need matplotlib, which is not installed; install the extra: pip install 'hpcjobs[plots]'"
        ) from None
    matplotlib.use("Agg")


def style() -> AbstractContextManager[None]:
    """Within it, figures look as reports want them."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]  # its type lists every key that there is


def new_figure(height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, Any]:
    """A figure of the page's width with its axes, laid out so that nothing overlaps."""
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **more)


def save(figure: Figure, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path)
    pyplot.close(figure)


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which so long a time is shown, and its seconds."""
    if seconds >= 3 * 3600:
        return "h", 3600.0
    return ("min", 60.0) if seconds >= 180 else ("s", 1.0)


def rank_limits(values: list[float], worst_share: float = 0.1) -> tuple[float, float]:
    """Limits of an axis that show all but the worst outliers: a diverged trial must not flatten all others."""
    ordered = sorted(value for value in values if math.isfinite(value)) or [0.0]
    margin = max(int(len(ordered) * worst_share), 0)
    low, high = ordered[margin], ordered[-1 - margin] if len(ordered) > 2 * margin else ordered[-1]
    spread = (high - low) or abs(high) or 1.0
    return max(ordered[0], low - 1.5 * spread), min(ordered[-1], high + 1.5 * spread)


Painter = Callable[[Any, Path], None]
