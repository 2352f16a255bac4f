"""Rounds with a virtual clock. A client takes part only if its device is available and finishes before the deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_sim.devices.clock import Clock, Turnout, turnout
from fl_sim.devices.settings import fleet_of_clients
from fl_sim.store.run_directory import RoundRecord
from strategies.layer import Beginning, Drawn, Layer, Workload
from strategies.samplers import Coins


class TimedRounds(Layer):
    """Leaves out clients that would miss the deadline by the virtual clock, or limits their local steps."""

    def __init__(self, experiment: Any) -> None:
        self._experiment = experiment
        self._clock: Clock | None = None
        self._last: Turnout | None = None
        self._asking = 0.0

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the experiment has synchronous rounds with a virtual clock."""
        return bool(experiment.is_timed and experiment.is_synchronous)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> Layer | None:
        """Return the layer of a run, or None for centralized training, which has no client devices."""
        del out, progress
        return None if experiment.is_central else cls(experiment)

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError for invalid settings of the devices."""
        del beginning
        fleet_of_clients(experiment.devices, experiment.num_clients, experiment.seed)

    def ready(self, work: Workload) -> None:
        """Create the virtual clock. It computes durations from ``work``, such as numbers of records and bytes."""
        self._clock = clock = clock_of(self._experiment, work)
        seconds = lambda client, server_round: clock.seconds(client, server_round, clock.steps(client))  # noqa: E731
        self.inner.ready(replace(work, seconds=seconds))

    def cohort(self, server_round: int, coins: Coins | None = None) -> Drawn:
        """Return the clients of the inner layer's cohort that are available and finish before the deadline."""
        assert self._clock is not None, "rounds begin when the layer is ready"
        inner, server = self.inner.cohort(server_round, coins), self._experiment.server
        drawn = inner.clients.tolist()
        self._asking = max((self._clock.asking_seconds(client, server_round) for client in inner.asked), default=0.0)
        is_partial = server.late == "partial"
        self._last = turnout(self._clock, server_round, drawn, deadline=server.deadline, partial=is_partial)
        late = set(self._last.available.tolist()) - set(self._last.in_time.tolist())
        return Drawn(self._last.in_time, self._last.most_steps, sorted(late))

    def metrics(self) -> Mapping[str, Any]:
        """Return the fields of the round's line in ``rounds.jsonl``, with virtual duration and late clients."""
        timed = {} if self._last is None else {
            "virtual_seconds": self._asking + self._last.seconds, "late": self._last.num_late,
        }  # fmt: skip
        return {**self.inner.metrics(), **timed}

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return warnings, one of them with the number of rounds in which no client took part."""
        warnings = self.inner.conclusions(rounds)
        if not (empty := [one.round for one in rounds if one.late is not None and not one.cohort]):
            return warnings
        where = f"in {len(empty)} of {len(rounds)} rounds no client was available and in time (first: round {empty[0]})"
        return [*warnings, f"{where}: these rounds did not change the model"]


def clock_of(experiment: Any, work: Workload) -> Clock:
    """Return the virtual clock of the clients' devices. Raises UserError if ``devices`` do not fit the run."""
    fleet = fleet_of_clients(experiment.devices, experiment.num_clients, experiment.seed)
    return Clock(fleet, work.sizes, work.settings, work.load_of, experiment.seed)
