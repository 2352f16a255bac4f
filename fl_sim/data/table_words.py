"""What a table was found to hold, in words: a note beside results, and a line for each column."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from fl_sim.data.checked import read_off_classes
from fl_sim.data.naming import OwnName
from fl_sim.data.spelling import spelling_by, told_doubles
from fl_sim.data.table_features import Feature
from fl_sim.data.table_roles import Roles
from fl_sim.data.testing_part import Held

_FEW: Final = 6  # names that a note lists


@dataclass(frozen=True)
class Told:
    """What is to be told.

    ``scales``: numbers are scaled by the records. ``dropped``: how many rows are left out, where the user ``drops``
    those with an empty cell. ``listed``: the user lists the classes; all others are read off the records.
    """

    roles: Roles
    features: tuple[Feature, ...]
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    held: Held
    scales: bool
    dropped: int
    listed: bool
    drops: bool
    counting: tuple[str, ...] = ()

    @cached_property
    def as_they_are(self) -> dict[str, None]:
        """Return the columns of numbers that have no range, in order."""
        kept = (feature.name for feature in self.features if not feature.categories and feature.bounds is None)
        return dict.fromkeys(kept)

    @property
    def test_part(self) -> str:
        """Say which records are for testing."""
        return self.held.told(self.roles.split, by_client=bool(self.clients))


def note(told: Told) -> str:
    """Return what stands beside results: one line, however many columns there are, and nothing that records say."""
    ranged = [feature.name for feature in told.features if feature.bounds is not None]
    categories = [f"{feature.name} ({feature.width})" for feature in told.features if feature.categories]
    unscaled = f"scaled by the training records' mean and deviation: {_some(told.as_they_are)}"
    parts = [
        f"label {told.roles.label}: {_some(told.classes) if told.listed else f'{len(told.classes)} classes'}",
        f"{len(told.clients):,} clients by {told.roles.client}" if told.clients else "",
        f"numbers scaled by their range: {_some(ranged)}" if ranged else "",
        (unscaled if told.scales else f"numbers as they are, not scaled: {_some(told.as_they_are)}")
        if told.as_they_are
        else "",
        f"categories: {_some(categories)}" if categories else "",
        told.test_part,
        f"records {_lacking(told)} are left out" if told.drops else "",
    ]
    return "; ".join(filter(None, parts))


def counted(told: Told) -> tuple[str, ...]:
    """Return what was counted and noticed among the records, which stands beside no result of a private run."""
    left_out = [f"{told.dropped:,} records {_lacking(told)} are left out"] if told.dropped else []
    return (*left_out, *_oddities(told))


def shown(told: Told) -> tuple[tuple[str, str], ...]:
    """Return (column, how it is read) for each, in the order of the file's features."""
    scaled = ", scaled by the mean and deviation of the training records" if told.scales else ""
    lines = [(told.roles.label, f"label: {', '.join(told.classes)}")]
    if told.clients:
        lines.append((told.roles.client, f"client: {len(told.clients):,} of them"))
    if told.roles.split:
        lines.append((told.roles.split, "says train or test"))
    for feature in told.features:
        is_scaled = scaled if feature.name in told.as_they_are else ""
        lines.append((feature.name, f"{feature.told()}{is_scaled}"))
    return tuple(lines)


def inferred(told: Told, own: OwnName) -> tuple[str, ...]:
    """Return what was taken for granted of the file, a line each."""
    spelling = spelling_by(own.option("decimal"), own.option("thousands"))
    roles = {"label": told.roles.label, "client": told.roles.client, "split": told.roles.split}
    by_name = [role for role, name in roles.items() if name and not own.option(role)]
    cells = {
        "csv": f"cells stand between signs called {own.option('delimiter') or 'comma'}; {spelling.told()}",
    }.get(own.kind, "types of columns are those that the file declares")
    numbers = [feature for feature in told.features if not feature.categories]
    kinds = f"{len(numbers):,} columns of numbers, {len(told.features) - len(numbers):,} of categories"
    return (
        cells,
        kinds,
        *([f"columns by their names: {', '.join(by_name)}"] if by_name else []),
        f"{len(told.classes):,} classes, in {_order(told.classes)}",
    )


def _order(classes: tuple[str, ...]) -> str:
    return "the order of their numbers" if all(name.lstrip("-").isdigit() for name in classes) else "alphabetical order"


def _oddities(told: Told) -> list[str]:
    """Say what looks like a mistake in the file, and is read as it stands."""
    found = [told_doubles("classes", told.classes), told_doubles("clients", told.clients, with_names=False)]
    found += [told_doubles(f"categories of {one.name}", one.categories) for one in told.features if not one.is_given]
    found += [f"column {name!r} numbers the rows: leave it out by data.drop={name}" for name in told.counting if name]
    if any(not one.name for one in told.features):
        rows = " and numbers the rows" if "" in told.counting else ""
        found.append(
            f"a column has no name{rows}, as the index that spreadsheets and DataFrame.to_csv write: leave it out by "
            "data.drop= with nothing behind, or give it a name"
        )
    return [one for one in found if one]


def read_off(told: Told) -> tuple[str, ...]:
    """Return what of all this was read off the records, with the settings that make it public."""
    inferred = [feature.name for feature in told.features if feature.categories and not feature.is_given]
    if not inferred:
        return read_off_classes(told.listed)
    categories = f"the categories of {_some(inferred)} (data.category.{inferred[0]}=A+B lists public ones)"
    return (*read_off_classes(told.listed), categories)


def _lacking(told: Told) -> str:
    return "with an empty cell or a class that is not listed" if told.listed else "with an empty cell"


def _some(names: Iterable[str]) -> str:
    found = [name or "''" for name in names]
    more = f" and {len(found) - _FEW} more" if len(found) > _FEW + 1 else ""
    return ", ".join(found if not more else found[:_FEW]) + more
