"""Tensors that code of the user's is handed: it may read them, and whoever writes to them is found out.

Those in one process may be the same in many places: written to, the server's model would change for all clients of a
round. What is looked at costs little: PyTorch counts the writes to a tensor, views of it included, and a sum over its
bits tells of writes that PyTorch does not see, such as through NumPy, in a hundredth of the time of the shortest round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fl_sim.errors import RunError
from fl_sim.importing import torch
from fl_sim.own_code import name_of
from fl_sim.params import FlatParams
from fl_sim.types import Params, Payloads


@dataclass(frozen=True)
class WriteGuard:
    """Tensors by what they are called, with the writes to each that were counted, and the sums of their bits.

    Without ``sums`` no bits are looked at. ``found``: who has written, once that is known: whoever runs next is not to
    blame.
    """

    tensors: tuple[tuple[str, torch.Tensor], ...]
    writes: tuple[int, ...]
    sums: tuple[int, ...]
    found: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Payloads, *, by_bits: bool = True) -> WriteGuard:
        """Note what ``groups`` are now."""
        tensors = tuple((name, tensor) for name, params in groups.items() for tensor in _tensors(params))
        return cls(
            tensors,
            tuple(_writes(tensor) for _, tensor in tensors),
            tuple(_sum(tensor) for _, tensor in tensors) if by_bits else (),
        )

    def check(self, *methods: Callable[..., Any]) -> None:
        """Raise RunError, which names the ``methods`` that ran since, where one has written to a tensor."""
        for (name, tensor), was in zip(self.tensors, self.writes, strict=True):
            if _writes(tensor) != was:
                raise self._wrote(name, methods)

    def check_bits(self, *methods: Callable[..., Any]) -> None:
        """Raise the same where the bits are not what they were, however they were written."""
        for (name, tensor), was in zip(self.tensors, self.sums, strict=False):
            if _sum(tensor) != was:
                raise self._wrote(name, methods)

    def _wrote(self, name: str, methods: tuple[Callable[..., Any], ...]) -> RunError:
        self.found.append(
            f"{' or '.join(map(name_of, methods))} wrote into {name}, which it was handed to read: others in this "
            "process hold the same numbers, so the run would be wrong; make new tensors there, such as by "
            "tensor.clone()"
        )
        return RunError(self.found[0])


def _tensors(params: Params) -> Iterable[torch.Tensor]:
    return (params.flat,) if isinstance(params, FlatParams) else params.values()


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 (PyTorch's documentation names it)


def _sum(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return 0
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    whole = len(content) // 8 * 8
    return int(np.add.reduce(content[:whole].view(np.int64))) + int(np.add.reduce(content[whole:], dtype=np.int64))
