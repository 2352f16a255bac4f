"""How numbers and names are spelled in the cells of a table: decimal sign, thousands, units, names in two ways."""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from fl_sim.data.table_file import pyarrow
from fl_sim.errors import UserError
from fl_sim.mistakes import guess

DECIMALS: Final[Mapping[str, str]] = {"point": r"\.", "comma": ","}
_SPACES: Final = " \u00a0\u202f\u2009"
THOUSANDS: Final[Mapping[str, str]] = {
    "comma": ",",
    "point": r"\.",
    "space": f"[{_SPACES}]",
    "apostrophe": "['\u2019]",
}
"""{what a setting calls a sign: the pattern of it}"""

_EXPONENT: Final = r"(?:[eE][+-]?\d+)?"
_CURRENCY: Final = r"(?:[$€£¥₹₩₽]|EUR|USD|GBP|CHF|JPY|CNY|INR|SEK|NOK|DKK|PLN)"
_UNIT: Final = (
    rf"[{_SPACES}]?[%‰°]|[{_SPACES}][\pL°µ²³/%]{{1,12}}|"
    r"(?:kg|g|mg|µg|ug|ng|lbs?|oz|km|m|cm|mm|µm|nm|ft|l|L|dl|dL|ml|mL|h|min|s|sec|ms|us|ns|d|y|yrs?|k|K|M|kB|MB|GB|"
    r"mmHg|bpm|Hz|kHz|MHz|GHz|kW|mA|°C|°F|px|mg/d[lL]|mmol/[lL]|g/d[lL])"
)
_ANY_NUMBER: Final = "|".join([
    r"\d+(?:[.,]\d*)?",
    r"[.,]\d+",
    r"\d{1,3}(?:,\d{2,3})+(?:[.,]\d*)?",
    *(rf"\d{{1,3}}(?:{sign}\d{{3}})+(?:[.,]\d*)?" for sign in [*list(THOUSANDS.values())[1:], "_"]),
])  # fmt: skip
_SIGN: Final = "[+\u2212\u2013-]?"
LIKE_A_NUMBER: Final = (
    rf"^(?:(?:[<>≤≥~≈]=?[{_SPACES}]?)?{_SIGN}(?:{_CURRENCY}[{_SPACES}]?)?{_SIGN}(?:{_ANY_NUMBER}){_EXPONENT}"
    rf"(?:[{_SPACES}]?{_CURRENCY}|{_UNIT})?-?|\((?:{_ANY_NUMBER})\))$"
)
"""What people read as a number, in any spelling: 0,5 and 1 234 and 45% and 45 kg and $45 and <45."""

_WHOLE: Final = r"^([+-]?\d+)\.0*$"


@dataclass(frozen=True)
class Spelling:
    """The signs of numbers in a csv file: ``decimal`` and ``thousands``, the latter empty where there is none."""

    decimal: str = "point"
    thousands: str = ""

    @cached_property
    def pattern(self) -> str:
        """Return the regular expression of a number."""
        decimal = DECIMALS[self.decimal]
        grouped = rf"|[1-9]\d{{0,2}}(?:{THOUSANDS[self.thousands]}\d{{3}})+" if self.thousands else ""
        digits = rf"(?:(?:\d+{grouped})(?:{decimal}\d*)?|{decimal}\d+){_EXPONENT}"
        return rf"^(?:[+-]?{digits}|[+-]?(?i:inf|infinity))$"

    def numbers(self, cells: Any) -> Any:
        """Return texts as float64, None where one is no number."""
        arrow = pyarrow()
        compute = arrow.compute
        if self == Spelling():
            try:
                return cells.cast(arrow.float64())
            except arrow.ArrowInvalid:
                pass
        kept = compute.if_else(compute.match_substring_regex(cells, self.pattern), cells, None)
        if self.thousands:
            kept = compute.replace_substring_regex(kept, THOUSANDS[self.thousands], "")
        if self.decimal == "comma":
            kept = compute.replace_substring(kept, ",", ".")
        return kept.cast(arrow.float64())

    def reads(self, texts: Iterable[str]) -> bool:
        """Say whether each of ``texts`` is a number so spelled."""
        return all(re.match(self.pattern, text) for text in texts)

    def value(self, text: str) -> str:
        """Return the number that ``text`` is, as a program writes it."""
        plain = re.sub(THOUSANDS[self.thousands], "", text) if self.thousands else text
        return f"{float(plain.replace(',', '.') if self.decimal == 'comma' else plain):.15g}"

    def settings(self) -> str:
        """Return the settings that say so."""
        decimal = f"data.decimal={self.decimal}" if self.decimal != "point" else ""
        thousands = f"data.thousands={self.thousands}" if self.thousands else ""
        return " ".join(filter(None, (decimal, thousands))) or "no data.decimal and no data.thousands"

    def told(self) -> str:
        """Say it in words."""
        return f"numbers have a decimal {self.decimal}, and {self.thousands or 'no sign'} between thousands"


def spelling_by(decimal: str, thousands: str) -> Spelling:
    """Return what the settings say. Raises UserError for other signs, and for one sign with two meanings."""
    for key, given, valid in (("decimal", decimal, DECIMALS), ("thousands", thousands, THOUSANDS)):
        if given and given not in valid:
            meant = {",": " (did you mean 'comma'?)", ".": " (did you mean 'point'?)"}.get(given, guess(given, valid))
            raise UserError(f"data.{key} = {given!r}{meant}; valid: {', '.join(valid)}")
    if (decimal or "point") == thousands:
        raise UserError(
            f"data.thousands={thousands} and a decimal {thousands}: one sign has one meaning; set data.decimal="
            f"{'comma' if thousands == 'point' else 'point'}, too, or leave data.thousands out"
        )
    return Spelling(decimal or "point", thousands)


def cure_of(texts: Iterable[str]) -> str:
    """Say how a csv file's ``texts``, each like a number, are read as numbers: by which settings, or written anew."""
    found, sample = [*texts], ""
    ways: dict[str, Spelling] = {}
    for decimal in DECIMALS:
        for thousands in ("", *(sign for sign in THOUSANDS if sign != decimal)):
            way = Spelling(decimal, thousands)
            if way.reads(found):
                sample = max(found, key=len)
                ways.setdefault(way.value(sample), way)
    if not ways:
        return "write the cells as plain numbers, without units and other signs"
    if len(ways) == 1:
        return f"set {next(iter(ways.values())).settings()}"
    several = [f"{way.settings()} where {sample} is {value}" for value, way in ways.items()]
    return f"set {' or '.join(several)}"


def unified(texts: Any) -> Any:
    """Return texts of cells in one spelling of each: whole numbers without ``.0`` behind them."""
    return pyarrow().compute.replace_substring_regex(texts, _WHOLE, r"\1")


def one_spelling(text: str) -> str:
    """Return one text as ``unified`` has it, in Unicode's composed form."""
    return re.sub(_WHOLE, r"\1", unicodedata.normalize("NFC", text))


def doubles(texts: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the texts that differ from one another in case, spaces and leading zeros alone."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        bare = "".join(unicodedata.normalize("NFKC", text).casefold().split())
        alike.setdefault(bare.lstrip("0") or "0" if bare.isdigit() else bare, []).append(text)
    return [tuple(sorted(group)) for group in alike.values() if len(group) > 1]


def told_doubles(what: str, texts: Iterable[str], *, with_names: bool = True) -> str:
    """Say which of ``texts`` look like two spellings of one; nothing where there are none."""
    found = doubles(texts)
    if not found:
        return ""
    if not with_names:
        return f"{len(found):,} {what} are spelled in several ways (case, spaces), which count as different ones"
    some = ", ".join(" and ".join(map(repr, group[:3])) for group in found[:3])
    more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
    return f"{what} that differ in case or spaces alone count as different ones: {some}{more}"
