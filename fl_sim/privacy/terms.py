"""Terms of a privacy guarantee (its unit, adjacency, delta and budget), and the printed form of an epsilon."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from enum import StrEnum
from typing import Literal, TypeAlias

from fl_sim.errors import UserError

Accountant: TypeAlias = Literal["rdp", "pld"]


class Adjacency(StrEnum):
    """The adjacency of a privacy guarantee: to add or remove one privacy unit, or to replace one.

    The texts of ``fl_sim.privacy.statement`` define both adjacencies. tests/fl_sim/simulation/test_two_worlds.py runs
    every client-level mechanism on two adjacent populations.
    """

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Terms:
    """Terms of a privacy ledger, fixed before its first charge (entry).

    ``unit``: the privacy unit, such as "client" or "record"; epsilons of different units are never added.
    ``adjacency``: the adjacency of all releases in the ledger. ``delta``: the delta of the ledger's epsilon.
    ``budget``: the largest epsilon at ``delta``, None for no limit. ``accountant``: the accountant whose epsilon is
    compared with the budget.
    """

    unit: str
    adjacency: Adjacency
    delta: float
    budget: float | None = None
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        valid_delta(self.delta)
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise UserError(f"privacy budget epsilon {self.budget} is not a positive number: choose one such as 8")


def valid_delta(delta: float) -> float:
    """Return ``delta`` unchanged. Raises UserError if it is not in (0, 1)."""
    if not 0 < delta < 1:
        raise UserError(
            f"delta {delta} is not in (0, 1): choose one well below 1 / number of protected units, such as 1e-5"
        )
    return delta


def delta_advice(delta: float, units: float) -> str | None:
    """Return a warning if ``delta`` is too large for a population of ``units`` privacy units, else None.

    At a delta of 1/``units`` or more, even the publication of all data of one random unit would satisfy the definition
    of differential privacy.
    """
    advice = f"use delta <= {1 / (10 * units):.1g}, that is 1 / (10 x {units:g})"
    if delta >= 1 / units:
        return (
            f"delta {delta:g} is not below 1 / {units:g}: publishing all data of one unit would satisfy the "
            f"definition of differential privacy; {advice}"
        )
    if delta > 1 / (10 * units):
        return f"delta {delta:g} is large for {units:g} protected units; {advice}"
    return None


def none_if_infinite(epsilon: float) -> float | None:
    """Return ``epsilon``, or None if it is infinite. None means, in results and logs, that there is no guarantee."""
    assert not math.isnan(epsilon)
    return None if math.isinf(epsilon) else epsilon


def rounded_up(epsilon: float, digits: int = 4) -> str:
    """Return ``epsilon`` as text, rounded up to ``digits`` significant digits: 2.34501 gives "2.346"."""
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(epsilon)))):.{digits}g}"


def epsilon_in_words(epsilon: float | None) -> str:
    """Return ``epsilon`` as text, rounded up to 5 significant digits; "none" for None, which is no guarantee."""
    return "none" if epsilon is None else rounded_up(epsilon, 5)


def check_two_given(quantities: Mapping[str, object]) -> None:
    """Raise UserError if more than one of three ``quantities`` of a plan, {option: value}, is None.

    One missing quantity follows from the other two quantities.
    """
    missing = [name for name, value in quantities.items() if value is None]
    if len(missing) > 1:
        raise UserError(
            f"{' and '.join(missing)} are missing: give two of {', '.join(quantities)}, and the third is computed"
        )
