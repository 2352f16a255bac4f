"""Figures of privacy loss as text: rounded up, for what is printed must hold as well."""

from decimal import ROUND_CEILING, Context, Decimal


def rounded_up(epsilon: float, digits: int = 4) -> str:
    """Return ``epsilon`` with ``digits`` significant digits, never below it, such as ``2.346`` for 2.34501."""
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(epsilon)))):.{digits}g}"
