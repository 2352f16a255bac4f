"""pfl (Apple's pfl-research, Granqvist et al. 2024) does the job: ``DIR/pfl/bin/python with_pfl.py JOB``.

As in pfl's tutorials: FederatedAveraging.run over a SimulatedBackend, PyTorchModel, users as in-memory tensor data
sets, a sampler that goes round all users, in one process (several would be worker processes of torch.distributed).
Momentum and a fresh optimizer per user are pfl's own (``local_optimizer_create``). One thing differs from the plain
loop, in pfl's favour: an in-memory data set is cut into minibatches once, and never shuffled again. Its first round,
which is not timed, also measures every user before and after training.
"""

# mypy: disable-error-code="import-not-found", allow-subclassing-any

from functools import partial
from typing import Any

import torch
from job import Network, Turns, given, pipes
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional

FOREVER = 10**9


class PflNetwork(Network):
    """The network with the two methods that pfl wants."""

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return what is minimised."""
        return functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return what pfl reports of a user."""
        with torch.inference_mode():
            loss = functional.cross_entropy(self(inputs), labels, reduction="sum").item()
        return {"loss": Weighted(loss, len(labels))}


class OneRoundATurn(TrainingProcessCallback):
    """Ends a turn after every central iteration."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Go on after the turn, with no metrics of our own."""
        del aggregate_metrics, model, central_iteration
        self._turns.end_of_round()
        return False, Metrics()


def main() -> None:
    """Run FederatedAveraging until no more rounds are wanted."""
    requests, answers = pipes()
    job = given()
    network = job.network(PflNetwork)
    # The average of the users' changes is applied as a gradient: with rate 1 that is the average of the weights.
    model = PyTorchModel(
        network, partial(torch.optim.SGD, momentum=job.way.momentum), torch.optim.SGD(network.parameters(), lr=1.0)
    )
    users = FederatedDataset(
        [PyTorchTensorDataset(shard) for shard in job.shards].__getitem__,
        get_user_sampler("minimize_reuse", range(job.clients)),
    )
    turns = Turns(job, lambda: model.pytorch_model, requests, answers)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=FOREVER,
            evaluation_frequency=FOREVER,
            train_cohort_size=job.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(
            local_num_epochs=job.way.epochs,
            local_learning_rate=job.way.learning_rate,
            local_batch_size=job.way.batch_size,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[OneRoundATurn(turns)],
    )


if __name__ == "__main__":
    main()
