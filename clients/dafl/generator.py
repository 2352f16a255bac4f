"""The protocol of private generators of synthetic records, with their requests and bills (privacy costs), for DA-FL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch
from fl_sim.privacy.mechanisms import Noise
from fl_sim.types import Column

if TYPE_CHECKING:
    from dp_accounting import dp_event  # loads slowly, and most runs need no generator


@dataclass(frozen=True)
class PrivateRecords:
    """One client's own records as the input of a generator, scaled only by public constants. SENSITIVE.

    ``inputs``: float32 in [-1, 1], (n, *input shape); ``labels``: int64 (n,), values in 0..num_classes-1. ``columns``:
    the columns of a table, if they are known; (inputs + 1) / 2 is in the units of the columns. ``features``: the
    version of the public features (such as scattering) in ``inputs``; empty for original records.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    num_classes: int
    columns: tuple[Column, ...] = ()
    features: str = ""


@dataclass(frozen=True)
class GeneratorBill:
    """The privacy cost of a release: the privacy event ``event``, ``steps`` times. Computed from public numbers alone.

    ``noise_multiplier``: standard deviation of the noise on a sum / clipping norm of one record; 0 for no protection
    (epsilon inf). ``refused``: the reason if no useful release is possible within the budget; nothing is then charged
    or released. Otherwise it is empty.
    """

    event: dp_event.DpEvent
    steps: int
    noise_multiplier: float
    sampling_rate: float
    refused: str = ""


@dataclass(frozen=True)
class GeneratorRequest:
    """The arguments of ``Generator.generate`` for one client."""

    records: PrivateRecords
    counts: NDArray[np.int64]
    bill: GeneratorBill
    noise: Noise
    generator: np.random.Generator


Check: TypeAlias = Callable[[], None]
"""A function that a long computation calls repeatedly. An exception from it aborts the computation."""

Made: TypeAlias = "torch.Tensor | Exception"
"""One client's synthetic records, or its error. The error of one client does not affect other clients."""


class Generator(Protocol):
    """A private generator of synthetic records: immutable settings, a privacy cost and a release.

    Privacy unit: one record, add or remove.
    """

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Return the privacy cost of ``generate`` for a client with ``num_records`` records, within (epsilon, delta).

        The number of records is public. epsilon inf means no noise and no clipping.
        """
        ...

    def generate(
        self,
        records: PrivateRecords,
        counts: NDArray[np.int64],
        bill: GeneratorBill,
        noise: Noise,
        generator: np.random.Generator,
    ) -> torch.Tensor:
        """Return synthetic records, (sum of counts, *input shape) in [-1, 1], sorted by class.

        ``counts``: (num_classes,) the number of synthetic records of each class; it is already a private release, and a
        class with 0 is treated as absent. ``noise`` protects every computation on ``records``, at the noise level of
        ``bill``, and also draws secret sampling masks. ``generator`` draws random numbers that need no secrecy (initial
        weights, latent vectors). Raises RunError if training ends in numbers that are not finite.
        """
        ...


@runtime_checkable
class StackedGenerator(Protocol):
    """A generator that computes the releases of many clients together, which takes less time."""

    def generate_stacked(self, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
        """Return the result of ``generate`` for each client, bit-identical. Several threads may call this method."""
        ...


@runtime_checkable
class ShapedGenerator(Protocol):
    """A generator that supports only some shapes of records."""

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError if the generator cannot make records of ``shape``.

        Called before any charge to a privacy ledger.
        """
        ...


@runtime_checkable
class CompiledGenerator(Protocol):
    """A generator that trains with compiled code if this machine has it."""

    def trainer(self) -> str:
        """Return the name of the trainer on this machine for ``result.json``: "native trainer", or PyTorch and why."""
        ...


@runtime_checkable
class ShortenedGenerator(Protocol):
    """A generator whose time for a release can be forecast from a shorter training."""

    def shortened(self, steps: int) -> tuple[Generator, float]:
        """Return a generator with at most ``steps`` steps, and its approximate time / time of the full release."""
        ...


def generate_all(generator: Generator, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
    """Return the synthetic records, or the error, of each request."""
    if isinstance(generator, StackedGenerator):
        return generator.generate_stacked(requests, check)
    made: list[Made] = []
    for one in requests:
        check()
        try:
            made.append(generator.generate(one.records, one.counts, one.bill, one.noise, one.generator))
        except Exception as error:  # noqa: BLE001 (an error from one client's records is this client's failure)
            made.append(error)
    return made
