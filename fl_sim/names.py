"""Names of models and of data sets, known without torch, so that a mistake is reported at once."""

import re
from typing import Final

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened

MODEL_NAMES: Final = ("niid-cnn", "niid-mlp", "dafl-cnn", "mlp", "2nn", "logistic", "resnet")
"""The keys of ``fl_sim.models.MODELS``."""

GRU: Final = "gru"
"""The model for sequences of tokens, and for nothing else (fl_sim.models.GatedRecurrent)."""

ALL_NAMES: Final = (*MODEL_NAMES, GRU)


def known_model(name: str) -> str:
    """Return ``name``: nothing (the data set's default), one of ours, or an import path. Raises UserError otherwise."""
    if name and ":" not in name and name not in ALL_NAMES:
        raise UserError(
            f"unknown model {shortened(name)!r}{guess(name, ALL_NAMES)}; choose one of {', '.join(ALL_NAMES)}, or "
            "give your own as package.module:factory"
        )
    return name


FINER: Final = {"cifar100-coarse": "cifar100"}
"""{data set: the one with the same records in more classes}."""

_SETTINGS: Final = re.compile(r":(?=[A-Za-z_]+(?:\.[^=:]*)?=)")
"""The separator of a data set's place and its reading options."""


def called(data: str) -> str:
    """Return the name of the records of ``data`` in bills, without classes and reading options."""
    return _SETTINGS.split(records_of(data))[0]


def records_of(data: str) -> str:
    """Return the data set with the same records, for most ``data`` itself. Releases about both add up."""
    return FINER.get(data, data)
