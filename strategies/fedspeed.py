"""FedSpeed: FedDyn with gradients that are partly computed at a point of higher loss (Sun et al. 2023, algorithm 1)."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Ascent, LocalPlan
from fl_sim.types import LocalTask
from strategies.feddyn import Dynamic


class FedSpeed(Dynamic):
    """Clients step with (1 - s) g(w) + s g(w + rho g / ||g||) - g_i + alpha (w - x); the server step is FedDyn's.

    w is the client's model, x the received model, g the gradient, and g_i FedDyn's correction. ``alpha``: the strength
    of the pull towards x, 1 / lambda in the paper. ``uphill_share``: the share s of gradients at the point of higher
    loss, the paper's alpha. ``rho``: the distance from w to the point of higher loss where the second gradient is
    computed; with 0 this gradient, too, is computed at w. In algorithm 1 of Sun et al. 2023 the server averages only
    the corrections of the cohort. If not all clients take part, the model then moves away from the optimum. The
    released code and this class average the corrections of all clients.
    """

    kind: Literal["fedspeed"] = "fedspeed"
    alpha: float = Field(0.1, gt=0)
    rho: float = Field(0.1, ge=0)
    uphill_share: float = Field(1.0, ge=0, le=1)
    knobs: ClassVar[str] = Dynamic.knobs + (
        "; gradients are computed at a point of higher loss, a step of algorithm.rho away: set a smaller rho"
    )

    def remarks(self, experiment: Choices) -> list[str]:
        """Return one sentence for each setting that has no effect in this experiment."""
        del experiment
        parts = {"rho": self.rho, "uphill_share": self.uphill_share}
        return [off(f"algorithm.{name}=0", "this is feddyn") for name, value in parts.items() if not value]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Return FedDyn's local objective (``LocalPlan``), with a share of gradients from a point of higher loss."""
        return replace(super().plan(task), ascent=Ascent(self.rho, share=self.uphill_share))
