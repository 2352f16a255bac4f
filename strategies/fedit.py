"""FedIT: clients train LoRA adapters, and the server averages the adapters' factors (Zhang et al. 2024, section 3)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fl_sim.kinds import Choices
from strategies.algorithm import Averaging
from strategies.low_rank import STARTS_WITH, check_adapters


class FedIT(Averaging):
    """FedAvg on the factors A and B of LoRA adapters, like any FedAvg-like method with ``model.trainable=lora``.

    The mean of the factors is biased: the product of the means, mean(B_i) mean(A_i), is not the mean of the products
    B_i A_i. The methods ``ffa-lora``, ``flora``, ``flexlora`` and ``rolora`` reduce or remove this bias. Each round
    continues from the averaged factors, as in the paper.
    """

    kind: Literal["fedit"] = "fedit"
    title: ClassVar[str] = "FedIT"
    starts_with: ClassVar[Mapping[str, Any]] = STARTS_WITH

    def check(self, experiment: Choices) -> None:
        """Raise ValueError if the settings train no adapters."""
        check_adapters(self, experiment)

    def note(self) -> str:
        """Return the note below result tables. It says that the mean of the factors is biased."""
        return "FedIT: the mean of the factors is biased, as the product of means is not the mean of the products."
