"""Compressors with error feedback: top-k, rand-k, SignSGD, PowerSGD.

Error feedback adds the error e of a compressor C to the next round's update D (Seide et al. 2014): e <- e + D; send
C(e); e <- e - C(e). So the sum of all sent updates plus the last error equals the sum of all updates, up to rounding.

* Top-k sends the largest numbers of an update (Aji and Heafield 2017, algorithm 1; Stich et al. 2018, algorithm 1, with
  a proof of convergence).
* Rand-k sends the numbers at random positions of an update (Wangni et al. 2018; Stich et al. 2018). Client and server
  draw the positions from a shared seed, which differs for each round and client. So positions are never sent, and they
  depend on no record.
* SignSGD sends one bit for each number (Karimireddy et al. 2019, algorithm 1, EF-SignSGD): (||p||_1 / d) sign(p), where
  p = e + D has d numbers. Here each tensor has its own scale ||p||_1 / d: the sizes of numbers in a model's layers
  differ by orders of magnitude, so one common scale would be wrong for tensors with small numbers.
* PowerSGD sends matrices of low rank, by one step of power iteration in a round (Vogels et al. 2019, algorithms 1 and
  2): P = M Q; orthonormalise P; Q = M' P; send P and Q. M is a weight matrix of e + D, and ' the transpose. The server
  computes P Q'. The power iteration of the next round starts from Q. In Vogels et al. 2019 the matrices P of all
  workers are summed before the orthonormalisation, and then all Q are summed, so that all workers make the same step.
  Here each client has its own P and Q, and the server computes this client's update from P and Q.
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
    """A compressor C whose compression error is client state, added to the next update."""

    @property
    def keeps_error(self) -> bool:
        """Return True if the compression error is added to the next update."""
        return True

    @abstractmethod
    def size(self, layout: Layout) -> Size:
        """Return the size of the packed message for an update with this ``layout``."""

    @abstractmethod
    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the bytes of the compressed update C(``update``)."""

    @abstractmethod
    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the compressed update C(update) from its bytes, with zeros for numbers that were not sent."""

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Return the compressed update plus the error of earlier rounds, and the client state (the new error).

        For the update D and the error e, the result consists of the bytes of C(e + D), and the new error e + D - C(e +
        D).
        """
        corrected = _corrected_by(held, update)
        packed = self.encode(corrected, coins)
        return packed, {"error": subtract(corrected, self.unpack(packed, update.layout, coins))}


class TopK(ErrorFeedback):
    """Sends only the largest numbers of an update; the error is added to the next round's update.

    ``share``: the fraction of the model's d numbers that are sent. The number of sent numbers, k, is rounded up. Each
    sent number takes 32 bits, and ceil(log2 d) bits for its position.
    """

    kind: Literal["top-k"] = "top-k"
    share: float = Field(0.01, gt=0, le=1)
    title: ClassVar[str] = "top-k"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a note that all numbers are sent if ``share`` is 1, else an empty list."""
        del experiment
        return [] if self.share < 1 else [off("compress.share=1", "all numbers of an update are sent")]

    def size(self, layout: Layout) -> Size:
        """Return the size of the packed message: k numbers and k positions."""
        d = num_in(layout)
        k = _count_of(self.share, d)
        return Size(k, num_bytes(k, bits_for(d)))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the k numbers of largest absolute value and their positions; the positions are in ascending order."""
        del coins
        flat = update.flat
        k = _count_of(self.share, len(flat))
        places = torch.topk(flat.abs(), k, sorted=False).indices.sort().values
        return Packed.of(flat[places], pack(places.numpy(), bits_for(len(flat))))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the sent numbers at their positions, zeros elsewhere. Raises Malformed for invalid positions."""
        del coins
        d = num_in(layout)
        places = unpack(packed.bits, len(packed.numbers), bits_for(d))
        if (np.diff(places) <= 0).any() or places[-1] >= d:
            raise Malformed(f"sent positions that are not in ascending order from 0 to at most {d - 1}")
        return _scattered(packed.numbers, torch.from_numpy(places), layout)


class RandK(ErrorFeedback):
    """Sends a ``share`` of the update's numbers, 32 bits each, at positions drawn at random per client and round.

    ``share``: the fraction of the model's d numbers that are sent. The number of sent numbers, k, is rounded up.
    ``correction``: the correction for the numbers that are not sent. With "scale" the server multiplies the sent
    numbers by d / k. Then the expected result is the update, with a variance of d / k - 1 times the update's squared
    norm. With "error-feedback" the compression error is added to the next round's update.
    """

    kind: Literal["rand-k"] = "rand-k"
    share: float = Field(0.1, gt=0, le=1)
    correction: Literal["scale", "error-feedback"] = "scale"
    title: ClassVar[str] = "rand-k"

    @property
    def keeps_error(self) -> bool:
        """Return True if the compression error is added to the next update."""
        return self.correction == "error-feedback"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return a note that all numbers are sent if ``share`` is 1, else an empty list."""
        del experiment
        return [] if self.share < 1 else [off("compress.share=1", "all numbers of an update are sent")]

    def size(self, layout: Layout) -> Size:
        """Return the size of the packed message: k numbers."""
        return Size(_count_of(self.share, num_in(layout)))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Return k packed numbers, and the client state: the new error, or nothing if ``correction`` is "scale"."""
        return super().pack(update, held, coins) if self.keeps_error else (self.encode(update, coins), {})

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the numbers at the positions drawn from ``coins``. If training diverged, all numbers are NaN."""
        return Packed.of(update.flat[self._places(len(update.flat), coins)])

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return the sent numbers at their positions, multiplied by d / k for "scale", and zeros elsewhere."""
        d = num_in(layout)
        factor = d / len(packed.numbers) if self.correction == "scale" else 1.0
        return _scattered(packed.numbers * factor, self._places(d, coins), layout)

    def _places(self, d: int, coins: Coins) -> torch.Tensor:
        drawn = coins().choice(d, _count_of(self.share, d), replace=False, shuffle=False)
        drawn.sort()
        return torch.from_numpy(drawn)


class SignSGD(ErrorFeedback):
    """Sends the sign of every number and the mean absolute value of every tensor, with error feedback."""

    kind: Literal["signsgd"] = "signsgd"
    title: ClassVar[str] = "SignSGD"

    def size(self, layout: Layout) -> Size:
        """Return the size of the packed message: one scale for each tensor, and one bit for each number."""
        return Size(len(layout), num_bytes(num_in(layout), 1))

    def encode(self, update: FlatParams, coins: Coins) -> Packed:
        """Return the mean absolute value of every tensor and the sign of every number; the sign of 0 is positive."""
        del coins
        scales = torch.stack([value.abs().sum() / max(1, value.numel()) for value in update.values()])
        return Packed.of(scales, pack((update.flat.numpy() >= 0).astype(np.int64), 1))

    def unpack(self, packed: Packed, layout: Layout, coins: Coins) -> FlatParams:
        """Return every sign times the scale of its tensor. Raises Malformed for scales below 0."""
        del coins
        if (packed.numbers < 0).any():
            raise Malformed("sent scales that are below 0")
        signs = FlatParams(torch.from_numpy(2.0 * unpack(packed.bits, num_in(layout), 1) - 1).float(), layout)
        parts = [scale * sign.reshape(-1) for scale, sign in zip(packed.numbers, signs.values(), strict=True)]
        return FlatParams(torch.cat(parts), layout)


class PowerSGD(Settings):
    """Sends two narrow matrices P and Q for each weight matrix, which is approximated by P Q'.

    ``rank``: the number of columns of P and Q; Vogels et al. 2019 try 1, 2 and 4. The weights of a convolution are a
    matrix with a row for each output channel. Vectors are sent uncompressed, and also matrices that are not larger than
    their factors P and Q together.
    """

    kind: Literal["powersgd"] = "powersgd"
    rank: int = Field(2, ge=1, le=10**6)
    title: ClassVar[str] = "PowerSGD"
    keeps_error: ClassVar[bool] = True

    def size(self, layout: Layout) -> Size:
        """Return the size of the packed message: all factors, and all uncompressed tensors."""
        return Size(sum(self._counts(shape)[0] + self._counts(shape)[1] for _, shape in layout))

    def pack(self, update: FlatParams, held: Payloads, coins: Coins) -> tuple[Packed, Payloads]:
        """Return the packed factors P and Q, and the client state: the new error, and Q for the next round.

        The product P Q' approximates the update plus the error of earlier rounds.
        """
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
        """Return the update: P Q' in place of every matrix, and the uncompressed tensors."""
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
        """Return the element counts of (P, Q) for a matrix, or (element count, 0) for an uncompressed tensor."""
        size = math.prod(shape)
        if len(shape) < 2 or self.rank * (shape[0] + size // max(1, shape[0])) >= size:
            return size, 0
        return self.rank * shape[0], self.rank * (size // shape[0])

    def _first(self, layout: Layout, generator: np.random.Generator) -> Params:
        """Return a random Q for each matrix, for a client's first round: standard normal, shape (columns, rank)."""
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
    """Return e + D: the update with the compression error of earlier rounds added."""
    error: Params | None = held.get("error")
    return update if error is None else flattened(add(update, error))


def _count_of(share: float, d: int) -> int:
    """Return ``share`` times ``d``, rounded up: at least 1.

    The product uses the exact decimal value of ``share``. In floats, 0.07 times 100 is slightly above 7, and would be
    rounded up to 8.
    """
    return math.ceil(Fraction(str(share)) * d)


def _scattered(numbers: torch.Tensor, places: torch.Tensor, layout: Layout) -> FlatParams:
    """Return an update with ``numbers`` at the positions ``places``, and zeros elsewhere."""
    flat = torch.zeros(num_in(layout))
    flat[places] = numbers
    return FlatParams(flat, layout)
