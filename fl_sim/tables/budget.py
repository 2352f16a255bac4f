"""How much time there is for runs: which of them may begin, and when those that run must stop."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field


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
