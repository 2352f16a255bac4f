"""Imports in a process that is to answer soon."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import in this block without looking for garbage, now or when the process ends, among what stays until then.

    torch and Flower make a million objects: looking through them again and again is a fourth of the time that a short
    run takes (see the notes on ``gc.freeze`` in Python's documentation).
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()
