"""Repeats rounds of a finished run, from any server state and with any clients. The layers of the run are used."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from fl_sim.engines.grid import LocalGrid
from fl_sim.errors import UserError
from fl_sim.kinds import kind_of
from fl_sim.params import layout_of
from fl_sim.seeding import process_kept
from fl_sim.simulation.client_runtime import fixed_threads
from fl_sim.simulation.engine_choice import open_engine
from fl_sim.simulation.run_log import RunLog, Silent
from fl_sim.simulation.stage import Run, Stage, measured_by_stages, prepared_strategy, stages_of
from fl_sim.store import run_directory
from fl_sim.threats.cohorts import cohort_of, cohorts_known, num_steps
from fl_sim.threats.finished import FinishedRun
from fl_sim.types import Cohort, Params, Reply, ServerState
from strategies.algorithm import payload_template
from strategies.answers import find_population
from strategies.flower import FederatedStrategy


def asks_clients(stage: Stage) -> bool:
    """Return True if ``stage`` may send requests to clients outside of rounds, or runs code before round 1.

    A stage is code that a setting adds before or after the rounds of a run.
    """
    return bool(stage.tasks()) or type(stage).before is not Stage.before


def check_replayable(finished: FinishedRun) -> None:
    """Raise UserError if rounds of the run cannot be repeated from only a stored server state."""
    experiment, server = finished.job.experiment, finished.procedure.beginning()
    sent = [dict(layout_of(one)) for one in payload_template(finished.procedure.algorithm, server).values()]
    obstacles = {
        "its cohorts may depend on replies or durations of clients": not cohorts_known(finished.job),
        "its clients also answer requests outside the rounds":
            any(map(asks_clients, stages_of(finished.job))),
        "the client states of earlier rounds are not kept": bool(finished.procedure.kept_by_clients(server)),
        f"clients of algorithm {kind_of(experiment.algorithm)} send more than one change of the model":
            sent != [dict(layout_of(server.params))],
    }  # fmt: skip
    if why := next((reason for reason, holds in obstacles.items() if holds), ""):
        raise UserError(
            f"the rounds of {finished.out} cannot be repeated from its server states: {why}; take --method exact"
        )


@dataclass(frozen=True)
class LocalSteps:
    """The amount of work of an unlearning method. ``rounds``: the number of changes of the global model.

    ``steps``: the number of local steps of all clients. ``recomputed``: the number of further local steps, which only
    recompute updates that a server could have stored.
    """

    rounds: int = 0
    steps: int = 0
    recomputed: int = 0

    def __add__(self, other: "LocalSteps") -> "LocalSteps":
        return LocalSteps(self.rounds + other.rounds, self.steps + other.steps, self.recomputed + other.recomputed)


@dataclass(frozen=True, eq=False)
class Replay:
    """The server of a finished run, which can repeat the run's rounds. The run directory is not changed.

    ``run``: the run as an object, which writes into a temporary directory. ``last``: the server state after the run's
    last round.
    """

    finished: FinishedRun
    run: Run
    last: ServerState

    @property
    def strategy(self) -> FederatedStrategy:
        """The server side of the run, a Flower strategy with the run's layers."""
        return self.run.strategy

    @property
    def num_rounds(self) -> int:
        """The number of rounds of the run."""
        return int(self.finished.facts["rounds"])

    def cohort(self, server_round: int, without: int) -> list[int]:
        """Return the IDs of the clients in round ``server_round``, ascending, without the client ``without``."""
        return [one for one in cohort_of(self.finished.job, server_round) if one != without]

    def num_steps(self, client: int) -> int:
        """Return the number of local steps of ``client`` in a round."""
        return num_steps(self.finished.job, client)

    def rate(self, server_round: int) -> float:
        """Return the learning rate of a round. Rounds after the run's last round use the last round's learning rate."""
        experiment = self.finished.job.experiment
        return experiment.local.rate_in(min(server_round, experiment.rounds), experiment.rounds)

    def updates(
        self,
        server: ServerState,
        clients: Sequence[int],
        server_round: int,
        most_steps: Mapping[int, int] = MappingProxyType({}),
    ) -> tuple[Reply, ...]:
        """Train ``clients`` as in round ``server_round``, from the state ``server``; return updates sorted by client.

        ``most_steps``: {client: maximum number of local steps}, to train for fewer steps than in the run.
        """
        strategy, timeout = self.strategy, self.finished.job.experiment.round_timeout
        strategy.server = server
        strategy.layer.begin(server_round)
        order = replace(
            strategy.order, server_round=server_round, learning_rate=self.rate(server_round),
            most_steps=dict(most_steps),
        )  # fmt: skip
        return strategy.layer.received(strategy.train(self.run.grid, order, timeout, clients))

    def merged(self, server: ServerState, replies: tuple[Reply, ...], server_round: int) -> ServerState:
        """Aggregate the updates ``replies`` as in round ``server_round``; return the new server state."""
        strategy = self.strategy
        strategy.server = server
        expected = strategy.sampler.expected_size(strategy.num_members)
        cohort = Cohort(
            server_round, replies, strategy.num_members, expected, strategy.num_holders(replies), strategy.seed
        )
        aggregate = strategy.layer.aggregate(cohort, strategy.algorithm, server)
        return server if aggregate is None else strategy.layer.merge(strategy.algorithm, server, aggregate)

    def model(self, server: ServerState) -> Params:
        """Return all tensors of the model that the run would publish if ``server`` were its last server state."""
        self.strategy.server = server
        return self.finished.job.whole({**self.finished.job.fixed, **self.run.model()})

    def measured_by_stages(self, server: ServerState) -> dict[str, float]:
        """Return the measures that the run's stages compute for the model of ``server``, {name: number}.

        A stage is code that a setting adds to a run, such as the measurement of an attack's success.
        """
        self.strategy.server = server
        return measured_by_stages(self.run, self.num_rounds, is_last=True)


@contextmanager
def replay_of(finished: FinishedRun) -> Iterator[Replay]:
    """Start the engine of a finished run inside a ``with`` block, and yield the object that repeats its rounds.

    Raises UserError as ``check_replayable`` does, and if the run has not stored its last server state.
    """
    check_replayable(finished)
    job, procedure = finished.job, finished.procedure
    log = RunLog(procedure.beginning())
    if (last := run_directory.read_checkpoint(finished.out, log.server)) is None:
        raise UserError(
            f"{finished.out} has not kept the server state after its last round ({run_directory.CHECKPOINT}; large "
            "ones are removed): take --method exact"
        )
    with (
        TemporaryDirectory() as scratch, process_kept(), fixed_threads(job.experiment.engine.threads),
        open_engine(job, Silent().replied) as (grid, _),
    ):  # fmt: skip
        yield Replay(finished, _prepared(finished, grid, Path(scratch), log), last[1])


def _prepared(finished: FinishedRun, grid: LocalGrid, scratch: Path, log: RunLog) -> Run:
    job, procedure = finished.job, finished.procedure
    strategy = prepared_strategy(job, procedure.algorithm, procedure.on_clients, grid, scratch, log, Silent())
    strategy.population = find_population(grid, job.experiment.num_clients, job.experiment.round_timeout)
    return Run(job, strategy, grid, scratch, log)
