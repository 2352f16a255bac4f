"""FedAvg, the mean of the clients' models (McMahan et al. 2017, algorithm 1), and centralized training."""

from typing import ClassVar, Literal

from fl_sim.kinds import Choices, hides_clients, is_none
from fl_sim.local_plan import LocalPlan
from fl_sim.types import ClientUpdate, LocalTask, Trained
from strategies.algorithm import Averaging
from strategies.samplers import Everyone


class FedAvg(Averaging):
    """x <- x + sum_i (n_i / n) (y_i - x).

    x is the global model, y_i the trained model of client i, n_i the client's number of records, and n the sum of n_i.
    """

    kind: Literal["fedavg"] = "fedavg"


class Centralized(Averaging):
    """Centralized training, an upper bound in tables: one client holds all training records and runs plain SGD.

    Model and optimiser are the same as in federated training. The client keeps its momentum from round to round, so the
    run is exactly SGD over ``rounds * local epochs`` epochs. The setting ``devices`` has no effect: there is no virtual
    clock.
    """

    kind: Literal["centralized"] = "centralized"
    is_central: ClassVar[bool] = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that need several clients: sampling, Global DP and preprocessing."""
        if not isinstance(experiment.sampler, Everyone):
            raise ValueError("algorithm centralized has a single client, which is in every round: leave sampler out")
        if hides_clients(experiment.aggregator):
            raise ValueError(
                "algorithm centralized has one client, and client-level privacy would hide all of its data: leave "
                "aggregator out"
            )
        if not is_none(experiment.preprocess):
            raise ValueError(
                "algorithm centralized has all records in one place, and preprocess is for several clients: leave "
                "preprocess out"
            )

    def mean_only(self) -> str:
        """Return the reason why the aggregator must be ``mean``: there is only one client."""
        return "it has a single client, and robust aggregators compare clients"

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return the client's local objective (``LocalPlan``). Its SGD starts with the momentum of the last round."""
        return LocalPlan(momentum_buffers=task.state.get("momentum"))

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update y - x. The momentum is stored as client state, for the next round."""
        update = super().finish(task, trained)
        state = {"momentum": trained.momentum_buffers} if trained.momentum_buffers else {}
        return ClientUpdate(update.payloads, update.num_examples, update.loss, state)
