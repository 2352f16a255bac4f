"""FFA-LoRA: the factor A of all adapters keeps its initial values, only B is trained (Sun et al. 2024, section 4)."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from fl_sim.kinds import Choices
from strategies.algorithm import Averaging
from strategies.low_rank import STARTS_WITH, check_adapters, is_factor


class FFALoRA(Averaging):
    """FedAvg on the factor B of LoRA adapters. The factor A is equal on all clients and never changes.

    The mean is exact: mean(B_i) A is the mean of the B_i A. Clients send about half of an adapter, or less. Under
    Global DP, local DP and DP-SGD only B is clipped and gets noise. A has no noise, so the product B A contains no
    product of two noises.
    """

    kind: Literal["ffa-lora"] = "ffa-lora"
    title: ClassVar[str] = "FFA-LoRA"
    starts_with: ClassVar[Mapping[str, Any]] = STARTS_WITH

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the settings train no adapters."""
        check_adapters(self, experiment)

    def trains(self, trained: Collection[str], frozen: Collection[str]) -> Collection[str]:
        """Return all names in ``trained`` except the names of the factors A."""
        del frozen
        return [name for name in trained if not is_factor(name, "A")]
