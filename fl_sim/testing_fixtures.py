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
    """Sets how finely the accountants work from now on."""

    def __call__(self, *, losses: int = 1, orders: int = 1) -> None:
        """Make the grid of privacy losses ``losses`` times coarser, and sum a series at every ``orders``-th order."""


class FewerImages(Protocol):
    """Lets images of features be made from fewer images from now on; what was remembered of them is forgotten."""

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
    """A clock that stands still, in place of the module ``time``: sleeping moves it and returns at once.

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
    """Give a module that imports ``time`` a clock that stands still."""

    def replaced(module: ModuleType) -> FakeClock:
        clock = FakeClock()
        monkeypatch.setattr(module, "time", clock)
        return clock

    return replaced


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk after every round and charge: it is most of a small run's time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def set_fineness() -> Iterator[SetFineness]:
    """Let both accountants find larger upper bounds in less time; what they remember is forgotten with each change."""
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
    """Let images of features be made from fewer images, until the test ends."""
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
