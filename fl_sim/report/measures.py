"""What a run's files say in numbers, under one name and in one unit everywhere: CSV, JSON and gallery."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from fl_sim.settings_file import flat
from fl_sim.store.run_directory import RoundRecord

Value: TypeAlias = str | int | float | bool
"""What a setting may be in a column."""

_SHARE: Final = re.compile(
    r"(^|[._])(accuracy(_[a-z_]+)?|client_deviation|client_worst_tenth|recall|precision|f1|auc|share)$"
)
_NO_MEASURES: Final = {"seed", "clients", "rounds"}
"""Numbers at the top of ``result.json`` that are settings, or have another name here."""


def measures(result: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of a ``result.json`` by dotted names, such as ``final_accuracy_percent``, ``seconds.train``.

    Lists are left out, but for the privacy statements: ``epsilon.record`` and ``delta.record`` by unit, with a number
    behind a further one of the same unit. What is under ``measures`` there stands without that name before it.
    """
    top = {name: value for name, value in result.items() if name not in {*_NO_MEASURES, "measures"}}
    said = {"rounds_done": result.get("rounds"), **top, **result.get("measures", {}), **_epsilons(result)}
    return {name: value for name, value in _in_units(flat(said)) if _is_number(value)}


def of_round(record: RoundRecord) -> dict[str, float]:
    """Return a round's numbers, named and in units as ``measures`` has them; what is None is left out."""
    return {name: value for name, value in _in_units(flat(asdict(record))) if _is_number(value)}


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Value]:
    """Return {dotted name: value} of a resolved experiment's settings; lists as text, what is None as empty text."""
    return {name: value if isinstance(value, Value) else _text(value) for name, value in flat(settings)}


def percent(name: str, value: float) -> tuple[str, float]:
    """Return a share in [0, 1], which its name tells, as percent under a name that says so; all else as it is.

    >>> percent("test_accuracy", 0.5), percent("test_loss", 0.5)
    (('test_accuracy_percent', 50.0), ('test_loss', 0.5))
    """
    return (f"{name}_percent", 100 * value) if _SHARE.search(name) else (name, value)


def _epsilons(result: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for release in result.get("privacy", []):
        unit = str(release["unit"])
        number = 1 + sum(name == f"epsilon.{unit}" or name.startswith(f"epsilon.{unit}.") for name in found)
        place = unit if number == 1 else f"{unit}.{number}"
        found[f"epsilon.{place}"], found[f"delta.{place}"] = release["epsilon"], release.get("delta")
    return found


def _in_units(numbers: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return (percent(name, value) if _is_number(value) else (name, value) for name, value in numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
