"""What the models that come with fl-sim are called: known without torch, so that a mistake is told at once."""

from typing import Final

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

MODEL_NAMES: Final = ("niid-cnn", "niid-mlp", "dafl-cnn", "mlp", "2nn", "logistic", "resnet")
"""The keys of ``fl_sim.models.MODELS``."""

GRU: Final = "gru"
"""The model for sequences of tokens (fl_sim.sequences), which alone is for them, and for nothing else."""

ALL_NAMES: Final = (*MODEL_NAMES, GRU)


def known_model(name: str) -> str:
    """Return ``name``: nothing (the data set's default), one of ours, or an import path. Raises UserError otherwise."""
    if name and ":" not in name and name not in ALL_NAMES:
        raise UserError(
            f"unknown model {shortened(name)!r}{guess(name, ALL_NAMES)}; choose one of {', '.join(ALL_NAMES)}, or "
            "give your own as package.module:factory"
        )
    return name
