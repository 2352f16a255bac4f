"""How a run proceeds: in federated rounds, or as its algorithm or its server says by ``procedure = "module:Class"``."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from flwr.serverapp import Grid

from clients.client_task import ClientRuntime
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.job import Job, job_of, own_job
from fl_sim.kinds import kind_of, path_in
from fl_sim.local_plan import LocalPlan
from fl_sim.own_code import load_object
from fl_sim.simulation.rounds import Rounds
from fl_sim.simulation.run_log import Observer, RunLog
from fl_sim.types import Payloads, ServerState, Traffic

if TYPE_CHECKING:
    from fl_sim.privacy.bill import Payment
    from fl_sim.simulation.work import Work


class Procedure(Protocol):
    """What depends on how a run proceeds; all else about a run is the same for every algorithm."""

    @property
    def job(self) -> Job:
        """Return what is run."""
        ...

    def work(self) -> "Sequence[Work]":
        """Return what takes time in the whole run, by its kinds: what is timed, and what cannot be."""
        ...

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes of arrays to and from all clients, by what they are.

        Those of all ``rounds`` together, where there are rounds; others travel once, before or after the rounds, and
        are foretold, so about.
        """
        ...

    def payments(self) -> "tuple[Payment, ...] | None":
        """Return what its own releases will cost: () where it protects nothing, None where votes decide that."""
        ...

    def typical_plan(self) -> LocalPlan:
        """Return what clients' plans look like, to be held against what trainers take."""
        ...

    def runtime(self) -> ClientRuntime:
        """Return what a worker needs to play any client."""
        ...

    def beginning(self) -> ServerState:
        """Return what the server starts from."""
        ...

    def kept_by_clients(self, server: ServerState) -> Payloads:
        """Return the names and shapes of what a client keeps from one round for its next; nothing for most."""
        ...

    def warnings(self, log: RunLog) -> list[str]:
        """Return what a user must know beforehand."""
        ...

    def run(self, grid: Grid, out: Path, log: RunLog, observer: Observer) -> None:
        """Do all that ``log`` does not have yet. Raises RunError where that cannot go on."""
        ...


_ROUNDS: Final = "fl_sim.simulation.rounds:Rounds"


def procedure_of(job: Job) -> Procedure:
    """Return how a run of ``job`` proceeds. Raises UserError where nothing of it goes by a clock that it has."""
    experiment, algorithm = job.experiment, job.experiment.algorithm
    if path := path_in(type(algorithm), "procedure"):
        if experiment.is_timed:
            raise UserError(
                f"devices={kind_of(experiment.devices)} has no place beside algorithm {kind_of(algorithm)}, which has "
                "no rounds whose time could be simulated: leave devices out"
            )
        return _imported(path, job, algorithm)
    path = path_in(type(experiment.server), "procedure")
    return _imported(path or _ROUNDS, job, algorithm)


def _imported(path: str, job: Job, algorithm: object) -> Procedure:
    procedure: Procedure = load_object(path, "procedure")(job, algorithm)
    return procedure


@lru_cache(maxsize=2)
def runtime_of(experiment_json: str, data_root: str, own: str = "", client: int = 0, facts: str = "") -> ClientRuntime:
    """Return what a worker elsewhere needs to play any client of the experiment; made once per process.

    ``own``: the records of a node that has some itself, and plays ``client`` alone; ``facts``: what its order says of
    the server's. Raises UserError where they do not fit, or the experiment needs the server's on nodes.
    """
    experiment = Experiment.model_validate_json(experiment_json)
    if not own:
        return procedure_of(job_of(experiment, Path(data_root) if data_root else None)).runtime()
    procedure = procedure_of(own_job(experiment, own, client, json.loads(facts)))
    if not isinstance(procedure, Rounds):
        raise UserError(
            f"algorithm {kind_of(experiment.algorithm)} needs public records of the server's data set on every node, "
            "and this one has records of its own alone: leave data out of its node configuration"
        )
    return procedure.runtime()
