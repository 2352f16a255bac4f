"""How much time there is for runs: which of them may begin, and when those that run must stop."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_sim.errors import UserError


def deadline_after(hours: float | None) -> float:
    """Return when ``hours`` from now are over, by ``time.monotonic``; None: never. Raises UserError for no time."""
    if hours is None:
        return math.inf
    if not 0 < hours < math.inf:
        raise UserError(f"budget {hours:g} is no time to fill a table in: give hours, such as 2.5, or leave it out")
    return time.monotonic() + 3600 * hours


@dataclass(frozen=True)
class Budget:
    """Until ``deadline``, by ``time.monotonic``. ``seconds``: what is left of each run takes.

    ``begun``: runs that have rounds already. They go on, and stop after a round where the time is up; another begins
    only where it can be finished.
    """

    deadline: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()

    @property
    def left(self) -> float:
        """Return how many seconds there are, 0 or less where the time is up."""
        return self.deadline - time.monotonic()

    def fits(self, name: str) -> bool:
        """Say whether a run may begin now."""
        return self.left > (0.0 if name in self.begun else self.seconds.get(name, 0.0))
