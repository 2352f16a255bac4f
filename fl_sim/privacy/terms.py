"""What a ledger promises, fixed before its first charge."""

import math
from dataclasses import dataclass

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import Accountant, Adjacency, valid_delta


@dataclass(frozen=True)
class Terms:
    """What a ledger promises, fixed before its first charge.

    ``unit``: what is protected, such as "client" or "record"; units are never added together. ``budget``: the largest
    epsilon at ``delta``, None for no limit. ``accountant``: whose epsilon is held against the budget.
    """

    unit: str
    adjacency: Adjacency
    delta: float
    budget: float | None = None
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        valid_delta(self.delta)
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise UserError(f"privacy budget epsilon {self.budget} is not a positive number: choose one such as 8")
