"""PowerSGD: matrices of low rank, by one step of power iteration a round (Vogels et al. 2019, algorithms 1 and 2).

P = M Q; orthonormalise P; Q = M' P; send P and Q, which stand for P Q'. With error feedback, and Q is where the next
round's iteration starts from. In the paper workers sum P before it is orthonormalised, and Q, so that all of them take
the same step; here each client sends a P and a Q of its own, of the same size, and the server has its update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.importing import torch
from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, subtract
from fl_sim.settings import Settings
from fl_sim.types import Params, Payloads
from strategies.compression.error_feedback import corrected_by


class PowerSGD(Settings):
    """Sends every weight matrix as a product of two narrow ones: ``rank`` numbers for each row and for each column.

    ``rank``: the paper tries 1, 2 and 4. A convolution's weights are a matrix with a row for each channel that comes
    out. Vectors, and matrices of which that would not save anything, travel whole.
    """

    kind: Literal["powersgd"] = "powersgd"
    rank: int = Field(2, ge=1, le=10**6)
    title: ClassVar[str] = "PowerSGD"
    keeps_error: ClassVar[bool] = True

    def size(self, layout: Layout) -> Size:
        """Return the numbers of all factors, and of all that travels whole."""
        return Size(sum(self._counts(shape)[0] + self._counts(shape)[1] for _, shape in layout))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Send P and Q of e + D; hold back the rest, and Q."""
        corrected = corrected_by(held, update)
        start = held.get("start") or self._first(update.layout, coins())
        sent, factors = [], {}
        for name, value in corrected.items():
            if name not in start:
                sent.append(value.reshape(-1))
                continue
            matrix = value.reshape(len(value), -1)
            left, _ = torch.linalg.qr(matrix @ start[name])
            factors[name] = matrix.T @ left
            sent += [left.reshape(-1), factors[name].reshape(-1)]
        packed = Packed.of(torch.cat(sent))
        error = subtract(corrected, self.unpack(packed, update.layout, coins))
        return packed, {"error": error, "start": factors} if factors else {"error": error}

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return P Q' of every matrix, and what travelled whole."""
        del coins
        parts: list[torch.Tensor] = []
        for (_, shape), left, right in self._cut(packed.numbers, layout):
            if right is None:
                parts.append(left)
                continue
            rows = shape[0]
            parts.append((left.reshape(rows, -1) @ right.reshape(-1, left.numel() // rows).T).reshape(-1))
        return FlatParams(torch.cat(parts), layout)

    def _counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many numbers P and Q have; all of a tensor and none where it travels whole."""
        size = math.prod(shape)
        if len(shape) < 2 or self.rank * (shape[0] + size // max(1, shape[0])) >= size:
            return size, 0
        return self.rank * shape[0], self.rank * (size // shape[0])

    def _first(self, layout: Layout, generator: np.random.Generator) -> Params:
        """Return the Q of a client's first round: standard normal, (columns, rank)."""
        shapes = {name: self._counts(shape)[1] for name, shape in layout}
        return {
            name: torch.from_numpy(generator.standard_normal((count // self.rank, self.rank), dtype=np.float32))
            for name, count in shapes.items()
            if count
        }

    def _cut(
        self, numbers: torch.Tensor, layout: Layout
    ) -> Iterator[tuple[tuple[str, Any], torch.Tensor, torch.Tensor | None]]:
        at = 0
        for entry in layout:
            first, second = self._counts(entry[1])
            left, right = numbers[at : at + first], numbers[at + first : at + first + second]
            at += first + second
            yield entry, left, right if second else None
