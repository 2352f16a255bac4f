"""Local training without a server: the baseline for every method that gives each client a model of its own."""

from collections.abc import Collection
from typing import ClassVar, Literal

from fl_sim.kinds import Choices, hides_clients, is_none, kind_of
from fl_sim.types import Params
from strategies.algorithm import Averaging


class LocalOnly(Averaging):
    """Every client trains alone, from the run's initial model: no parameter is sent, and none is averaged.

    A client trains in the rounds in which it takes part, as many steps as with any other method.
    """

    kind: Literal["local-only"] = "local-only"
    title: ClassVar[str] = "Local only"
    is_alone: ClassVar[bool] = True

    def check(self, experiment: Choices) -> None:
        """Raise ValueError beside Global DP and compression, which are about updates that do not exist here."""
        if not is_none(experiment.compress):
            raise ValueError(
                f"algorithm local-only sends nothing that compress {kind_of(experiment.compress)} could make smaller: "
                "leave compress out"
            )
        if hides_clients(experiment.aggregator):
            raise ValueError(
                "algorithm local-only sends nothing, so aggregator global-dp clips nothing, and its epsilon would "
                "be about nothing: leave aggregator out"
            )

    def sends(self, params: Params) -> Collection[str]:
        """Return no names: clients send no parameters."""
        del params
        return ()
