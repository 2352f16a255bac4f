"""Early stopping: a run ends when the validation accuracy reaches a target, or has not risen for some rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_sim.store.run_directory import RoundRecord
from strategies.layer import Layer


class EarlyStopping(Layer):
    """Ends a run when the validation accuracy reaches a target or no longer rises.

    ``target``: the accuracy at which the run ends; 0 means no target. ``patience``: the run ends after this number of
    rounds without a higher accuracy; 0 means no limit.
    """

    def __init__(self, target: float, patience: int) -> None:
        self._target, self._patience = target, patience

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if a target accuracy or a patience is set."""
        return bool(experiment.evaluate.target_accuracy or experiment.evaluate.patience)

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> EarlyStopping:
        """Create this layer (code around the rounds) for a run.

        The layer stores nothing in checkpoints: it reads all accuracies from ``rounds.jsonl``.
        """
        del out, progress
        return cls(experiment.evaluate.target_accuracy, experiment.evaluate.patience)

    def ended(self, rounds: Sequence[RoundRecord]) -> str:
        """Return the reason to end the run early after these ``rounds``, or an empty string if the run continues."""
        validated = [(one.round, one.validation_accuracy) for one in rounds if one.validation_accuracy is not None]
        if not validated:
            return self.inner.ended(rounds)
        last, accuracy = validated[-1]
        best, highest = max(validated, key=lambda one: one[1])  # the earliest round with the highest accuracy
        if self._target and accuracy >= self._target:
            return (
                f"validation accuracy {100 * accuracy:.2f} % after round {last} reaches the target of "
                f"{100 * self._target:g} %"
            )
        if self._patience and last - best >= self._patience:
            return (
                f"no validation accuracy above the {100 * highest:.2f} % of round {best} in the {last - best} rounds "
                f"after it (evaluate.patience={self._patience})"
            )
        return self.inner.ended(rounds)
