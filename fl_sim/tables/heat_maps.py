"""The layout of a table's heat maps: it assigns each row of the table to a cell of a heat map."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pydantic import model_validator

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.report.heat_map import HeatMap
from fl_sim.settings import Settings

METHOD = "algorithm"
"""Name of the axis whose values are the methods: the labels of the entries of ``grid.algorithm``."""


class HeatMapAxes(Settings):
    """The axes of a table's heat maps: two settings of [grid], such as "aggregator" and "attack".

    A report draws one heat map of the table's measure for each column of the table, and for each combination of the
    other settings of [grid]. ``rows``: the setting whose values are the rows of the map. ``columns``: the setting whose
    values are the columns of the map. "algorithm" stands for the entries of ``grid.algorithm``, with their labels.
    """

    rows: str
    columns: str

    @model_validator(mode="after")
    def _differ(self) -> "HeatMapAxes":
        if self.rows == self.columns:
            raise ValueError(f"rows and columns are both {self.rows}: give two different settings of the grid")
        return self


class MappedRow(NamedTuple):
    """A row of the table. ``method``: the row's method, or the user's label. ``values``: {setting in [grid]: value}."""

    name: str
    method: str
    values: Mapping[str, str]


def heat_maps_of(axes: HeatMapAxes, rows: Iterable[MappedRow], columns: Sequence[str]) -> tuple[HeatMap, ...]:
    """Return the layout of all heat maps of a table with these ``rows`` and ``columns``.

    Raises UserError if an axis is not a setting of [grid].
    """
    given = list(rows)
    known = [METHOD, *dict.fromkeys(key for row in given for key in row.values)]
    for name, wanted in (("rows", axes.rows), ("columns", axes.columns)):
        if wanted not in known:
            raise UserError(
                f"heat_map.{name} = {shortened(repr(wanted))}: no setting of the grid has this name"
                f"{guess(wanted, known)}; settings are {', '.join(known)}"
            )
    parts: dict[str, dict[tuple[str, str], str]] = {}
    for row in given:
        values = {METHOD: row.method, **row.values}
        place = (values.pop(axes.rows, "-"), values.pop(axes.columns, "-"))
        method = values.pop(METHOD, "")
        others = [method] if len({one.method for one in given}) > 1 and method else []
        others += [f"{key}={value}" for key, value in values.items()]
        parts.setdefault(", ".join(others), {})[place] = row.name
    return tuple(
        HeatMap(", ".join(filter(None, [column, others])), column, axes.rows, axes.columns, *_ordered(places), places)
        for column in columns
        for others, places in parts.items()
    )


def _ordered(places: Iterable[tuple[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    each = list(places)
    return tuple(dict.fromkeys(row for row, _ in each)), tuple(dict.fromkeys(column for _, column in each))
