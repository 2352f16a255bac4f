"""The layout of a heat map of a table. The table's plan makes it, and a report draws it."""

from collections.abc import Mapping, Sequence
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


def row_groups(maps: Sequence[HeatMap]) -> dict[str, str]:
    """Return {row of the table: its row label in the heat maps, and the settings with one value in its map}.

    A text below the table then names one line of a map in place of all its rows.
    """
    groups: dict[str, str] = {}
    for one in maps:
        others = one.title.removeprefix(one.column).removeprefix(", ")
        groups |= {row: ", ".join(filter(None, [label, others])) for (label, _), row in one.places.items()}
    return groups


def column_groups(maps: Sequence[HeatMap]) -> dict[str, str]:
    """Return {row of the table: its column label in the heat maps}."""
    return {row: label for one in maps for (_, label), row in one.places.items()}
