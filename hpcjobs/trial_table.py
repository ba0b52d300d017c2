"""The best trials as a table that fits the terminal: no cell is ever broken."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hpcjobs.text import counted, number_text

_GAP = 2


class TrialTable:
    """Trials, best first, with as many of their parameters as the width allows; it says how many it leaves out."""

    def __init__(
        self, title: str, trials: Sequence[FrozenTrial], value_name: str, parameters: Sequence[str], where: object
    ) -> None:
        """``where``: the file that has all columns."""
        self._title, self._trials, self._where = title, trials, where
        self._front = [
            ("trial", [str(trial.number) for trial in trials]),
            (value_name, [number_text(trial.values[0]) for trial in trials]),
            ("epochs", [str(len(trial.intermediate_values)) for trial in trials]),
        ]
        self._parameters = [(name, [number_text(trial.params.get(name)) for trial in trials]) for name in parameters]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self._front)
        width = sum(_width(name, cells) + _GAP for name, cells in shown)
        for name, cells in self._parameters:
            width += _width(name, cells) + _GAP
            if width - _GAP > options.max_width:
                break
            shown.append((name, cells))
        table = Table(box=None, padding=(0, _GAP, 0, 0))
        for name, _ in shown:
            table.add_column(name, justify="right", no_wrap=True, header_style="bold")
        for row in zip(*(cells for _, cells in shown), strict=True):
            pruned = self._trials[int(table.row_count)].state.name == "PRUNED"
            table.add_row(*row, style="dim" if pruned else "")
        yield Text(self._title, style="bold")
        yield table
        hidden = len(self._front) + len(self._parameters) - len(shown)
        if hidden:
            yield Text(f"and {counted(hidden, 'more parameter')} of each in {self._where}", style="dim")


def _width(name: str, cells: Sequence[str]) -> int:
    return max(len(name), *map(len, cells))
