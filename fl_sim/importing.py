"""Imports: modules at their first use, and no garbage collection among imported modules."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, Final

_LEFT_OUT: Final = Event()  # gc.get_freeze_count counts all objects, which takes as long as a round


@contextmanager
def importing() -> Iterator[None]:
    """Import in this block without garbage collection, and exclude the imported objects from it until the process ends.

    torch and Flower make a million objects: scanning them again and again takes a fourth of a short run's time (see
    the notes on ``gc.freeze`` in Python's documentation).
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            leave_out()
        gc.enable()


class LazyModule:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        module = sys.modules.get(self._name)
        if module is None:
            with importing():
                module = importlib.import_module(self._name)
        return getattr(module, attribute)


if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414 (exported)
else:
    torch = LazyModule("torch")


def leave_out() -> None:
    """Exclude all present objects from garbage collection until the process ends."""
    gc.freeze()
    _LEFT_OUT.set()


@contextmanager
def settled() -> Iterator[None]:
    """Exclude all present objects from garbage collection in this block.

    After ``leave_out`` they stay excluded: the collection at the end takes most of a second.
    """
    if _LEFT_OUT.is_set():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
