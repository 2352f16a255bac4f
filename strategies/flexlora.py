"""FlexLoRA: the mean of the clients' products B_i A_i, factorised with rank r (Bai et al. 2024, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from fl_sim.importing import torch
from fl_sim.kinds import Choices
from fl_sim.types import Aggregate, ClientUpdate, LocalTask, Params, Payloads, ServerState, Trained
from strategies.algorithm import Averaging, check_one_shape, several
from strategies.flora import check_products, factored, unfolded, with_delta
from strategies.low_rank import STARTS_WITH, factors_in
from strategies.ranks import RANK, first_components, first_state, share_of, with_ranks

if TYPE_CHECKING:
    from torch import nn


class FlexLoRA(Averaging):
    """Clients train and send adapters; the server averages their products, and sends the best factors of rank r.

    r is ``model.rank``. B_i and A_i are the factors of client i, and p_i is its weight. U S V^T is the singular value
    decomposition of sum p_i B_i A_i. The new factors are B = U S and A = V^T, cut to the r largest singular values.
    Their product B A is exactly the sum if the sum has rank r or less.

    ``ranks``: the ranks of clients' adapters; by default all clients have ``model.rank``. With n ranks, each block of n
    consecutive client IDs gets every rank once, in a random order that is the same in every run. The server keeps
    factors of rank r. A client of rank k receives, trains and sends the first k columns of B and rows of A, which give
    the best approximation of rank k. The client multiplies B A by the server's LoRA factor alpha / r, so that all
    products B_i A_i have the same scale. A client's rank is public.
    """

    kind: Literal["flexlora"] = "flexlora"
    title: ClassVar[str] = "FlexLoRA"
    starts_with: ClassVar[Mapping[str, Any]] = STARTS_WITH
    ranks: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(several)] = ()

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if no adapters are trained, or if noise or compression would change the factors A and B.

        With ``ranks``, also raise ValueError for settings that need updates of equal shapes.
        """
        check_products(self, experiment)
        if self.ranks:
            why = "algorithm.ranks gives clients adapters of different shapes"
            check_one_shape(experiment, why, "leave algorithm.ranks out", {})

    def init(self, params: Params) -> ServerState:
        """Return the server state before the first round. Raises UserError for ``ranks`` above ``model.rank``."""
        return first_state(self.ranks, params)

    def size_of(self, client: int, server: ServerState) -> float:
        """Return the rank of a client's adapters as a share of the server's rank, in (0, 1]."""
        return share_of(self.ranks, client, server.params)

    def sized(self, server: ServerState, size: float) -> ServerState:
        """Return the server state for clients with the share ``size`` of the server's rank."""
        return first_components(server, size)

    def size_in(self, task: LocalTask) -> float:
        """Return the share of the server's rank that the received adapters have."""
        return float(task.broadcast[RANK]["share"]) if RANK in task.broadcast else 1.0

    def resized(self, model: nn.Module, params: Params, size: float) -> nn.Module:
        """Return a copy of ``model`` whose adapters have the shapes of ``params``."""
        del size
        return with_ranks(model, params)

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        """Return the client's update: the factors after training, and the changes of all other trained parameters."""
        return factored(task, trained, list(task.params))

    def unfolded(self, payloads: Payloads) -> Payloads:
        """Return a client's payloads with the product B_i A_i in place of the factors, so that the mean is exact."""
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
