"""How a round's updates become the one mean that the server half of an algorithm sees."""

from typing import Literal

from fl_sim.config import Settings
from fl_sim.params import is_finite, weighted_mean
from fl_sim.types import Aggregate, Cohort, Reply, RunError
from strategies.algorithm import Weighting


class WeightedMean(Settings):
    """The plain mean, by number of records or uniform as the algorithm asks. It protects nothing: no privacy."""

    kind: Literal["mean"] = "mean"

    def mean(self, cohort: Cohort, weighting: Weighting) -> Aggregate | None:
        """Return the mean over the clients that have records, or None where none has.

        Raises RunError, naming client and round, where an update or a training loss is not finite.
        """
        for reply in cohort.replies:
            _check_finite(reply, cohort.server_round)
        trained = [reply for reply in cohort.replies if reply.num_examples > 0]
        if not trained:
            return None
        weights = [float(reply.num_examples) if weighting == "examples" else 1.0 for reply in trained]
        payloads = {
            name: weighted_mean([reply.payloads[name] for reply in trained], weights) for name in trained[0].payloads
        }
        return Aggregate(payloads, participation=len(trained) / cohort.num_clients)


def _check_finite(reply: Reply, server_round: int) -> None:
    where = f"client {reply.client} in round {server_round}"
    if reply.loss is not None and not abs(reply.loss) < float("inf"):
        raise RunError(
            f"{where} has a training loss of {reply.loss}: training diverged; try a smaller local.learning_rate"
        )
    if not is_finite(reply.payloads):
        raise RunError(
            f"{where} sent numbers that are not finite: training diverged; try a smaller local.learning_rate"
        )
