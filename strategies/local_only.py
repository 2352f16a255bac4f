"""Local training without a server: the baseline for every method in which each client has its own model."""

from collections.abc import Collection
from typing import ClassVar, Literal

from fl_sim.kinds import Choices, hides_clients, kind_of
from fl_sim.types import Params
from strategies.algorithm import Averaging


class LocalOnly(Averaging):
    """Every client trains its own model from the run's initial model. No parameter is sent, and none is averaged.

    A client trains in each round in which it takes part, with as many local steps as in any other method.
    """

    kind: Literal["local-only"] = "local-only"
    title: ClassVar[str] = "Local only"
    is_alone: ClassVar[bool] = True
    sends_nothing: ClassVar[bool] = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError under Global DP, where an epsilon would be stated for updates that do not exist."""
        if hides_clients(experiment.aggregator):
            raise ValueError(
                f"algorithm local-only sends nothing, so aggregator {kind_of(experiment.aggregator)} clips nothing, "
                "and its epsilon would protect nothing: leave aggregator out"
            )

    def sends(self, params: Params) -> Collection[str]:
        """Return no parameter names: clients send no parameters."""
        del params
        return ()
