"""What a run will take, before it runs: seconds on this machine, and bytes on the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fl_sim.experiment.job import Job
from fl_sim.simulation.pace import Pace, clients_at_once, num_steps
from fl_sim.simulation.procedure import procedure_of
from fl_sim.simulation.stage import stages_of
from fl_sim.types import Traffic


@dataclass(frozen=True)
class Estimate:
    """What a whole run is expected to take.

    ``seconds``: on this machine, by itself; None where that was not timed. ``synthetic_seconds``: those of them that go
    into making synthetic records. ``traffic``: bytes of arrays to and from all clients in all rounds; None where there
    are none (PATE and TSTR), and where it was not counted. ``once``: those of what travels before or after the rounds,
    about, by what it is. ``left_out``: what is not in the time, in words.
    """

    seconds: float | None
    traffic: Traffic | None
    once: Mapping[str, Traffic] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    synthetic_seconds: float = 0.0

    @property
    def total(self) -> Traffic | None:
        """Return all bytes together; None where none were counted."""
        counted = [*([self.traffic] if self.traffic else []), *self.once.values()]
        return sum(counted, Traffic(0, 0)) if counted else None


def seconds_beforehand(job: Job) -> float:
    """Return about how long clients work before the first round, one after another."""
    return sum(stage.seconds() for stage in stages_of(job))


def estimate_of(
    job: Job,
    pace: Pace | None,
    *,
    has_pool: bool,
    making: Callable[[Job], float] = seconds_beforehand,
    counted: bool = True,
) -> Estimate:
    """Return what a run of ``job`` takes; without its ``pace`` only what needs no timing.

    ``has_pool``: whether its synthetic records are there already. ``making`` says how long one core makes them.
    ``counted``: whether bytes are, for which the model is built.
    """
    seconds, made, procedure = None, 0.0, procedure_of(job)
    if pace is not None:
        work = num_steps(job) * pace.step + procedure.num_measured * pace.record
        made = 0.0 if has_pool else making(job) / clients_at_once(job)
        seconds = work / clients_at_once(job) + made + procedure.num_server_steps * pace.step
    if not counted:
        return Estimate(seconds, None, {}, procedure.untimed, made)
    return Estimate(seconds, procedure.traffic(), procedure.traffic_once(), procedure.untimed, made)
