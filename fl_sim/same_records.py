"""Data sets that are another's records under other labels: what is released about either is about the same records."""

import re
from typing import Final

FINER: Final = {"cifar100-coarse": "cifar100"}
"""From such a data set to the one with the same records in more classes."""


_SETTINGS: Final = re.compile(r":(?=[A-Za-z_]+(?:\.[^=:]*)?=)")
"""What stands between the parts of a name: its place, and each setting of how that is read."""


def called(data: str) -> str:
    """Return what the records of ``data`` are called in bills, whatever their classes are and however they are read."""
    return _SETTINGS.split(records_of(data))[0]


def records_of(data: str) -> str:
    """Return the data set whose records those of ``data`` are: itself, for most. The records pay for both."""
    return FINER.get(data, data)
