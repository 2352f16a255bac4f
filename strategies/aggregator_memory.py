"""The memory of a robust aggregator: tensors that it keeps from round to round. Checkpoints contain them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fl_sim.types import Aggregate, Cohort, ServerState
from strategies.aggregators import Robust
from strategies.algorithm import Algorithm, Unfolding, payload_template, turns_of
from strategies.layer import Layer

MEMORY: Final = "aggregator"
"""Name of the aggregator's tensors in ``ServerState.memory``."""


class AggregatorMemory(Layer):
    """Stores the aggregator's memory in the server state, and passes it to the aggregator in the next round."""

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the aggregator keeps tensors from round to round."""
        return isinstance(experiment.aggregator, Robust) and experiment.aggregator.has_memory

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> AggregatorMemory:
        """Create this layer (code around the rounds) for a run. The layer has no state of its own."""
        del experiment, out, progress
        return cls()

    @classmethod
    def begun(cls, experiment: Any, model: nn.Module, server: ServerState) -> ServerState:
        """Return ``server``, the initial server state, with the aggregator's initial memory added."""
        del model
        algorithm = experiment.algorithm
        memory: dict[str, torch.Tensor] = {}
        for turn in range(1, turns_of(algorithm) + 1):
            template = payload_template(algorithm, server, turn)
            payloads = algorithm.unfolded(template) if isinstance(algorithm, Unfolding) else template
            memory |= experiment.aggregator.remembered(payloads, experiment.num_clients)
        return replace(server, memory={**server.memory, MEMORY: memory})

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate of the round. The aggregator reads the last round's memory from ``Cohort.memory``."""
        return self.inner.aggregate(replace(cohort, memory=server.memory[MEMORY]), algorithm, server)

    def foreseen(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the aggregate that ``cohort`` would have. Attacks call this method to test forged updates.

        The call does not change the aggregator's memory.
        """
        return self.inner.foreseen(replace(cohort, memory=server.memory[MEMORY]), algorithm, server)

    def merge(self, algorithm: Algorithm, server: ServerState, aggregate: Aggregate) -> ServerState:
        """Return the server state after the round, with the new memory."""
        merged = self.inner.merge(algorithm, server, aggregate)
        return replace(merged, memory={**merged.memory, MEMORY: aggregate.memory})
