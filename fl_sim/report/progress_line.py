"""One line of progress that is never wider than its terminal: what matters least is left out first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

_GAP: Final = 2
_BAR: Final = (4, 10, 30)
"""Cells of a bar: the fewest, the fewest where there is room for more, the most."""
_ROOMY: Final = 60
_TITLE: Final = 12
"""Cells that a title is cut to."""


@dataclass(frozen=True)
class Part:
    """A piece of a line. What has a higher ``rank`` is left out first; ``shortest``: cells that it may be cut to."""

    text: str
    rank: int
    shortest: int | None = None

    @property
    def least(self) -> int:
        """Return the cells that it takes at least."""
        whole = cell_len(self.text)
        return whole if self.shortest is None else min(whole, self.shortest)


class Line(ProgressColumn):
    """A whole line of rich's progress display: title, bar, and the Parts that the task's field ``parts`` returns."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        """Return the line, one cell narrower than the console, where some terminals would break it."""
        share = task.completed / task.total if task.total else 0.0
        return line(self._console.width - 1, task.description, share, task.fields["parts"]())


def line(width: int, title: str, share: float, parts: Sequence[Part]) -> Text:
    """Return title, bar (``share`` of it full) and ``parts`` in this order, in at most ``width`` cells.

    >>> str(line(40, "FedAvg on digits", 0.5, [Part("10/20", 0), Part("accuracy 0.5000", 1), Part("0:12 left", 2)]))
    '━━━━━  10/20  accuracy 0.5000  0:12 left'
    """
    told = [part for part in parts if part.text]
    bar = Part("━" * _BAR[2], 3, _BAR[width >= _ROOMY])
    every = [Part(title, 4, _TITLE), bar, *told]
    kept: list[Part] = []
    for part in sorted(every, key=lambda one: one.rank):
        if part.least and sum(one.least + _GAP for one in kept) + part.least <= width:
            kept.append(part)
    spare = width - sum(one.least + _GAP for one in kept) + _GAP
    text = Text(no_wrap=True, overflow="crop")
    for part in every:
        if part not in kept:
            continue
        more = min(spare, cell_len(part.text) - part.least)
        spare -= more
        cells = part.least + more
        text.append(" " * _GAP if text else "")
        if part is bar:
            full = round(share * cells)
            text.append("━" * full, "bar.complete").append("━" * (cells - full), "bar.back")
        else:
            whole = cell_len(part.text) <= cells
            text.append(part.text if whole else f"{set_cell_size(part.text, cells - 1).rstrip()}…")
    return text


def clock(seconds: float) -> str:
    """Return a length of time.

    >>> clock(75), clock(3675), clock(-3)
    ('1:15', '1:01:15', '0:00')
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
