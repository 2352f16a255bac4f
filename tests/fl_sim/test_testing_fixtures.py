"""Fixtures for tests: a clock that stands still, accounting that is coarser but sound, images from fewer images."""

import os
import time
from collections.abc import Callable
from types import ModuleType

from dp_accounting import dp_event

from fl_sim.data import images_of_features
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.events import amplify_poisson
from fl_sim.simulation import timing
from fl_sim.testing_fixtures import FakeClock, FewerImages, SetFineness


def test_a_clock_is_moved_by_sleeping_and_by_the_test_alone(fake_clock: Callable[[ModuleType], FakeClock]) -> None:
    clock = fake_clock(timing)
    slept: list[float] = []
    clock.at_sleep = slept.append
    begun = timing.time.monotonic()
    timing.time.sleep(1000.0)
    clock.now += 1
    assert timing.time.monotonic() - begun == timing.time.perf_counter() - begun == 1001
    assert clock.slept == slept == [1000.0]
    assert timing.time.gmtime is time.gmtime
    assert time.monotonic is not timing.time.monotonic


def test_coarse_accounting_is_an_upper_bound_until_it_is_fine_again(set_fineness: SetFineness) -> None:
    counts = {amplify_poisson(dp_event.GaussianDpEvent(1.0), 0.1): 50}

    def found() -> list[float]:
        return [epsilon_of_counts(counts, 1e-5, accountant=accountant) for accountant in ("rdp", "pld")]

    set_fineness()
    fine = found()
    set_fineness(losses=100, orders=16)
    coarse = found()
    set_fineness()
    assert fine == found()
    assert all(one < other for one, other in zip(fine, coarse, strict=True))


def test_a_number_of_images_that_is_not_given_stays(fewer_images: FewerImages) -> None:
    steps = images_of_features.STEPS
    fewer_images(made=5)
    assert steps == images_of_features.STEPS
    fewer_images(steps=2)
    assert images_of_features.STEPS == 2


def test_no_test_waits_for_the_disk(tmp_path) -> None:
    assert os.fsync(-1) is None
