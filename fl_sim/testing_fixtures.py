"""Fixtures for pytest that make tests of fl-sim faster: coarse privacy accounting, a fake clock, no fsync.

``pytest_plugins = ["fl_sim.testing_fixtures"]`` in a conftest.py registers the fixtures. They replace private functions
and constants of fl-sim, so that tests themselves need no private names. The engine for tests is
``fl_sim.testing_runs.FakeEngine``. Modules that take seconds to import are imported at their first use.
"""

import os
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import pytest


class SetFineness(Protocol):
    """The type of a function that makes the two privacy accountants (PLD and RDP) faster and less precise."""

    def __call__(self, *, losses: int = 1, orders: int = 1) -> None:
        """Set the resolution of both accountants.

        ``losses``: the factor by which the PLD accountant's grid of privacy losses becomes coarser. ``orders``: a
        number n. The RDP accountant then computes its series only at every n-th order, and interpolates between these
        orders.
        """


class FewerImages(Protocol):
    """A function that makes ``fl_sim.data.images_of_features`` faster and less precise, and clears its caches.

    That module reconstructs images from their features: by a regression that is fitted to artificial images, then by
    gradient descent steps.
    """

    def __call__(
        self,
        *,
        steps: int | None = None,
        made: int | None = None,
        at_a_time: int | None = None,
        whitened: int | None = None,
    ) -> None:
        """Set numbers of images and steps in the module ``images_of_features``; None leaves a number unchanged.

        ``steps``: number of gradient descent steps. ``made``: number of artificial images for the regression.
        ``at_a_time``: number of images in a batch. ``whitened``: number of images from which the whitening is computed.
        """


class FakeClock:
    """A fake of the module ``time``: its clock moves only by ``sleep``, which returns at once.

    ``slept``: the seconds of every sleep. ``at_sleep``: a function that is called with the seconds of every sleep.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.at_sleep: Callable[[float], None] = lambda _: None

    def sleep(self, seconds: float) -> None:
        """Move the clock forward by ``seconds``."""
        self.now += seconds
        self.slept.append(seconds)
        self.at_sleep(seconds)

    def monotonic(self) -> float:
        """Return the present time of the fake clock, in seconds."""
        return self.now

    perf_counter = thread_time = monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], FakeClock]:
    """Return a function that replaces ``time`` in a given module by a new FakeClock, and returns the clock."""

    def replaced(module: ModuleType) -> FakeClock:
        clock = FakeClock()
        monkeypatch.setattr(module, "time", clock)
        return clock

    return replaced


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable ``os.fsync``. Calls of ``os.fsync`` after rounds and ledger entries take most of a small run's time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def set_fineness() -> Iterator[SetFineness]:
    """Yield a function that makes the privacy accountants PLD and RDP faster and less precise: epsilons become larger.

    Each change clears the caches of the accountants.
    """
    from fl_sim.privacy import accounting, loss_distribution, renyi  # noqa: PLC0415

    interval, series, chosen = loss_distribution._INTERVAL, renyi._SERIES, [1, 1]  # noqa: SLF001
    with pytest.MonkeyPatch.context() as patched:

        def fineness(*, losses: int = 1, orders: int = 1) -> None:
            if losses != chosen[0]:
                patched.setattr(loss_distribution, "_INTERVAL", interval * losses)
                loss_distribution.epsilon.cache_clear()
            if orders != chosen[1]:
                patched.setattr(renyi, "_SERIES", series[::orders])
                renyi.rdp_curve.cache_clear()
                accounting.poisson_noise_multiplier.cache_clear()
            chosen[:] = losses, orders

        yield fineness


@pytest.fixture
def fewer_images() -> Iterator[FewerImages]:
    """Yield a function that makes ``fl_sim.data.images_of_features`` faster and less precise for one test."""
    from fl_sim.data import images_of_features, reading, scattering, scattering_maps  # noqa: PLC0415

    remembered = (
        images_of_features._regression,  # noqa: SLF001
        scattering.whitening_of,
        scattering_maps.mixing_of,
        reading._features_once,  # noqa: SLF001
    )

    def forget() -> None:
        for one in remembered:
            one.cache_clear()

    with pytest.MonkeyPatch.context() as patched:

        def fewer(
            *,
            steps: int | None = None,
            made: int | None = None,
            at_a_time: int | None = None,
            whitened: int | None = None,
        ) -> None:
            asked = {"STEPS": steps, "_MADE": made, "_AT_A_TIME": at_a_time}
            for name, number in asked.items():
                if number is not None:
                    patched.setattr(images_of_features, name, number)
            if whitened is not None:
                patched.setattr(scattering, "_NUM_MADE", whitened)
            forget()

        yield fewer
    forget()
