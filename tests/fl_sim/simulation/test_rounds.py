"""How a run proceeds is chosen by its algorithm, once."""

import numpy as np

from clients.client_task import Client
from fl_sim.engines import wire
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import Job, job_of
from fl_sim.simulation.rounds import procedure_of
from fl_sim.stages.pate.procedure import VOTE
from fl_sim.types import ServerState


def _job(*overrides: str) -> Job:
    return job_of(experiment_from(with_overrides({"model": "logistic", "clients": 4}, list(overrides))))


def test_a_federated_algorithm_trains_in_every_round_and_no_client_votes() -> None:
    job = _job("algorithm=scaffold", "rounds=7")
    procedure = procedure_of(job)
    server = procedure.beginning()
    runtime = procedure.runtime()
    clients, *_ = procedure.work()
    assert (clients.turns, runtime.tasks) == (7 * 4, {})
    assert runtime.algorithm == job.experiment.algorithm
    assert server.params.keys() == dict(job.model().named_parameters()).keys()
    assert set(procedure.kept_by_clients(server)) == {"control"}


def test_teachers_train_once_vote_on_the_public_pool_and_keep_nothing() -> None:
    job = _job("algorithm=pate", "algorithm.public_records=30", "local.epochs=1")
    procedure = procedure_of(job)
    runtime = procedure.runtime()
    assert procedure.work()[0].turns == 4
    assert procedure.beginning() == ServerState({})
    assert procedure.kept_by_clients(ServerState({})) == {}
    order = wire.TaskConfig(job.experiment.model_dump_json(), 0, 0.0, "", "", task=VOTE)
    client = Client(2, runtime, order, wire.config_content(order))
    first, again = (wire.read_votes(runtime.tasks[VOTE].run(client), 30, 10) for _ in range(2))
    assert np.array_equal(first, again)
