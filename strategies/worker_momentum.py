"""Worker momentum: clients send a running mean of their updates (Karimireddy, He, Jaggi 2021, algorithm 2)."""

from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.params import add, scale
from fl_sim.types import ClientUpdate, LocalTask, Params, Trained
from strategies.algorithm import FEDAVG, Averaging


class WorkerMomentum(Averaging):
    """Client i sends m_i <- beta m_i + (1 - beta) (y_i - x), and the server adds the mean of all m_i to x.

    x is the global model, y_i the trained model of client i, and m_i its client state: in its first round y_i - x. The
    paper takes one step of SGD a round; here y_i - x is the update of all local steps. If the aggregator is the mean
    and every client is in every round, this is server momentum. The method is made for robust aggregators: a mean over
    rounds has less noise than one update, so a hostile update differs more from the others. A client that leaves out
    rounds continues with its last m_i. ``beta``: the share of the earlier rounds in m_i; with 0 the method is FedAvg.
    """

    kind: Literal["worker-momentum"] = "worker-momentum"
    beta: float = Field(0.9, ge=0, lt=1)
    title: ClassVar[str] = "worker momentum"
    knobs: ClassVar[str] = "set a smaller algorithm.beta, or local.momentum=0"

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        if not self.beta:
            return [off("algorithm.beta=0", FEDAVG)]
        if experiment.rounds == 1:
            return [off(f"algorithm.beta={self.beta:g}", "rounds=1, and the first round has no earlier update")]
        return []

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the update m_i, which is also the client state. A client without records has weight zero."""
        update = super().finish(task, trained)
        m_i = _running_mean(task.state.get("momentum"), update.payloads["delta"], self.beta)
        return ClientUpdate({"delta": m_i}, update.num_examples, update.loss, state={"momentum": m_i})


def _running_mean(earlier: Params | None, delta: Params, beta: float) -> Params:
    return delta if earlier is None else add(scale(earlier, beta), delta, 1 - beta)
