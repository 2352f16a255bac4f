"""LG-FedAvg: each client has its own body, and the head is averaged (Liang et al. 2020, algorithm 1)."""

from collections.abc import Collection
from typing import ClassVar, Literal

from fl_sim.params import body_names
from fl_sim.types import Params
from strategies.algorithm import Averaging


class LGFedAvg(Averaging):
    """FedAvg on the head, the last linear layer. Each client has its own body, and trains body and head together."""

    kind: Literal["lg-fedavg"] = "lg-fedavg"
    title: ClassVar[str] = "LG-FedAvg"
    needs_head: ClassVar[bool] = True

    def sends(self, params: Params) -> Collection[str]:
        """Return the parameter names of the head, which clients send."""
        return frozenset(params) - body_names(params)
