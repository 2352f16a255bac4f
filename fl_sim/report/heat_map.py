"""The layout of a heat map of a table. The table's plan makes it, and a report draws it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class HeatMap:
    """The layout of a heat map, which shows a part of a table.

    ``title``: the column of the table, and settings with one value in this map. ``column``: the column of the table.
    ``rows``, ``columns``: the names of the axes. ``row_labels``, ``column_labels``: the values on the axes, in order.
    ``places``: {(row label, column label): row of the table}.
    """

    title: str
    column: str
    rows: str
    columns: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    places: Mapping[tuple[str, str], str]
