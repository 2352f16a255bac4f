"""The layout of a heat map, which shows the results of a table for all values of two settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HeatMap:
    """The layout of a heat map, which shows a part of a table.

    ``column``: the column of the table whose results the map shows, such as a data set. ``title``: the name of this
    column, and the settings that are constant in this map. ``rows``, ``columns``: the names of the settings on the two
    axes. ``row_labels``, ``column_labels``: the values on the axes, in order. ``places``: {(row label, column label):
    row of the table}.
    """

    title: str
    column: str
    rows: str
    columns: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    places: Mapping[tuple[str, str], str]


def row_groups(maps: Sequence[HeatMap]) -> dict[str, str]:
    """Return {row of the table: the label of its row in a heat map, and the settings that are constant in this map}.

    All table rows that are shown in one row of a heat map have the same text. Notes below the table contain this text
    instead of a list of these table rows.
    """
    groups: dict[str, str] = {}
    for one in maps:
        others = one.title.removeprefix(one.column).removeprefix(", ")
        groups |= {row: ", ".join(filter(None, [label, others])) for (label, _), row in one.places.items()}
    return groups


def column_groups(maps: Sequence[HeatMap]) -> dict[str, str]:
    """Return {row of the table: label of the heat-map column} in which the result of this table row is shown."""
    return {row: label for one in maps for (_, label), row in one.places.items()}
