"""FlexLoRA: the mean of the clients' products B_i A_i, cut to rank r by its SVD (Bai et al. 2024, section 3)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fl_sim.importing import torch
from fl_sim.kinds import Choices
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Payloads, ServerState, Trained
from strategies.algorithm import Averaging
from strategies.flora import check_products, factored, unfolded, with_delta
from strategies.low_rank import STARTS_WITH, factors_in


class FlexLoRA(Averaging):
    """Clients train and send adapters; the server averages their products, and sends the best factors of rank r.

    B_i and A_i are the factors of client i, and p_i is its weight. U S V^T is the singular value decomposition of sum
    p_i B_i A_i. The new factors are B = U S and A = V^T, cut to the r largest singular values. They are exact if the
    sum has rank r or less. All clients have the same rank here.
    """

    kind: Literal["flexlora"] = "flexlora"
    title: ClassVar[str] = "FlexLoRA"
    starts_with: ClassVar[Mapping[str, Any]] = STARTS_WITH

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if no adapters are trained, or if a setting such as noise would change A, B or B A."""
        check_products(self, experiment)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the client's update: the factors after training, and the changes of all other trained parameters."""
        return factored(task, trained, list(task.params))

    def unfolded(self, payloads: Payloads) -> Payloads:
        """Return the round's payloads with the products B_i A_i in place of the factors, so that the mean is exact."""
        return unfolded(payloads)

    def merge(self, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the next server state: factors of the mean product, and other parameters plus their mean update."""
        found, params = aggregate.payloads["products"], dict(server.params)
        for one in factors_in(params):
            if not found[one.a].any():  # B = 0 before any training: A keeps its random values
                continue
            left, values, right = torch.linalg.svd(found[one.a].double(), full_matrices=False)
            rank, (a, b) = params[one.a].shape[0], (params[one.a], params[one.b])
            cut = min(rank, len(values))
            new_a, new_b = torch.zeros_like(a.flatten(1)), torch.zeros_like(b.flatten(1))
            new_a[:cut], new_b[:, :cut] = right[:cut].to(a), (left[:, :cut] * values[:cut]).to(b)
            params |= {one.a: new_a.reshape(a.shape), one.b: new_b.reshape(b.shape)}
        return ServerState(with_delta(params, aggregate.payloads), server.broadcast, server.memory)
