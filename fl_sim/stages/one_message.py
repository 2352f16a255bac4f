"""The procedure of algorithms without rounds: a stage makes the model from one message of each client."""

from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp import Grid

from clients.client_task import ClientRuntime
from fl_sim.params import detached, fixed_in, trainable
from fl_sim.simulation.client_runtime import runtime_for
from fl_sim.simulation.forecast import evaluation_work
from fl_sim.simulation.measuring import Measuring
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.simulation.stage import Procedure, prepared_strategy, stages_of, tasks_of
from fl_sim.simulation.timing import Work
from fl_sim.store import run_directory
from fl_sim.store.run_directory import RoundRecord
from fl_sim.types import ServerState, Traffic
from strategies.fedavg import FedAvg
from strategies.one_message import OneMessage


@dataclass(frozen=True)
class OneShot(Procedure):
    """The procedure without rounds: the algorithm's stage makes the model, and the model is evaluated."""

    settings: OneMessage

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Ask clients for their messages, make the model, and write the model's scores to ``log``."""
        log.fixed = fixed_in(self.job.model())
        prepared_strategy(self.job, FedAvg(), (), grid, out, log, observer)
        record = RoundRecord(1, None, None, None, None, None, 0.0, None)
        log.measured = Measuring.of(self.job, {}).measured(
            log.server.model, "with its new head", is_last=True, server_round=1
        )
        record = log.measured.noted_in(record)
        log.rounds.append(record)
        log.chain = run_directory.append_round(out, record, log.chain)
        observer.finished_round(record)

    def beginning(self) -> ServerState:
        """Return the first server state: the initial model, whose head the stage will replace."""
        return FedAvg().init(detached(trainable(self.job.model()).items()))

    def work(self) -> tuple[Work, ...]:
        """Return the amounts of computation for the time forecast: those of the stage, and the evaluation."""
        made = (work for stage in stages_of(self.job) for work in stage.work())
        return (*made, evaluation_work(self, len(self.job.dataset.test)))

    def traffic(self) -> dict[str, Traffic]:
        """Return a forecast of the bytes of the clients' messages."""
        return {what: traffic for stage in stages_of(self.job) for what, traffic in stage.traffic({}).items()}

    def runtime(self) -> ClientRuntime:
        """Return the client runtime for workers."""
        return runtime_for(self.job, FedAvg(), tasks_of(self.job))
