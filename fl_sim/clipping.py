"""The rules by which DP-SGD clips the gradient of a single record: flat, layer by layer, and automatic."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Clipping:
    """The rule that bounds the L2 norm of a record's gradient by the clipping norm C.

    By default, a record's gradient g with a norm above C is scaled down to the norm C. If ``by_layer`` is True, the
    gradient of each trained layer is scaled down separately. A layer is the parameters of one module. If there are L
    layers, the largest norm of each layer's gradient is C / sqrt(L). If the mapping ``layer_norms``, {layer: norm}, is
    given, it states the largest norm of each layer. C is then the square root of the sum of the squares of these norms
    (McMahan et al. 2018, section 2.1). If ``stability`` is above 0, every gradient g becomes C g / (|g| +
    ``stability``), with a norm below C (AUTO-S; Bu et al. 2023, section 4). A gradient with NaN or infinity is replaced
    by zeros in all layers.

    Under each rule, adding or removing one record changes the sum of all gradients by at most C, in the L2 norm.
    """

    by_layer: bool = False
    layer_norms: Mapping[str, float] = field(default_factory=dict)
    stability: float = 0.0

    def norm(self, clipping_norm: float, names: Iterable[str]) -> float:
        """Return the clipping norm C of a record's whole gradient.

        If ``layer_norms`` is given, C is computed from the norms of all layers. Otherwise C is ``clipping_norm``.
        ``names``: the names of the trained parameters.
        """
        if not self.layer_norms:
            return clipping_norm
        return math.hypot(*(self.layer_norms[layer] for layer in self.parts(names)))

    def shares(self, names: Iterable[str]) -> list[float]:
        """Return the norm to which each part of the gradient is clipped (see ``parts``), divided by C.

        C is the clipping norm of the whole gradient. The squares of the results add up to 1.
        """
        parts = self.parts(names)
        if not self.layer_norms:
            return [1 / math.sqrt(len(parts))] * len(parts)
        return [self.layer_norms[layer] / self.norm(0.0, names) for layer in parts]

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the parts of a gradient that are clipped separately, as {part: names of its parameters}.

        The parts are in the order of ``names``. With ``by_layer``, each layer is a part. Otherwise there is one part,
        with the name "". Raises ValueError if the parameters of a layer do not directly follow each other in ``names``.
        """
        order, found = list(names), dict[str, list[str]]()
        for name in order:
            found.setdefault(layer_of(name) if self.by_layer else "", []).append(name)
        if [name for part in found.values() for name in part] != order:
            raise ValueError(f"the parameters of a layer do not follow each other: {', '.join(order)}")
        return found


FLAT: Final = Clipping()


def layer_of(name: str) -> str:
    """Return the layer of a parameter: the name of its module.

    >>> layer_of("body.0.weight")
    'body.0'
    """
    return name.rpartition(".")[0]
