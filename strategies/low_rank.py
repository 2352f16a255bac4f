"""Common code of the methods for adapters (LoRA): factors by name, their products, and a check of settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from fl_sim.importing import torch
from fl_sim.kinds import Choices, kind_of
from fl_sim.params import head_weight
from fl_sim.types import Params

STARTS_WITH: Final[Mapping[str, object]] = {"model": {"trainable": "lora"}}
"""The default of ``model.trainable`` for methods that need adapters."""

_FACTOR: Final = re.compile(r"^(?P<layer>(?:.*\.)?)lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<rest>\..*)?$")
"""The names of factors: ``1.lora_A``, or ``q.lora_A.default.weight`` in Hugging Face's library PEFT.

Factors of embeddings have names such as ``lora_embedding_A``.
"""


class Factors(NamedTuple):
    """The names of the factors A and B of one adapter. ``layer``: the prefix of the layer's names, such as ``1.``."""

    a: str
    b: str
    layer: str
    is_embedding: bool


def factors_in(names: Collection[str]) -> list[Factors]:
    """Return the adapters (pairs of factors A and B) among the parameter ``names``. Unpaired factors are left out."""
    found = []
    for name in names:
        if (match := _FACTOR.match(name)) and match["side"] == "A":
            start, rest = name[: match.start("side")], match["rest"] or ""
            if f"{start}B{rest}" in names:
                found.append(Factors(name, f"{start}B{rest}", match["layer"], match["embedding"] is not None))
    return found


def is_factor(name: str, sides: str = "AB") -> bool:
    """Return True if ``name`` names a factor of an adapter. ``sides``: the factors to look for, "A", "B" or "AB"."""
    match = _FACTOR.match(name)
    return match is not None and match["side"] in sides


def products(params: Params) -> dict[str, torch.Tensor]:
    """Return {name of A: product B A} for each adapter in ``params``, as matrices of shape (outputs, inputs)."""
    return {one.a: params[one.b].flatten(1) @ params[one.a].flatten(1) for one in factors_in(params)}


def head_shape(params: Params) -> tuple[int, int]:
    """Return (classes, features) of the last linear layer, also if this layer has an adapter.

    Raises UserError if the model has no linear layer.
    """
    name = head_weight(params)
    classes, features = params[name].shape
    of_factor = {one.b: params[one.a].shape[1] for one in factors_in(params)}
    return classes, of_factor.get(name, features)


def check_adapters(algorithm: object, experiment: Choices) -> None:
    """Raise ValueError if no adapters are trained, because ``model.trainable`` is neither "all" nor contains "lora"."""
    words = experiment.model.trainable.split(",")
    if "lora" not in words and words != ["all"]:
        raise ValueError(
            f"algorithm {kind_of(algorithm)} is for adapters, and model.trainable={experiment.model.trainable} trains "
            "none: leave model.trainable out, or set model.trainable=lora"
        )
