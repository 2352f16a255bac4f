"""TOML from outside, read within bounds: whatever the file is, the answer is a table or one line that says why not."""

import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fl_sim.errors import UserError

MOST_BYTES: Final = 2**20
"""A settings file is no longer: the longest ones, with a number for each of 10,000 clients, have a tenth of it."""

MOST_LEVELS: Final = 16
"""No setting lies so deep; each level costs the parser, and whoever walks through the table, one more call."""

_DEEP_KEY: Final = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_LEVELS}}}""")
_INT64: Final = range(-(2**63), 2**63)


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises UserError where there is none, it is no regular file, too long, or not TOML."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is no file: settings are read from a TOML file, or given as key=value")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path} (settings are given as key=value, for example rounds=50)") from error
    except (OSError, ValueError) as error:  # ValueError: no path can hold this character
        raise UserError(f"{str(path)!r} cannot be read ({error}): name a TOML file, or give key=value") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES:,} bytes: that is no file of settings")
    try:
        return parse_table(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a TOML file: {error}") from error


def _is_no_table(value: Any) -> bool:
    return not isinstance(value, Mapping)


def flat(
    table: Mapping[str, Any], is_value: Callable[[Any], bool] = _is_no_table, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of tables in a table. ``is_value``: where to stop; default, at what is no table.

    >>> dict(flat({"rounds": 3, "local": {"epochs": 1}}))
    {'rounds': 3, 'local.epochs': 1}
    """
    for key, value in table.items():
        if is_value(value):
            yield prefix + key, value
        else:
            yield from flat(value, is_value, f"{prefix}{key}.")


def parse_table(text: str, where: str) -> dict[str, Any]:
    """Return the table that TOML ``text`` from ``where`` holds. Raises UserError where it is none that can be used."""
    deep = UserError(f"{where} is nested more than {MOST_LEVELS} levels deep: no setting is")
    if _DEEP_KEY.search(text):
        raise deep
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise deep from None
    except ValueError as error:  # a TOMLDecodeError, or a number of too many digits
        raise UserError(f"{where} is not a TOML file: {error}") from error
    _check(table, where, MOST_LEVELS, deep)
    return table


def _check(value: Any, where: str, levels: int, deep: UserError) -> None:
    if isinstance(value, int) and value not in _INT64:
        raise UserError(f"{where} holds a whole number of {len(str(abs(value)))} digits: TOML's have 64 bits")
    if isinstance(value, dict | list):
        if not levels:
            raise deep
        for inner in value.values() if isinstance(value, dict) else value:
            _check(inner, where, levels - 1, deep)
