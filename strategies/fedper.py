"""FedPer: each client has its own head (Arivazhagan et al. 2019, algorithm 1)."""

from collections.abc import Collection
from typing import ClassVar, Literal

from fl_sim.params import body_names
from fl_sim.types import Params
from strategies.algorithm import Averaging


class FedPer(Averaging):
    """FedAvg on the body of the model. Each client has its own head (the last linear layer), and trains both parts."""

    kind: Literal["fedper"] = "fedper"
    title: ClassVar[str] = "FedPer"
    needs_head: ClassVar[bool] = True

    def sends(self, params: Params) -> Collection[str]:
        """Return the parameter names of the body, which clients send."""
        return body_names(params)
