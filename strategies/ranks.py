"""Adapters of different ranks: a client of rank k has the first k components of the server's factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.params import copied
from fl_sim.types import Params, ServerState
from strategies.algorithm import in_turn
from strategies.low_rank import factors_in, is_factor

if TYPE_CHECKING:
    from torch import nn

RANK: Final = "rank"
"""Name of the broadcast tensors with the rank of the client's adapters, as a share of the server's rank."""


def first_state(ranks: Sequence[int], params: Params) -> ServerState:
    """Return the server state before the first round: the model and, with ``ranks``, the rank share 1 (full rank).

    Raises UserError if a rank in ``ranks`` is above the rank of the model's adapters.
    """
    if not ranks:
        return ServerState(params)
    found = factors_in(params)
    largest = max((min(params[one.a].shape[1:].numel(), params[one.b].shape[0]) for one in found), default=0)
    if min(max(ranks), largest) > (rank := rank_of(params)):
        raise UserError(
            f"algorithm.ranks has {max(ranks)}, and the server's adapters have rank {rank}: set "
            f"model.rank={max(ranks)}, or take smaller ranks"
        )
    return ServerState(params, {RANK: {"share": torch.ones(1)}})


def share_of(ranks: Sequence[int], client: int, params: Params) -> float:
    """Return the rank of a client's adapters as a share of the rank of the server's ``params``, in (0, 1].

    The function ``in_turn`` assigns the ranks to clients.
    """
    if not ranks or not (rank := rank_of(params)):
        return 1.0
    return min(1.0, in_turn(ranks, client, "order of ranks") / rank)


def first_components(server: ServerState, share: float) -> ServerState:
    """Return the server state for clients with ``share`` of the rank: the first components of all factors."""
    rank, params = round(share * rank_of(server.params)), dict(server.params)
    for one in factors_in(params):
        params |= {one.a: params[one.a][:rank], one.b: params[one.b][:, :rank].contiguous()}
    return ServerState(params, {**server.broadcast, RANK: {"share": torch.tensor([share])}}, server.memory)


def with_ranks(model: nn.Module, params: Params) -> nn.Module:
    """Return a copy of ``model`` whose adapters have the shapes of ``params``. The copy shares frozen parameters."""
    small = copied(model)
    for name in (name for name in params if is_factor(name)):
        layer, _, last = name.rpartition(".")
        like = small.get_parameter(name)
        setattr(small.get_submodule(layer), last, torch.nn.Parameter(like.new_empty(params[name].shape)))
    return small


def rank_of(params: Params) -> int:
    """Return the largest rank of the adapters in ``params``, because adapters of small layers have smaller ranks."""
    return max((params[one.a].shape[0] for one in factors_in(params)), default=0)
