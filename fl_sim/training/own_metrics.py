"""User-defined metrics: the user's function computes them from the model and the test records."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fl_sim.errors import RunError
from fl_sim.own_code import error_context, in_one_line, load_object
from fl_sim.seeding import seeded_alone
from fl_sim.store.run_directory import ROUND_FIELDS

OwnMetrics: TypeAlias = Callable[[int, nn.Module, TensorDataset], Mapping[str, float]]
"""The user's function that computes metrics: (round, model, test records) -> {name: number}."""

LONGEST_NAME: Final = 100
"""The largest number of characters in the name of a metric."""


def metrics_at(path: str) -> dict[str, OwnMetrics]:
    """Load the user's metric function from the import path ``path``; return {name for messages: function}.

    The name is "evaluate.metrics=PATH". The result is empty if ``path`` is "none".
    """
    return {} if path == "none" else {f"evaluate.metrics={path}": load_object(path, "evaluate.metrics")}


def measured_by(
    function: OwnMetrics, what: str, server_round: int, model: nn.Module, test: TensorDataset, *keys: int, seed: int
) -> dict[str, float]:
    """Return the metrics that the user's ``function`` computes after a round, {name: number}.

    ``what``: the name of the function for error messages. ``model``: a copy of the model that only the function uses,
    in evaluation mode. ``test``: a copy of the test records. ``seed``, ``what``, the round and the ``keys``, such as a
    client ID, seed the global random generators. Raises RunError for an error in the function, with the file and line
    of the error, and for invalid metrics (``checked_metrics``).
    """
    with seeded_alone(seed, what, server_round, *keys), error_context(what), torch.no_grad():
        returned = function(server_round, model, test)
    return checked_metrics(returned, what, server_round)


def checked_metrics(returned: object, what: str, server_round: int) -> dict[str, float]:
    """Return the metrics in ``returned`` as floats, {name: number}.

    ``what``: the name of the function that returned the metrics, for the error message. Raises RunError for a value
    that is not a finite number, and for a name that is already a field of ``rounds.jsonl``.
    """
    if not isinstance(returned, Mapping):
        raise RunError(f"{what} returned {in_one_line(repr(returned))}; it must return a dict from names to numbers")
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            raise RunError(
                f"{what} gave a metric the name {in_one_line(repr(name))}: a name has 1 to "
                f"{LONGEST_NAME} printable letters"
            )
        if name in ROUND_FIELDS:
            raise RunError(f"{what} returned {name!r}, a field that every round has: give the metric another name")
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
            value = value.item()  # noqa: PLW2901 (an array of one element becomes a number)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RunError(
                f"{what} returned {name} = {in_one_line(repr(value))} after round {server_round}; it must be a finite "
                "number: leave the metric out of rounds without a finite number"
            )
        numbers[name] = float(value)
    return numbers
