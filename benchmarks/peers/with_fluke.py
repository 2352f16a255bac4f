"""fluke (Polato 2024) does the job: ``DIR/fluke-fl/bin/python with_fluke.py JOB``.

As in fluke's tutorials: FedAVG with a DataSplitter, its FastDataLoader, everything in memory, no evaluation, no log.
The shards are given (its DummyDataContainer, for data that is already divided); momentum is an entry of the
optimizer's settings. ``persistency=False`` makes clients forget their optimizers after a round, as the job has it; by
default a client's momentum would go on from where its last round left it.
"""

# mypy: disable-error-code="import-not-found", allow-subclassing-any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver
from job import Job, Turns, given, pipes

FOREVER = 10**6  # fluke's progress bar counts them


class OneRoundATurn(FederationObserver):
    """Ends a turn after every round."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def end_round(self, round: int) -> None:  # noqa: A002 (fluke's name)
        """End the turn."""
        del round
        self._turns.end_of_round()


def federation(job: Job) -> FedAVG:
    """Return fluke's FedAvg over the job's clients."""
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(inputs, labels, num_labels=job.way.classes, batch_size=job.way.batch_size, shuffle=True)
        for inputs, labels in job.shards
    ]
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * job.clients, None, job.way.classes))
    client = {
        "batch_size": job.way.batch_size,
        "local_epochs": job.way.epochs,
        "loss": torch.nn.CrossEntropyLoss,
        "optimizer": {"name": "SGD", "lr": job.way.learning_rate, "momentum": job.way.momentum},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        "persistency": False,
    }
    settings = DDict(client=client, server={"weighted": True}, model=job.network())
    return FedAVG(n_clients=job.clients, data_splitter=splitter, hyper_params=settings)


def main() -> None:
    """Run FedAVG until no more rounds are wanted."""
    requests, answers = pipes()
    job = given()
    algorithm = federation(job)
    algorithm.set_callbacks(OneRoundATurn(Turns(job, lambda: algorithm.server.model, requests, answers)))
    algorithm.run(n_rounds=FOREVER, eligible_perc=job.cohort / job.clients)


if __name__ == "__main__":
    main()
