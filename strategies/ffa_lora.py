"""FFA-LoRA: the factor A of all adapters is frozen at its start, and only B is trained (Sun et al. 2024, section 4)."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from fl_sim.kinds import Choices
from strategies.algorithm import Averaging
from strategies.low_rank import STARTS_WITH, check_adapters, is_factor


class FFALoRA(Averaging):
    """FedAvg on the factor B of adapters. A is equal on all clients and never moves.

    The mean is exact: mean(B_i) A is the mean of the B_i A. Half of an adapter travels, or less. Under Global DP, local
    DP and DP-SGD clipping and noise concern B alone, and the noise enters the model linearly.
    """

    kind: Literal["ffa-lora"] = "ffa-lora"
    title: ClassVar[str] = "FFA-LoRA"
    starts_with: ClassVar[Mapping[str, Any]] = STARTS_WITH

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the settings train no adapters."""
        check_adapters(self, experiment)

    def trains(self, trained: Collection[str], frozen: Collection[str]) -> Collection[str]:
        """Return all names in ``trained`` but those of the factors A."""
        del frozen
        return [name for name in trained if not is_factor(name, "A")]
