"""FedLab (Zeng et al. 2023) does the job: ``DIR/fedlab/bin/python with_fedlab.py JOB``.

As in FedLab's tutorials: a StandalonePipeline of a SyncServerHandler and an SGDSerialClientTrainer, all in one process;
clients' records come as torch DataLoaders over a data set of single records, as in FedLab's own data sets (which
read them from files every round; here they stay in memory). Its trainer has SGD without momentum, and one optimizer
for all clients, so ``setup_optim`` and ``train`` are overridden, as its documentation suggests, to make a momentum SGD
for every client. The aggregator takes the plain mean; the shards are equal.
"""

# mypy: disable-error-code="import-not-found", allow-subclassing-any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline
from job import Job, Turns, given, pipes
from torch.utils.data import DataLoader

FOREVER = 10**9


class Shards(FedDataset):
    """The clients' records, in memory."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.num = job.clients
        self._datasets = [BaseDataset(inputs, labels) for inputs, labels in job.shards]

    def get_dataset(self, id: int, type: str = "train") -> BaseDataset:  # noqa: A002 (FedLab's names)
        """Return a client's records."""
        del type
        return self._datasets[id]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader[torch.Tensor]:  # noqa: A002
        """Return a client's records in shuffled minibatches."""
        return DataLoader(self.get_dataset(id, type), batch_size=batch_size, shuffle=True)


class MomentumTrainer(SGDSerialClientTrainer):
    """FedLab's trainer with momentum, which starts at zero for each client."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.network(), job.clients)
        self._momentum = job.way.momentum

    def setup_optim(self, epochs: int, batch_size: int, lr: float) -> None:
        """Note the settings, and begin with zero momentum."""
        super().setup_optim(epochs, batch_size, lr)
        self._new_optimizer()

    def train(self, model_parameters: torch.Tensor, train_loader: DataLoader[torch.Tensor]) -> list[torch.Tensor]:
        """Train one client."""
        self._new_optimizer()
        trained: list[torch.Tensor] = super().train(model_parameters, train_loader)
        return trained

    def _new_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self._model.parameters(), self.lr, momentum=self._momentum)


class OneRoundATurn(StandalonePipeline):
    """Ends a turn where FedLab evaluates."""

    def __init__(self, handler: SyncServerHandler, trainer: MomentumTrainer, turns: Turns) -> None:
        super().__init__(handler, trainer)
        self._turns = turns

    def evaluate(self) -> None:
        """End the turn."""
        self._turns.end_of_round()


def main() -> None:
    """Run the pipeline until no more rounds are wanted."""
    requests, answers = pipes()
    job = given()
    trainer = MomentumTrainer(job)
    trainer.setup_dataset(Shards(job))
    trainer.setup_optim(epochs=job.way.epochs, batch_size=job.way.batch_size, lr=job.way.learning_rate)
    handler = SyncServerHandler(job.network(), global_round=FOREVER, sample_ratio=job.cohort / job.clients)
    OneRoundATurn(handler, trainer, Turns(job, lambda: handler.model, requests, answers)).main()


if __name__ == "__main__":
    main()
