"""What a private generator is given and what it states before it starts: every kind fits the same slot of DA-FL."""

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
    of a table, if they are known: (inputs + 1) / 2 is in their units. ``features``: the version of the public features
    that they are, empty for records as they came.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    num_classes: int
    columns: tuple[Column, ...] = ()
    features: str = ""


@dataclass(frozen=True)
class GeneratorBill:
    """What a generator will cost: ``event`` released ``steps`` times. Known before a record is looked at.

    ``noise_multiplier`` is noise on a sum / clipping norm of one record, 0 where nothing is protected (epsilon inf).
    ``refused``: why nothing can be released within the budget; empty where it can. A refused bill costs nothing.
    """

    event: dp_event.DpEvent
    steps: int
    noise_multiplier: float
    sampling_rate: float
    refused: str = ""


@dataclass(frozen=True)
class GeneratorRequest:
    """What one client's generator is to make, and of what: the arguments of ``Generator.generate``."""

    records: PrivateRecords
    counts: NDArray[np.int64]
    bill: GeneratorBill
    noise: Noise
    generator: np.random.Generator


Made: TypeAlias = "torch.Tensor | Exception"
"""One client's synthetic records, or why it has none: one client's failure is not the others'."""


def nothing() -> None:
    """Do nothing."""


class Generator(Protocol):
    """A kind of private generator: frozen settings with a bill and a release. Unit: one record, add or remove."""

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Say what ``generate`` will cost on a client of ``num_records`` (public), within (epsilon, delta).

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

        ``counts``: (num_classes,) how many of each class to make, a private release already: classes with 0 are taken
        for absent. All that touches ``records`` is protected by ``noise`` (secret: Poisson masks, too) as ``bill``
        says; ``generator`` is for what needs no secret (initial weights, latent vectors). Raises RunError where
        training ends in numbers that are not finite.
        """
        ...


@runtime_checkable
class Stacking(Protocol):
    """A generator that many clients' releases share work in; of any other, one client's is made after another's."""

    def generate_stacked(self, requests: Sequence[GeneratorRequest], check: Callable[[], None] = nothing) -> list[Made]:
        """Do what ``generate`` does for each of many clients, with the same bits, in less time where that can be.

        ``check`` is called every now and then, and what it raises ends all. May be called from several threads.
        """
        ...


@runtime_checkable
class Choosy(Protocol):
    """A generator that is not for records of every shape."""

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError where it cannot make records of ``shape``: asked before anything is charged."""
        ...


@runtime_checkable
class Compiled(Protocol):
    """A generator whose steps are compiled code's where there is such code for this processor."""

    def trainer(self) -> str:
        """Return who takes its steps on this machine, and why, if it is PyTorch: words for a result."""
        ...


@runtime_checkable
class Shortening(Protocol):
    """A generator whose time can be told from less than a whole release."""

    def shortened(self, steps: int) -> tuple[Generator, float]:
        """Return a generator of which a release takes about this share of the time, to guess the time from."""
        ...


def generate_all(
    generator: Generator, requests: Sequence[GeneratorRequest], check: Callable[[], None] = nothing
) -> list[Made]:
    """Return what ``generator`` makes of each request. ``check`` is called now and then; what it raises ends all."""
    if isinstance(generator, Stacking):
        return generator.generate_stacked(requests, check)
    made: list[Made] = []
    for one in requests:
        check()
        try:
            made.append(generator.generate(one.records, one.counts, one.bill, one.noise, one.generator))
        except Exception as error:  # noqa: BLE001 (whatever a client's data raises is this one client's failure)
            made.append(error)
    return made
