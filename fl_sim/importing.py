"""Imports: modules at their first use, and no search for garbage among what stays until the process ends."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, Final

_LEFT_OUT: Final = Event()  # gc.get_freeze_count would tell as much, and takes as long as a round: it counts objects


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
    """Leave out what there is whenever Python looks for garbage, until the process ends."""
    gc.freeze()
    _LEFT_OUT.set()


@contextmanager
def settled() -> Iterator[None]:
    """Leave out what there is when Python looks for garbage in this block, which it does every few rounds.

    Where ``leave_out`` has seen to that already it stays so afterwards: the search at the end takes most of a second.
    """
    if _LEFT_OUT.is_set():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
