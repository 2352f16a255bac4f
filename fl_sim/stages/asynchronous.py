"""The procedure of FedAsync and FedBuff, which replaces the rounds: clients train asynchronously.

The server merges updates in the order of their arrival. Arrival times are simulated, by a virtual clock.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_sim.devices.clock import ClientTurn, Schedule, ServerStep
from fl_sim.devices.settings import fleet_of_clients
from fl_sim.engines import wire
from fl_sim.errors import Malformed, UserError
from fl_sim.own_code import error_context
from fl_sim.params import WriteGuard
from fl_sim.seeding import rng, seed_process
from fl_sim.simulation.client_runtime import workload_of
from fl_sim.simulation.forecast import work_of_rounds
from fl_sim.simulation.rounds import Exchange, Rounds
from fl_sim.simulation.run_log import RunLog
from fl_sim.simulation.timing import Work
from fl_sim.store import run_directory
from fl_sim.store.run_directory import Progress, read_state, write_state
from fl_sim.types import Reply, ServerState, Traffic
from strategies.algorithm import groups_of
from strategies.answers import find_population, refusal
from strategies.flower import FederatedStrategy, Round, check_finite, mean_loss
from strategies.samplers import in_random_order
from strategies.servers import Arrival, FedAsync, FedBuff
from strategies.timed import clock_of

TOGETHER = 64
"""The approximate number of clients that train in one exchange of messages. It keeps all workers of an engine busy.

The next server step may need fewer updates. Then the same exchange also trains clients of later server steps, if these
clients have received their model already. On the virtual clock, their updates still arrive later.
"""

SENT = "sent-in-round-"
"""The prefix of the file names of models that clients still train. Updates of these models have not arrived yet."""


@dataclass(frozen=True)
class AsynchronousRounds(Rounds):
    """The procedure of FedAsync and FedBuff. A round is one step of the server, which merges one or more updates."""

    @property
    def server(self) -> FedAsync | FedBuff:
        """Return the settings of the asynchronous server."""
        server = self.job.experiment.server
        assert isinstance(server, FedAsync | FedBuff)
        return server

    def beginning(self) -> ServerState:
        """Return the server state before the first round.

        Raises UserError for invalid settings of devices, and for an algorithm that sends more than the model to
        clients.
        """
        begun, experiment = super().beginning(), self.job.experiment
        devices: Any = experiment.devices
        # the devices are built here only for a check: invalid settings raise UserError before the first round
        fleet_of_clients(devices, experiment.num_clients, experiment.seed)
        try:
            self.server.check_broadcast(self.algorithm, begun)
        except ValueError as error:
            raise UserError(str(error)) from error
        return begun

    def work(self) -> Sequence[Work]:
        """Return the computation of the whole run for the time forecast: training, evaluation and stages."""
        experiment = self.job.experiment
        return work_of_rounds(self, self.algorithm, experiment.rounds * self.server.step_size / experiment.num_clients)

    def traffic(self) -> dict[str, Traffic]:
        """Return a forecast of the bytes that the server exchanges with all clients, separately for each purpose.

        Some clients receive a model but do not finish its training before the run ends. The forecast includes an
        estimate of the bytes of these models.
        """
        experiment, size = self.job.experiment, self.server.step_size
        in_the_end = min(self.server.concurrency - 1, experiment.num_clients - size)
        return self._traffic_of(experiment.rounds * size, in_the_end)

    def _exchange(self, strategy: FederatedStrategy, grid: Grid, out: Path, log: RunLog) -> Exchange:
        strategy.population = find_population(grid, strategy.num_clients, self.job.experiment.round_timeout)
        experiment = self.job.experiment

        def order_of(server_round: int) -> Iterable[int]:
            coins = rng(experiment.seed_of_sampling, "sampler", server_round).random
            return map(int, in_random_order(experiment.num_clients, coins))

        clock = clock_of(experiment, workload_of(self.job, log.num_pooled, strategy))
        schedule = Schedule(clock, order_of, self.server.concurrency, self.server.step_size)
        server = _Server(self, strategy, grid, out / run_directory.STATE, log, schedule)
        server.resume(len(log.rounds))
        return lambda server_round, _: server.step(server_round)


@dataclass
class _Server:
    """The asynchronous server of a run. A turn is a client's download, local training and upload.

    ``folder``: the folder with the models on which clients still train. ``sent``: the same models in memory, {round in
    which a turn started: server state}. ``trained``: {turn: update} of the updates that are computed already, but
    arrive later by the virtual clock. ``outdated``: model files that the next server step removes.
    """

    procedure: AsynchronousRounds
    strategy: FederatedStrategy
    grid: Grid
    folder: Path
    log: RunLog
    schedule: Schedule
    sent: dict[int, ServerState] = field(default_factory=dict)
    trained: dict[ClientTurn, Reply] = field(default_factory=dict)
    outdated: list[Path] = field(default_factory=list)

    def resume(self, last_round: int) -> None:
        """Continue a run after the server step ``last_round``.

        The arrival times of the updates are computed again. The models on which clients still train are read from
        files.
        """
        for _ in range(last_round):
            self.schedule.next_step()
        for server_round in sorted({turn.server_round for turn in self.schedule.in_flight}):
            digest = self.log.versions.get(server_round)
            path = self._path(server_round)
            if digest is None or not path.exists():
                raise UserError(
                    f"{path} is missing: clients still trained this model after round {last_round}; restore an "
                    "unchanged copy of this file, or start again in a new directory"
                )
            _, self.sent[server_round] = read_state(path, self.strategy.server, digest)
        for path in self.folder.glob(f"{SENT}*.safetensors"):
            if path not in map(self._path, self.sent):
                path.unlink()

    def step(self, server_round: int) -> Round:
        """Execute a step of the server, and return its measures.

        The step trains the clients whose updates arrive, and merges these updates.
        """
        start, before = time.perf_counter(), self.strategy.server
        self.sent[server_round] = before
        made = self.schedule.next_step()
        self._train(made)
        arrivals = [
            Arrival(self.trained.pop(turn), self.sent[turn.server_round].params, made.staleness(turn))
            # Synchronous rounds also add updates in the order of client IDs. The same order gives bit-identical sums.
            for turn in sorted(made.arrived, key=lambda turn: (turn.client, turn.server_round))
        ]
        experiment, algorithm = self.procedure.job.experiment, self.procedure.algorithm
        clients = self.strategy.num_holders([arrival.reply for arrival in arrivals]) or experiment.num_clients
        seed_process(experiment.seed, "merging", server_round)
        with error_context(f"merge of {type(algorithm).__name__}"):
            server = self.procedure.server.step(before, algorithm, arrivals, server_round, clients)
        check_finite({"params": server.params}, server_round)
        self.strategy.server = server
        self._keep_sent()
        each = self.strategy.traffic
        return Round(
            server_round, len(arrivals), mean_loss([arrival.reply for arrival in arrivals]),
            Traffic(each.down * made.num_started, each.up * len(arrivals)), time.perf_counter() - start,
            virtual_seconds=made.seconds, staleness=sum(one.staleness for one in arrivals) / len(arrivals),
        )  # fmt: skip

    def _train(self, made: ServerStep) -> None:
        """Train all clients whose updates arrive in the server step ``made``.

        Some clients of later steps are trained in advance, to keep all workers of the engine busy.
        """
        due = [turn for turn in made.arrived if turn not in self.trained]
        if not due:
            return
        job, server = self.procedure.job, self.procedure.server
        coming = self.schedule.in_flight[: (job.experiment.rounds - made.number) * server.step_size]
        ahead = [turn for turn in coming if turn not in self.trained]
        turns = [*due, *ahead[: max(0, TOGETHER - len(due))]]
        contents = {one: self._content(one) for one in {turn.server_round for turn in turns}}
        nodes = self.strategy.population.nodes
        messages = [Message(contents[turn.server_round], nodes[turn.client], wire.TRAIN) for turn in turns]
        write_guard = [WriteGuard.of(groups_of(state)) for state in self.sent.values()]
        replies = self.grid.send_and_receive(messages, timeout=job.experiment.round_timeout)
        for one in write_guard:
            one.check_bits(self.strategy.algorithm.plan, self.strategy.algorithm.finish)
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        for turn, message in zip(turns, messages, strict=True):
            answer = answers.get(message.metadata.message_id)
            try:
                self.trained[turn] = self.strategy.read(turn.client, [answer] if answer else [], turn.server_round)
            except Malformed as error:
                who = f"client {turn.client} in round {turn.server_round}"
                raise refusal(who, error, quoted=not self.strategy.order.synthetic) from error

    def _content(self, server_round: int) -> RecordDict:
        experiment = self.procedure.job.experiment
        rate = experiment.local.rate_in(server_round, experiment.rounds)
        order = replace(self.strategy.order, server_round=server_round, learning_rate=rate)
        return self.strategy.content(order, self.sent[server_round])

    def _keep_sent(self) -> None:
        """Write the models on which clients still train to files, and drop all other models from memory.

        The next checkpoint, which is written afterwards, refers to these files. A file that only the previous
        checkpoint needs is removed one step later, because a run that is killed before the next checkpoint needs it.
        """
        for path in self.outdated:
            path.unlink(missing_ok=True)
        before, in_flight = self.log.versions, sorted({turn.server_round for turn in self.schedule.in_flight})
        self.sent = {one: self.sent[one] for one in in_flight}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log.versions = {
            one: before.get(one) or write_state(self._path(one), Progress(one - 1, ""), self.sent[one])
            for one in in_flight
        }
        self.outdated = [self._path(one) for one in before if one not in self.sent]

    def _path(self, server_round: int) -> Path:
        return self.folder / f"{SENT}{server_round}.safetensors"
