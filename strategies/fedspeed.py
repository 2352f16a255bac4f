"""FedSpeed: FedDyn's correction for clients that look uphill (Sun et al. 2023, algorithm 1)."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from fl_sim.kinds import Choices, off
from fl_sim.local_plan import Ascent, LocalPlan
from fl_sim.types import LocalTask
from strategies.feddyn import Dynamic


class FedSpeed(Dynamic):
    """Steps with (1 - s) g(w) + s g(w + rho g / ||g||) - g_i + alpha (w - x); then as FedDyn.

    ``alpha`` is the paper's 1 / lambda; ``uphill_share``, s here, its alpha. The paper's algorithm 1 averages the
    corrections of those who take part alone, which at the optimum moves the model away again; the released code, as
    here, those of all. ``rho``: how far uphill the second gradient is taken; 0 takes it at w.
    """

    kind: Literal["fedspeed"] = "fedspeed"
    alpha: float = Field(0.1, gt=0)
    rho: float = Field(0.1, ge=0)
    uphill_share: float = Field(1.0, ge=0, le=1)
    knobs: ClassVar[str] = Dynamic.knobs + "; gradients are taken algorithm.rho uphill: set a smaller one"

    def remarks(self, experiment: Choices) -> list[str]:
        """Name settings without effect."""
        del experiment
        parts = {"rho": self.rho, "uphill_share": self.uphill_share}
        return [off(f"algorithm.{name}=0", "this is feddyn") for name, value in parts.items() if not value]

    def plan(self, task: LocalTask) -> LocalPlan:
        """Take FedDyn's gradients partly uphill."""
        return replace(super().plan(task), ascent=Ascent(self.rho, share=self.uphill_share))
