"""The base class of algorithms without rounds, whose clients send one message each and do not train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fl_sim.kinds import Choices, kind_of
from fl_sim.settings import Settings
from fl_sim.types import Dataset


class OneMessage(Settings):
    """Base class of algorithms without rounds: the server computes the model from one message of each client."""

    kind: str = ""
    procedure: ClassVar[str] = "fl_sim.stages.one_message:OneShot"
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
                    f"algorithm {self.kind} has no rounds: each client sends its own message once, without training, "
                    f"so {name} {given} does not fit: leave {name} out"
                )
        if (batch_norm := experiment.local.batch_norm) != "none":
            raise ValueError(f"algorithm {self.kind} trains no model: leave local.batch_norm={batch_norm} out")

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        """Return 1: clients do not train in rounds, so the whole run counts as one round."""
        del rounds, dataset
        return 1
