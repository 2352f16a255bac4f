"""The interface of DA-FL's private generators, with their arguments and their privacy costs (bills)."""

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
    from dp_accounting import dp_event  # dp_accounting loads slowly, and most runs need no generator


@dataclass(frozen=True)
class PrivateRecords:
    """One client's own records as the input of a generator, scaled only by public constants.

    The records are SENSITIVE: they must stay on the client. ``inputs``: float32 in [-1, 1], (n, *input shape).
    ``labels``: int64 (n,), values in 0..num_classes-1. ``columns``: the columns of a table, if they are known. Then
    (inputs + 1) / 2 is in the units of the columns. ``features``: the version of the public transform (such as
    scattering) that made ``inputs`` from the original records; empty without a transform.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    num_classes: int
    columns: tuple[Column, ...] = ()
    features: str = ""


@dataclass(frozen=True)
class GeneratorBill:
    """The privacy cost (bill) of a client's synthetic records, made by ``steps`` executions of one mechanism.

    ``event``: the mechanism, as an event for the privacy accountant. The cost depends only on public numbers.
    ``noise_multiplier``: the standard deviation of the noise on a sum, divided by the clipping norm of one record; 0
    means no protection (epsilon inf). ``refused``: empty, or the reason why the privacy budget allows no useful
    synthetic records. After a refusal, no synthetic records are made, and there is no privacy cost.
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
    """A private generator: it makes synthetic records, and computes their privacy cost.

    The settings of a generator are immutable.

    The privacy unit is one record, which is added or removed.
    """

    def bill(self, num_records: int, num_classes: int, epsilon: float, delta: float) -> GeneratorBill:
        """Return the privacy cost of ``generate`` for a client with ``num_records`` records, at most (epsilon, delta).

        The number of records is public. An epsilon of inf means no noise and no clipping.
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

        ``counts``: the number of synthetic records of each class, (num_classes,). These numbers are already
        differentially private. A class with the number 0 gets no synthetic records. ``noise``: the secret random
        source. It determines the noise on every computation on ``records`` (with the noise multiplier of ``bill``), and
        the sampling of records. ``generator``: the source of random numbers that need no secrecy (initial weights,
        latent vectors). Raises RunError if trained weights are not finite.
        """
        ...


@runtime_checkable
class StackedGenerator(Protocol):
    """A generator that makes the synthetic records of many clients in one computation to save time."""

    def generate_stacked(self, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
        """Return each client's synthetic records, with the same bits as from ``generate``.

        Several threads may call this method.
        """
        ...


@runtime_checkable
class ShapedGenerator(Protocol):
    """A generator that supports only some shapes of records."""

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise UserError if the generator cannot make records of ``shape``.

        This method is called before any privacy cost is written into a privacy ledger.
        """
        ...


@runtime_checkable
class CompiledGenerator(Protocol):
    """A generator that trains with compiled code if this machine has it."""

    def trainer(self) -> str:
        """Return the name of the trainer on this machine, for ``result.json``.

        The name is "native trainer" for the compiled C++ trainer. Otherwise it is PyTorch, with the reason.
        """
        ...


@runtime_checkable
class ShortenedGenerator(Protocol):
    """A generator whose time can be forecast from a shorter training."""

    def shortened(self, steps: int) -> tuple[Generator, float]:
        """Return (a generator with at most ``steps`` steps, its training time divided by the full training time)."""
        ...


def generate_all(generator: Generator, requests: Sequence[GeneratorRequest], check: Check = lambda: None) -> list[Made]:
    """Return for each client its synthetic records, or the exception if ``generator`` failed for this client."""
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
