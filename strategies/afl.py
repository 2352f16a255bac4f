"""AFL: a federated model from one message of each client, without training (Zhuang et al. 2025)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fl_sim.kinds import Choices, kind_of
from fl_sim.types import Dataset
from strategies.ridge import Ridge


class AFL(Ridge):
    """Each client sends one message, without training; the server computes the initial model's head in closed form."""

    kind: Literal["afl"] = "afl"
    title: ClassVar[str] = "AFL"
    stage: ClassVar[str] = "fl_sim.stages.ridge:RidgeHead"
    procedure: ClassVar[str] = "fl_sim.stages.ridge:OneShot"
    starts_with: ClassVar[Mapping[str, Any]] = {"evaluate": {"test": "last"}}

    def check(self, experiment: Choices) -> None:
        """Raise ValueError for settings that need rounds, such as attacks, because no client trains in rounds."""
        others = (
            ("aggregator", "mean"), ("sampler", "full"), ("attack", "none"), ("calibrate", "none"),
            ("preprocess", "none"), ("server", "synchronous"),
        )  # fmt: skip
        for name, wanted in others:
            if (given := kind_of(getattr(experiment, name))) != wanted:
                raise ValueError(
                    f"algorithm afl has no rounds: each client sends its own sums once, without training, so {name} "
                    f"{given} does not fit: leave {name} out"
                )
        if (batch_norm := experiment.local.batch_norm) != "none":
            raise ValueError(f"algorithm afl trains no model: leave local.batch_norm={batch_norm} out")

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        """Return 1: clients do not train in rounds, so the whole run counts as one round."""
        del rounds, dataset
        return 1

    def reports(self) -> str:
        """Return a phrase that describes the evaluated model."""
        return "the initial model with a head in closed form"

    def note(self) -> str:
        """Return the note for tables: one sentence on how the model is made."""
        return "AFL: clients send sums of products of the initial model's features once; there are no rounds."
