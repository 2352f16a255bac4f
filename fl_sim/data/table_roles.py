"""What each column of a table is for, as the name of the data set says: label, client, test part, or a feature."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fl_sim.data.columns import MOST_CATEGORIES, MOST_CLASSES, MOST_CLIENTS, Seen, Survey, as_number
from fl_sim.data.naming import OwnName
from fl_sim.data.spelling import spelling_by
from fl_sim.data.table_file import TableFile
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

_PARTS = 10  # different entries of a column that says train or test
_COMMA: Final = re.compile(r"[+-]?\d*,\d+|\d+")  # a number with a decimal comma


@dataclass(frozen=True)
class Roles:
    """Columns by what they are for; ``client`` and ``split`` are empty where there is no such column."""

    label: str
    client: str
    split: str
    features: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all that is read."""
        return (*filter(None, (self.label, self.client, self.split)), *self.features)


def roles_of(own: OwnName, table: TableFile, *, with_features: bool = True) -> Roles:
    """Return what the columns of ``table`` are for. Raises UserError for a column that is not there, or has two uses.

    Label, client and test part may go without saying where columns have these very names: label, client, split.
    """
    label = own.option("label") or ("label" if "label" in table.names else "")
    if not label:
        raise UserError(
            f"{table.where} has no column called label: say which one is, data.label=COLUMN; its columns are "
            f"{_list(table.names)}"
        )
    has_test = any(own.option(key) for key in ("test", "test_file"))
    client = own.option("client") or ("client" if "client" in table.names else "")
    split = own.option("split") or ("split" if "split" in table.names and not has_test else "")
    uses: dict[str, str] = {}
    for key, name in (("label", label), ("client", client), ("split", split)):
        if name:
            _check_column(name, key, table)
            if name in uses:
                raise UserError(f"data.{uses[name]} and data.{key} are both {name!r}: a column has one use")
            uses[name] = key
    return Roles(label, client, split, _features(own, uses, table) if with_features else ())


def to_see(own: OwnName, roles: Roles, table: TableFile) -> dict[str, Seen]:
    """Return what is to be found out about each column."""
    uses = ((roles.label, MOST_CLASSES), (roles.client, MOST_CLIENTS), (roles.split, _PARTS))
    most = {name: count for name, count in uses if name}
    texts = {*own.options.get("text", ()), *own.of_columns("category"), *most}
    declared = dict(zip(table.names, table.declared, strict=True))
    spelling = spelling_by(own.option("decimal"), own.option("thousands"))
    return {
        name: Seen(name, declared[name], most.get(name, MOST_CATEGORIES), as_text=name in texts, spelling=spelling)
        for name in roles.columns
    }


def check_types(roles: Roles, seen: Mapping[str, Seen], where: str) -> None:
    """Raise UserError for a label, a client or a test part that a file declares to be of no such type."""
    for name in filter(None, (roles.label, roles.client, roles.split)):
        if seen[name].declared not in {"time", "other"}:
            continue
        what = "dates or times" if seen[name].declared == "time" else "lists"
        several = "; several labels a record (multi-label) are not supported" if name == roles.label else ""
        raise UserError(f"{where}: column {name!r} holds {what}, wanted are texts or whole numbers{several}")


def classes_of(seen: Seen, where: str) -> tuple[str, ...]:
    """Return the classes in order: whole numbers by size, texts by the alphabet.

    Raises UserError for numbers that are no classes.
    """
    if seen.texts is None:
        raise UserError(
            f"{where}: column {seen.name!r} holds more than {seen.most:,} different entries: that is no class; numbers "
            "(regression) are not supported, name a column with classes"
        )
    numbers = [as_number(text) for text in seen.texts]
    if seen.texts and all(_COMMA.fullmatch(text) for text in seen.texts):
        numbers = [as_number(text.replace(",", ".")) for text in seen.texts]
    if any(number != round(number) for number in numbers if number is not None):
        fraction = next(
            text for text, number in sorted(zip(seen.texts, numbers, strict=True), key=str) if (number or 0) % 1
        )
        raise UserError(
            f"{where}: column {seen.name!r} holds numbers such as {fraction}: regression is not supported; name a "
            "column with classes, or write the number as ranges"
        )
    if all(number is not None for number in numbers):
        return tuple(sorted(seen.texts, key=lambda text: (float(text), text)))
    return tuple(sorted(seen.texts))


def check_missing(found: Survey) -> None:
    """Raise UserError, which names the first row and all columns, for cells without a value."""
    lacking = [seen for seen in found.columns.values() if seen.missing]
    if not lacking:
        return
    name, first = lacking[0].name, lacking[0].missing
    assert first is not None
    others = f" (so are cells of {_list(seen.name for seen in lacking[1:])})" if len(lacking) > 1 else ""
    raise UserError(
        f"{first.told(name)} is empty{others}: fill it in, leave the column out by data.drop={name}, or leave out "
        "every record with an empty cell by data.missing=drop"
    )


def check_split(seen: Seen, where: str) -> None:
    """Raise UserError unless a column says train and test, and nothing else."""
    known = {"train", "test"}
    if seen.texts is None or (others := sorted({text.lower() for text in seen.texts} - known)):
        said = "more than ten entries" if seen.texts is None else ", ".join(map(shortened, others))
        is_validation = seen.texts is not None and others[0].startswith("val")
        way = "; evaluate.validation=0.1, a setting of the run, holds records out" if is_validation else ""
        raise UserError(f"{where}: column {seen.name!r} says {said} beside train and test, which alone it may say{way}")


def _features(own: OwnName, uses: Mapping[str, str], table: TableFile) -> tuple[str, ...]:
    """Return the columns without another use, as far as they are not left out."""
    dropped = {*own.options.get("drop", ())}
    for key in ("drop", "text"):
        for name in own.options.get(key, ()):
            _check_column(name, key, table)
    if clash := sorted(dropped & {*uses}):
        raise UserError(f"data.drop leaves out {clash[0]!r}, which is data.{uses[clash[0]]}: take one of them away")
    features = tuple(name for name in table.names if name not in uses and name not in dropped)
    if not features:
        raise UserError(f"{table.where} has no column beside {_list(uses)} to learn from")
    for key in ("range", "category"):
        for name in own.of_columns(key):
            _check_column(name, key, table)
            if name in uses or name in dropped:
                raise UserError(f"data.{key}.{name}: the column {name!r} is no feature; leave this setting out")
    return features


def _check_column(name: str, key: str, table: TableFile) -> None:
    if name not in table.names:
        several = ""
        if key == "label" and "+" in name and all(part in table.names for part in name.split("+")):
            several = "; several labels a record (multi-label) are not supported"
        raise UserError(
            f"data.{key}: {table.where} has no column {shortened(name)!r}{guess(name, table.names)}{several}; its "
            f"columns are {_list(table.names)}"
        )


def _list(names: Iterable[str]) -> str:
    shown = [*names]
    more = f" and {len(shown) - 30} more" if len(shown) > 30 else ""
    return f"{', '.join(shown[:30])}{more}"
