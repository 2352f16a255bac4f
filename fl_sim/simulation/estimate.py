"""What a run will take, before it runs: seconds on this machine, and bytes on the wire."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fl_sim.simulation.stopwatch import Stopwatch
from fl_sim.simulation.work import Work
from fl_sim.types import Traffic


@dataclass(frozen=True)
class Estimate:
    """What a whole run is expected to take.

    ``seconds``: on this machine, by itself; None where nothing was timed, and ``at_least`` where not all was.
    ``synthetic_seconds``: those of them that go into what is made once for several runs, synthetic records.
    ``traffic``: bytes of arrays to and from all clients in all rounds; None where there are none (PATE and TSTR), and
    where it was not counted. ``once``: those of what travels before or after the rounds, about, by what it is.
    ``left_out``: what is not in the time, or only in part, in words.
    """

    seconds: float | None
    traffic: Traffic | None
    once: Mapping[str, Traffic] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    synthetic_seconds: float = 0.0
    at_least: bool = False

    @property
    def total(self) -> Traffic | None:
        """Return all bytes together; None where none were counted."""
        counted = [*([self.traffic] if self.traffic else []), *self.once.values()]
        return sum(counted, Traffic(0, 0)) if counted else None


NOTHING: Final = Estimate(None, None)
"""Where nothing was timed nor counted."""


def estimate_of(
    works: Sequence[Work],
    watch: Stopwatch | None,
    traffic: Mapping[str, Traffic],
    *,
    made: Collection[str] = (),
) -> Estimate:
    """Return what ``works`` take by what ``watch`` has timed; None: nothing was.

    ``traffic``: bytes by what they are, those of ``rounds`` among them. ``made``: names of what is there already.
    """
    once = dict(traffic)
    of_rounds = once.pop("rounds", None)
    ahead = [work for work in works if (work.turns or work.pieces) and work.makes not in made]
    if watch is None:
        return Estimate(None, of_rounds, once, tuple(work.what for work in ahead if not work.ready))
    timings = [(work, watch.timing(work)) for work in ahead]
    untimed = [work.what for work, timing in timings if timing.why_not]
    partly = [f"most of {work.what}" for work, timing in timings if timing.at_least]
    seconds = sum(map(watch.seconds, ahead)) if len(untimed) < len(ahead) else None
    return Estimate(
        seconds,
        of_rounds,
        once,
        (*untimed, *partly),
        sum(watch.seconds(work) for work in ahead if work.makes),
        at_least=bool(partly) or any(timing.why_not and work.ready for work, timing in timings),
    )
