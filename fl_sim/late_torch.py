"""torch, imported where it is first used: so that a mistake in settings is told without waiting seconds for it.

For the modules that settings come from; all others import torch as everybody does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414 (said so for mypy)
else:
    import importlib

    class _Torch:
        def __getattr__(self, name):
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
