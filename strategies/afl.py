"""AFL: a federated model from one message of each client, without training (Zhuang et al. 2025)."""

from typing import ClassVar, Literal

from strategies.one_message import OneMessage
from strategies.ridge import Ridge


class AFL(OneMessage, Ridge):
    """Each client sends one message, without training; the server computes the initial model's head in closed form."""

    kind: Literal["afl"] = "afl"
    title: ClassVar[str] = "AFL"
    stage: ClassVar[str] = "fl_sim.stages.ridge:RidgeHead"

    def reports(self) -> str:
        """Return a phrase that describes the evaluated model."""
        return "the initial model with a head in closed form"

    def note(self) -> str:
        """Return the note for tables: one sentence on how the model is made."""
        return "AFL: clients send sums of products of the initial model's features once; there are no rounds."
