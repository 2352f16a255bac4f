"""What is imported stays until the process ends, and Python need not search it for garbage."""

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


@contextmanager
def settled() -> Iterator[None]:
    """Leave out what there is when Python looks for garbage in this block, which it does every few rounds.

    Where ``importing`` has seen to that already it stays so afterwards: the search at the end takes most of a second.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
