"""Fixtures of pytest: coarse accounting, a clock that stands still, no waiting for disks.

``pytest_plugins = ["fl_sim.testing_fixtures"]`` in a conftest.py registers them. What they replace inside of fl-sim is
known here alone, so that tests name nothing private. The engine for tests is ``fl_sim.testing_runs.FakeEngine``.
Nothing that takes seconds to import is imported at once.
"""

import os
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol

import pytest


class SetFineness(Protocol):
    """Sets the resolution of the accountants."""

    def __call__(self, *, losses: int = 1, orders: int = 1) -> None:
        """Make the grid of privacy losses ``losses`` times coarser, and sum a series at every ``orders``-th order."""


class FewerImages(Protocol):
    """Sets from how many images the images of features are computed, and clears their cache."""

    def __call__(
        self,
        *,
        steps: int | None = None,
        made: int | None = None,
        at_a_time: int | None = None,
        whitened: int | None = None,
    ) -> None:
        """Take that many steps from that many made-up images, so many at a time; whiten by that many. None: as ever."""


class FakeClock:
    """A clock that moves only by sleeping, which returns at once, in place of the module ``time``.

    ``slept`` holds the seconds of every sleep; ``at_sleep``, if set, is called with them.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.at_sleep: Callable[[float], None] = lambda _: None

    def sleep(self, seconds: float) -> None:
        """Move on by ``seconds``."""
        self.now += seconds
        self.slept.append(seconds)
        self.at_sleep(seconds)

    def monotonic(self) -> float:
        """Return ``now``."""
        return self.now

    perf_counter = thread_time = monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], FakeClock]:
    """Replace the clock of a module that imports ``time`` by a FakeClock."""

    def replaced(module: ModuleType) -> FakeClock:
        clock = FakeClock()
        monkeypatch.setattr(module, "time", clock)
        return clock

    return replaced


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync after every round and charge, which takes most of a small run's time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def set_fineness() -> Iterator[SetFineness]:
    """Make both accountants coarser and faster, with larger upper bounds; each change clears their caches."""
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
    """Compute images of features from fewer images, until the test ends."""
    from fl_sim.data import images_of_features, reading, scattering  # noqa: PLC0415

    remembered = images_of_features._regression, scattering.whitening_of, reading._features_once  # noqa: SLF001

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
