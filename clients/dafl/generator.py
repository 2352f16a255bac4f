"""The protocol of private generators, their requests and their bills: every kind fits the same slot of DA-FL."""

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
    """One client's own records, scaled by public constants alone.

    ``inputs``: float32 in [-1, 1], (n, *input shape); ``labels``: int64 (n,), values in 0..num_classes-1. ``columns``:
    of a table, if they are known: (inputs + 1) / 2 is in their units. ``features``: the version of the public features,
    empty for the original records.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    num_classes: int
    columns: tuple[Column, ...] = ()
    features: str = ""


@dataclass(frozen=True)
class GeneratorBill:
    """The cost of a release: ``event`` released ``steps`` times. Known before a record is read.

    ``noise_multiplier`` is noise on a sum / clipping norm of one record, 0 for no protection (epsilon inf).
    ``refused``: why nothing can be released within the budget, or empty. A refused bill costs nothing.
    """

    event: dp_event.DpEvent
    steps: int
    noise_multiplier: float
    sampling_rate: float
    refused: str = ""


@dataclass(frozen=True)
class GeneratorRequest:
    """The arguments of one client's ``Generator.generate``."""

    records: PrivateRecords
    counts: NDArray[np.int64]
    bill: GeneratorBill
    noise: Noise
    generator: np.random.Generator


Check: TypeAlias = Callable[[], None]
"""Called now and then by a computation that takes long: its error ends the computation."""

Made: TypeAlias = "torch.Tensor | Exception"
"""One client's synthetic records, or its error: one client's failure is not the others'."""


class Generator(Protocol):
    """A kind of private generator: frozen settings with a bill and a release. Unit: one record, add or remove."""

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Return the cost of ``generate`` on a client of ``num_records`` (public), within (epsilon, delta).

        epsilon inf: no noise and no clipping.
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

        ``counts``: (num_classes,) the number of records of each class to make, a private release already: classes with
        0 are taken for absent. All that touches ``records`` is protected by ``noise`` (secret: Poisson masks, too) as
        ``bill`` says; ``generator`` draws all that needs no secret (initial weights, latent vectors). Raises RunError
        if training ends in numbers that are not finite.
        """
        ...


@runtime_checkable
class StackedGenerator(Protocol):
    """A generator that makes the releases of many clients together; others make one after another."""

    def generate_stacked(self, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
        """Return the result of ``generate`` for each of many clients, with the same bits, in less time if possible.

        May be called from several threads.
        """
        ...


@runtime_checkable
class ShapedGenerator(Protocol):
    """A generator that is not for records of every shape."""

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError if it cannot make records of ``shape``. Called before anything is charged."""
        ...


@runtime_checkable
class CompiledGenerator(Protocol):
    """A generator that may train by compiled code, if there is such code for this processor."""

    def trainer(self) -> str:
        """Return the name of the trainer on this machine and, for PyTorch, the reason: text for a result."""
        ...


@runtime_checkable
class ShortenedGenerator(Protocol):
    """A generator whose time can be extrapolated from less than a whole release."""

    def shortened(self, steps: int) -> tuple[Generator, float]:
        """Return a generator with fewer steps, and about which share of the time its release takes."""
        ...


def generate_all(generator: Generator, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
    """Return the records or the error of each request."""
    if isinstance(generator, StackedGenerator):
        return generator.generate_stacked(requests, check)
    made: list[Made] = []
    for one in requests:
        check()
        try:
            made.append(generator.generate(one.records, one.counts, one.bill, one.noise, one.generator))
        except Exception as error:  # noqa: BLE001 (whatever a client's data raises is this one client's failure)
            made.append(error)
    return made
