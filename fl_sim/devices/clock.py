"""The virtual clock: how long each client's turn takes, and what becomes of a round with a deadline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_sim.devices.fleet import Fleet
from fl_sim.seeding import rng
from fl_sim.types import LocalSettings, Traffic

LOOK_AGAIN_SECONDS = 1.0
"""After so long the server looks again for clients where none was there."""


@dataclass(frozen=True, eq=False)
class Clock:
    """Virtual time, a function of the settings alone: nothing that is trained, and no real clock, has a part in it.

    ``sizes``: how many records each client trains on, (clients,). ``settings``: how they train. ``traffic``: what goes
    to a client for a turn and what comes back. ``seed``: draws who is there, and what is jittered.
    """

    fleet: Fleet
    sizes: NDArray[np.int64]
    settings: LocalSettings
    traffic: Traffic
    seed: int

    def steps(self, client: int) -> int:
        """Return how many steps a turn of ``client`` has."""
        return self.settings.num_steps(int(self.sizes[client]))

    def seconds(self, client: int, server_round: int, steps: int) -> float:
        """Return how long its turn in a round takes with so many steps: the model's way, the steps, the update's."""
        fleet = self.fleet
        sending = self.traffic.down / fleet.download[client] + self.traffic.up / fleet.upload[client]
        by_records = self._records(client, steps) * fleet.record_seconds[client]
        return float(sending + steps * fleet.step_seconds[client] + by_records) * self._factor(client, server_round)

    def steps_within(self, client: int, server_round: int, seconds: float) -> int | None:
        """Return how many of its steps fit into ``seconds``, None where not even the first or the sending does."""
        fewest, most = min(1, self.steps(client)), self.steps(client)
        if self.seconds(client, server_round, fewest) > seconds:
            return None
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if self.seconds(client, server_round, middle) <= seconds:
                fewest = middle
            else:
                most = middle - 1
        return fewest

    def there(self, look: int) -> NDArray[np.bool_]:
        """Return which clients are there when the server looks for the ``look``-th time, (clients,)."""
        availability = self.fleet.availability
        if (availability == 1).all():
            return np.ones(len(availability), bool)
        return rng(self.seed, "availability", look).random(len(availability)) < availability

    def _records(self, client: int, steps: int) -> int:
        size = int(self.sizes[client])
        if not size:
            return 0
        passes, rest = divmod(steps, self.settings.num_batches(size))
        return passes * size + min(rest * self.settings.batch_size, size)

    def _factor(self, client: int, server_round: int) -> float:
        if not self.fleet.jitter:
            return 1.0
        return math.exp(self.fleet.jitter * rng(self.seed, "jitter", client, server_round).standard_normal())


@dataclass(frozen=True)
class Turnout:
    """Who is asked in a round, and what comes of it.

    ``asked``: those of the cohort who are there, ascending. ``in_time``: those of them who are through by the deadline.
    ``most_steps``: {client: how many steps it has time for}, of those who do not get through all of theirs.
    ``seconds``: how long the round lasts.
    """

    asked: NDArray[np.int64]
    in_time: NDArray[np.int64]
    most_steps: Mapping[int, int]
    seconds: float

    @property
    def num_late(self) -> int:
        """Return how many updates are lost."""
        return len(self.asked) - len(self.in_time)


def turnout(clock: Clock, server_round: int, cohort: Sequence[int], *, deadline: float, partial: bool) -> Turnout:
    """Return who of a round's ``cohort`` is asked and gets through within ``deadline`` seconds (0: there is none).

    ``partial``: whether a client that would be late does as many steps as it has time for instead, at least one.
    A round with an update that is lost lasts to the deadline, else as long as its slowest client, and one in which
    nobody is there until the server looks again.
    """
    there = clock.there(server_round)
    asked = [int(client) for client in cohort if there[client]]
    most_steps: dict[int, int] = {}
    ends: dict[int, float] = {}
    for client in asked:
        steps = clock.steps(client)
        seconds = clock.seconds(client, server_round, steps)
        if deadline and seconds > deadline:
            fitting = clock.steps_within(client, server_round, deadline) if partial else None
            if fitting is None:
                continue
            most_steps[client] = fitting
            seconds = clock.seconds(client, server_round, fitting)
        ends[client] = seconds
    lasts = deadline if len(ends) < len(asked) else max(ends.values(), default=LOOK_AGAIN_SECONDS)
    return Turnout(np.array(asked, np.int64), np.array(list(ends), np.int64), most_steps, lasts)
