"""Compressors with error feedback: top-k, rand-k, SignSGD, PowerSGD.

Error feedback adds the error of compression to the next round's update (Seide et al. 2014): e <- e + D; send C(e);
e <- e - C(e). So the sum of all sent updates and the last error is the sum of all updates, but for rounding.

* Top-k sends the largest numbers of an update (Aji and Heafield 2017, algorithm 1; Stich et al. 2018, algorithm 1, with
  a proof of convergence).
* Rand-k sends random numbers of an update (Wangni et al. 2018; Stich et al. 2018). The places come from a seed that
  client and server share, a round's and a client's own, so they are never sent, and depend on no record.
* SignSGD sends one bit a number (Karimireddy et al. 2019, algorithm 1, EF-SignSGD): (||p||_1 / d) sign(p) of p = e + D.
  The scale is that of a tensor here: those of a model's layers differ by orders of magnitude, and small ones would
  follow large ones.
* PowerSGD sends matrices of low rank, by one step of power iteration a round (Vogels et al. 2019, algorithms 1 and 2):
  P = M Q; orthonormalise P; Q = M' P; send P and Q, which stand for P Q'. The next round's iteration starts from Q. In
  the paper workers sum P before it is orthonormalised, and Q, so that all of them take the same step; here each client
  sends a P and a Q of its own, of the same size, and the server has its update.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_sim.errors import Malformed
from fl_sim.importing import torch
from fl_sim.kinds import Choices, off
from fl_sim.packed import Coins, Packed, Size
from fl_sim.params import FlatParams, Layout, add, flattened, num_in, subtract
from fl_sim.settings import Settings
from fl_sim.types import Params, Payloads
from strategies.compression.quantization import bits_for, num_bytes, pack, unpack


class ErrorFeedback(Settings):
    """A compressor C whose error is client state."""

    @property
    def keeps_error(self) -> bool:
        """Return True if the error is sent later."""
        return True

    @abstractmethod
    def size(self, layout: Layout) -> Size:
        """Return the size of the message."""

    @abstractmethod
    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return C of a vector, packed."""

    @abstractmethod
    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return C of a vector."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Send C(e + D); the rest is the new error."""
        corrected = _corrected_by(held, update)
        packed = self.encode(corrected, coins)
        return packed, {"error": subtract(corrected, self.unpack(packed, update.layout, coins))}


class TopK(ErrorFeedback):
    """Sends the largest numbers of an update, a ``share`` of them; the error joins the next round's update.

    ``share``: of all d numbers of the model together; their number, k, is rounded up. Each costs 32 bits and
    ceil(log2 d) for its place.
    """

    kind: Literal["top-k"] = "top-k"
    share: float = Field(0.01, gt=0, le=1)
    title: ClassVar[str] = "top-k"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a remark where all numbers are sent."""
        del experiment
        return [] if self.share < 1 else [off("compress.share=1", "all numbers of an update are sent")]

    def size(self, layout: Layout) -> Size:
        """Return the size of k numbers and k places."""
        d = num_in(layout)
        k = _count_of(self.share, d)
        return Size(k, num_bytes(k, bits_for(d)))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the k largest numbers, in the order of their places."""
        del coins
        flat = update.flat
        k = _count_of(self.share, len(flat))
        places = torch.topk(flat.abs(), k, sorted=False).indices.sort().values
        return Packed.of(flat[places], pack(places.numpy(), bits_for(len(flat))))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return these numbers, and zeros elsewhere. Raises Malformed unless places rise and exist."""
        del coins
        d = num_in(layout)
        places = unpack(packed.bits, len(packed.numbers), bits_for(d))
        if (np.diff(places) <= 0).any() or places[-1] >= d:
            raise Malformed(f"sent places that do not rise from 0 to at most {d - 1}")
        return _spread(packed.numbers, torch.from_numpy(places), layout)


class RandK(ErrorFeedback):
    """Sends a ``share`` of the update's numbers, 32 bits each, in places drawn at random for each client and round.

    ``share``: of all d numbers of the model together; their number, k, is rounded up. ``correction`` for the others: by
    "scale" the server multiplies by d / k, so that the mean over draws is the update, with a variance of d / k - 1
    times its squared norm; by "error-feedback" the error joins the next round's update.
    """

    kind: Literal["rand-k"] = "rand-k"
    share: float = Field(0.1, gt=0, le=1)
    correction: Literal["scale", "error-feedback"] = "scale"
    title: ClassVar[str] = "rand-k"

    @property
    def keeps_error(self) -> bool:
        """Return True if the error is sent later."""
        return self.correction == "error-feedback"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a remark where all numbers are sent."""
        del experiment
        return [] if self.share < 1 else [off("compress.share=1", "all numbers of an update are sent")]

    def size(self, layout: Layout) -> Size:
        """Return the size of k numbers."""
        return Size(_count_of(self.share, num_in(layout)))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Send k numbers; the rest is the new error, unless scaling corrects for it."""
        return super().pack(update, held, coins) if self.keeps_error else (self.encode(update, coins), {})

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the numbers in the places that are drawn; of an update that is not finite all are NaN."""
        return Packed.of(update.flat[self._places(len(update.flat), coins)])

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return these numbers, scaled where that is the correction, and zeros elsewhere."""
        d = num_in(layout)
        factor = d / len(packed.numbers) if self.correction == "scale" else 1.0
        return _spread(packed.numbers * factor, self._places(d, coins), layout)

    def _places(self, d: int, coins: Coins) -> torch.Tensor:
        drawn = coins().choice(d, _count_of(self.share, d), replace=False, shuffle=False)
        drawn.sort()
        return torch.from_numpy(drawn)


class SignSGD(ErrorFeedback):
    """Sends the sign of every number, and each tensor's mean size; the error joins the next round's update."""

    kind: Literal["signsgd"] = "signsgd"
    title: ClassVar[str] = "SignSGD"

    def size(self, layout: Layout) -> Size:
        """Return the size of a scale for each tensor, and of a bit for each number."""
        return Size(len(layout), num_bytes(num_in(layout), 1))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return mean sizes and signs; 0 counts as positive."""
        del coins
        scales = torch.stack([value.abs().sum() / max(1, value.numel()) for value in update.values()])
        return Packed.of(scales, pack((update.flat.numpy() >= 0).astype(np.int64), 1))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return scales with signs. Raises Malformed for scales below 0."""
        del coins
        if (packed.numbers < 0).any():
            raise Malformed("sent mean sizes that are below 0")
        signs = FlatParams(torch.from_numpy(2.0 * unpack(packed.bits, num_in(layout), 1) - 1).float(), layout)
        parts = [scale * sign.reshape(-1) for scale, sign in zip(packed.numbers, signs.values(), strict=True)]
        return FlatParams(torch.cat(parts), layout)


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
        """Return the size of all factors, and of all whole tensors."""
        return Size(sum(self._counts(shape)[0] + self._counts(shape)[1] for _, shape in layout))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Send P and Q of e + D; the client keeps the error, and Q."""
        corrected = _corrected_by(held, update)
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
        """Return P Q' of every matrix, and all whole tensors."""
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
        """Return the sizes of P and Q; the size of the tensor and 0 where it travels whole."""
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


def _corrected_by(held: Payloads, update: FlatParams) -> FlatParams:
    """Return e + D: an update with the error of earlier rounds."""
    error: Params | None = held.get("error")
    return update if error is None else flattened(add(update, error))


def _count_of(share: float, d: int) -> int:
    """Return a share of ``d`` numbers, rounded up: at least 1.

    The share is taken as the decimal that it is written as: 0.07 of 100 are 7, and in binary a little more.
    """
    return math.ceil(Fraction(str(share)) * d)


def _spread(numbers: torch.Tensor, places: torch.Tensor, layout: Layout) -> FlatParams:
    """Return ``numbers`` in their ``places`` of an update, and zeros elsewhere."""
    flat = torch.zeros(num_in(layout))
    flat[places] = numbers
    return FlatParams(flat, layout)
