"""The rules by which private steps (DP-SGD) bound a record's gradient: flat, by layers, and automatic."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Clipping:
    """The rule that bounds the L2 norm of a record's gradient by the clipping norm C.

    Without a choice, a gradient g with a norm above C is scaled down to the norm C. If ``by_layer``, the rule acts on
    the part of each trained layer by itself. A layer is the parameters of one module. The norm of each of L layers is C
    / sqrt(L), or the one in ``layer_norms``, {layer: norm}. Then C is the root of the sum of their squares (McMahan et
    al. 2018, section 2.1). With ``stability`` > 0, every gradient becomes C g / (|g| + ``stability``), which is shorter
    than C (AUTO-S; Bu et al. 2023, section 4). A gradient that is not finite counts as zeros, with all its layers.

    So one record moves the sum of all gradients by at most C under each rule.
    """

    by_layer: bool = False
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    stability: float = 0.0

    def norm(self, clipping_norm: float, names: Iterable[str]) -> float:
        """Return C for a training of the parameters ``names``. ``clipping_norm``: C without ``layer_norms``."""
        if not self.layer_norms:
            return clipping_norm
        return math.hypot(*(self.layer_norms[layer] for layer in self.parts(names)))

    def shares(self, names: Iterable[str]) -> list[float]:
        """Return the norm of each of the ``parts``, divided by C. The squares of the shares add up to 1."""
        parts = self.parts(names)
        if not self.layer_norms:
            return [1 / math.sqrt(len(parts))] * len(parts)
        return [self.layer_norms[layer] / self.norm(0.0, names) for layer in parts]

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the parameters of each part that is clipped by itself, {part: names}, both in the order of names.

        Without ``by_layer`` there is one part, with the name "". Raises ValueError if the parameters of a layer do not
        stand together.
        """
        order, found = list(names), dict[str, list[str]]()
        for name in order:
            found.setdefault(layer_of(name) if self.by_layer else "", []).append(name)
        if [name for part in found.values() for name in part] != order:
            raise ValueError(f"the parameters of a layer do not stand together: {', '.join(order)}")
        return found


FLAT: Final = Clipping()


def layer_of(name: str) -> str:
    """Return the layer of a parameter: the name of its module.

    >>> layer_of("body.0.weight")
    'body.0'
    """
    return name.rpartition(".")[0]
