"""What a run will take, before it runs: seconds on this machine, and bytes on the wire."""

from collections.abc import Callable
from dataclasses import dataclass

from fl_sim.experiment.job import Job
from fl_sim.simulation.engine_choice import synthesis_seconds
from fl_sim.simulation.pace import Pace, clients_at_once, num_steps
from fl_sim.simulation.procedure import procedure_of
from fl_sim.types import Traffic


@dataclass(frozen=True)
class Estimate:
    """What a whole run is expected to take.

    ``seconds``: on this machine, by itself; None where that was not timed. ``traffic``: bytes of arrays to and from all
    clients in all rounds; None for PATE, which has none, and where it was not counted. ``left_out``: what is in
    neither, in words.
    """

    seconds: float | None
    traffic: Traffic | None
    left_out: tuple[str, ...] = ()


def estimate_of(
    job: Job,
    pace: Pace | None,
    *,
    has_pool: bool,
    making: Callable[[Job], float] = synthesis_seconds,
    counted: bool = True,
) -> Estimate:
    """Return what a run of ``job`` takes; without its ``pace`` only what needs no timing.

    ``has_pool``: whether its synthetic records are there already. ``making`` says how long one core makes them.
    ``counted``: whether bytes are, for which the model is built.
    """
    seconds, procedure = None, procedure_of(job)
    if pace is not None:
        work = num_steps(job) * pace.step + procedure.num_measured * pace.record
        made = 0.0 if has_pool else making(job)
        seconds = (work + made) / clients_at_once(job)
    return Estimate(seconds, procedure.traffic() if counted else None, procedure.untimed)
