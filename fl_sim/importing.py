"""Imports: lazy modules, which are imported at their first use, and imports without garbage collection."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, Final

# The function leave_out sets this event. The function gc.get_freeze_count could replace the event, but it is slow,
# because it counts all objects.
_EXCLUDED: Final = Event()


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection in this ``with`` block. Later collections skip the objects imported here.

    torch and Flower create a million objects at import. Without this function, garbage collection would scan these
    objects again and again. These scans would take a quarter of a short run's time (see ``gc.freeze`` in Python's
    documentation).
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
    """Exclude all existing objects from garbage collection until the process ends."""
    gc.freeze()
    _EXCLUDED.set()


@contextmanager
def settled() -> Iterator[None]:
    """Exclude all existing objects from garbage collection in this ``with`` block.

    If ``leave_out`` was called before, this function changes nothing: all objects stay excluded after the block, too.
    Including them again would cause a garbage collection of almost a second.
    """
    if _EXCLUDED.is_set():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
