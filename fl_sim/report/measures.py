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

    Lists are left out, but for the privacy statements: ``epsilon.record`` and ``delta.record`` by unit, of all that the
    run releases about it; where that is more than one statement, each is ``epsilon.record.1`` and so on. What is under
    ``measures`` there stands without that name before it.
    """
    top = {name: value for name, value in result.items() if name not in {*_NO_MEASURES, "measures"}}
    beside = result.get("measures", {})
    if result.get("partition") == "centralized":  # earlier versions told its accuracy as that of its only client
        beside = {name: value for name, value in beside.items() if not name.startswith("client_")}
    said = {"rounds_done": result.get("rounds"), **top, **beside, **_epsilons(result)}
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
    by_unit: dict[str, list[Mapping[str, Any]]] = {}
    for release in result.get("privacy", []):
        by_unit.setdefault(str(release["unit"]), []).append(release)
    found: dict[str, Any] = {}
    for unit, releases in by_unit.items():
        wholes = [
            (one["epsilon_whole_run"], one["delta_whole_run"]) for one in releases if one.get("epsilon_whole_run")
        ]
        told = wholes or [(one["epsilon"], one.get("delta")) for one in releases]
        if wholes or len(releases) == 1:  # earlier versions did not say what several cost together
            found[f"epsilon.{unit}"], found[f"delta.{unit}"] = told[0]
        for number, one in enumerate(releases if wholes or len(releases) > 1 else (), start=1):
            place = f"{unit}.{number}"
            found[f"epsilon.{place}"], found[f"delta.{place}"] = one["epsilon"], one.get("delta")
    return found


def _in_units(numbers: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return (percent(name, value) if _is_number(value) else (name, value) for name, value in numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
