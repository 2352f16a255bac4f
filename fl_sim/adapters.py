"""Low-rank adapters (LoRA, Hu et al. 2022): W + (alpha / r) B A in place of a layer's weights W, which stay frozen.

An adapted layer keeps the names of its parameters, and gets ``lora_A`` (r, inputs) and ``lora_B`` (outputs, r), for
embeddings ``lora_embedding_A`` and ``lora_embedding_B``. Its attribute ``weight`` is the sum, also for code that reads
the weights past ``forward``, as fast paths of PyTorch do.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.nn import functional

from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.seeding import rng
from fl_sim.types import Params

LORA: Final = "lora"
"""The word for adapters in ``model.trainable``; ``lora_`` is a part of the names of their parameters, as in PEFT."""

SCALE: Final = "lora_scale"
"""The name of the frozen parameter alpha / r in an adapted layer."""


class Adapted(nn.Module):
    """The additions to a layer with an adapter.

    ``factors``: the names of A and B. ``lora_scale``: alpha / r, a frozen parameter. ``lora_dropout``: that of inputs.
    """

    factors: ClassVar[tuple[str, str]] = ("lora_A", "lora_B")
    lora_scale: nn.Parameter
    lora_dropout: float

    @property
    def base(self) -> torch.Tensor:
        """Return the layer's own weights W."""
        return self._own("weight")

    @property
    def weight(self) -> torch.Tensor:
        """Return W + (alpha / r) B A, in the shape of W."""
        return self.base + self.lora_scale * product(self.b, self.a, self.base, turned=self.is_turned)

    @property
    def a(self) -> torch.Tensor:
        """Return A, shape (r, inputs)."""
        return self._own(self.factors[0])

    @property
    def b(self) -> torch.Tensor:
        """Return B, shape (outputs, r)."""
        return self._own(self.factors[1])

    @property
    def is_turned(self) -> bool:
        """Return True for an embedding, whose W has the inputs (the tokens) first."""
        return isinstance(self, nn.Embedding)

    @property
    def draws_random_numbers(self) -> bool:
        """Return True if the adapter has dropout; the trainers ask every layer for this."""
        return self.lora_dropout > 0

    def dropped(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the adapter, after its dropout."""
        return functional.dropout(inputs, self.lora_dropout, self.training) if self.lora_dropout else inputs

    def _own(self, name: str) -> torch.Tensor:
        weight = self._parameters[name]
        assert weight is not None
        return weight


class LoraLinear(Adapted, nn.Linear):  # type: ignore[override]  # its weight is a property
    """A linear layer with an adapter."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs); outside of training by the merged weights."""
        if not self.training:
            return functional.linear(inputs, self.weight, self.bias)
        inner = functional.linear(self.dropped(inputs), self.a)
        return functional.linear(inputs, self.base, self.bias) + self.lora_scale * functional.linear(inner, self.b)


class LoraConv2d(Adapted, nn.Conv2d):  # type: ignore[override]  # its weight is a property
    """A convolution with an adapter. A is a convolution to r channels, and B one of 1 x 1 pixels (Conv-LoRA)."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, channels, h, w) to (n, outputs, h', w'); outside of training by the merged weights."""
        if not self.training or (self.groups > 1 and not self.lora_dropout):
            whole: torch.Tensor = self._conv_forward(inputs, self.weight, self.bias)
            return whole
        kept: torch.Tensor = self._conv_forward(inputs, self.base, self.bias)
        if self.groups > 1:
            added: torch.Tensor = self._conv_forward(self.dropped(inputs), self.weight - self.base, None)
            return kept + added
        inner = self._conv_forward(self.dropped(inputs), self.a.view(-1, *self.base.shape[1:]), None)
        return kept + self.lora_scale * functional.conv2d(inner, self.b[:, :, None, None])


class LoraEmbedding(Adapted, nn.Embedding):  # type: ignore[override]  # its weight is a property
    """An embedding with an adapter: A has a column for each token. The padding token keeps its own vector."""

    factors: ClassVar[tuple[str, str]] = ("lora_embedding_A", "lora_embedding_B")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, length) tokens to (n, length, width); outside of training by the merged weights."""
        if not self.training:
            return functional.embedding(inputs, self.weight, self.padding_idx)
        kept = functional.embedding(inputs, self.base, self.padding_idx)
        inner = self.dropped(functional.embedding(inputs, self.a.T, self.padding_idx))
        return kept + self.lora_scale * functional.linear(inner, self.b)


_ADAPTED: Final[Mapping[type[nn.Module], type[nn.Module]]] = {
    nn.Linear: LoraLinear, nn.Conv2d: LoraConv2d, nn.Embedding: LoraEmbedding,
}  # fmt: skip
"""{class of a layer: the class with an adapter}. A subclass may use its weights in other ways, so it gets none."""


def adapt(
    model: nn.Module,
    rank: int,
    alpha: float,
    dropout: float,
    seed: int,
    *,
    targets: Collection[str] = (),
    without: Collection[str] = (),
) -> None:
    """Add adapters to the linear layers, convolutions and embeddings of ``model``, in place.

    ``targets``: the names of these layers, or the ends of their names after a dot; empty for all of them. ``without``:
    parameters that are trained themselves; their layers get no adapter. B begins at 0, so the model
    computes what it did. A's numbers are uniform within 1 / sqrt(inputs), as in PEFT, from ``seed`` alone: they are
    equal on all clients. With ``rank`` 0 nothing is added. A rank above the smaller side of a layer's W is this side.
    Raises UserError if the model has no such layer, or none with a name in ``targets``.
    """
    shared = _shared_in(model)
    places = [
        (name, layer) for name, layer in model.named_modules()
        if type(layer) in _ADAPTED and f"{name}.weight".removeprefix(".") not in without and id(layer) not in shared
        and getattr(layer, "max_norm", None) is None
    ]  # fmt: skip
    if not places:
        raise UserError(
            "model.trainable=lora adapts linear layers, convolutions and embeddings, and this model has none whose "
            "weights are its own: take model.trainable=head, or all"
        )
    for target in targets:
        if not any(_is_called(name, target) for name, _ in places):
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name, _ in places))
            raise UserError(
                f"model.target_modules names {shortened(target)!r}{guess(target, ends)}, and no layer that can be "
                f"adapted has this name or end of a name: it has {shortened(', '.join(name for name, _ in places))}"
            )
    places = [place for place in places if not targets or any(_is_called(place[0], target) for target in targets)]
    for number, (_, layer) in enumerate(places):
        weight: Any = layer._parameters["weight"]  # noqa: SLF001 (PyTorch's documentation names it)
        matrix = weight.flatten(1).T if isinstance(layer, nn.Embedding) else weight.flatten(1)
        if not (own := min(rank, *matrix.shape)):
            continue
        drawn = rng(seed, "adapters", number).uniform(-1, 1, (own, matrix.shape[1])) / math.sqrt(matrix.shape[1])
        first = torch.from_numpy(drawn).to(weight)
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            first[:, layer.padding_idx] = 0
        adapted: Any = layer
        adapted.__class__ = _ADAPTED[type(layer)]
        layer.register_parameter(adapted.factors[0], nn.Parameter(first))
        layer.register_parameter(adapted.factors[1], nn.Parameter(torch.zeros(matrix.shape[0], own).to(weight)))
        scale = torch.tensor(alpha / rank).to(weight)
        layer.register_parameter(SCALE, nn.Parameter(scale, requires_grad=False))
        adapted.lora_dropout = dropout


def product(
    factor_b: torch.Tensor, factor_a: torch.Tensor, like: torch.Tensor, *, turned: bool = False
) -> torch.Tensor:
    """Return B A in the shape of the weights ``like``. ``turned``: True for an embedding, which gets (B A)^T."""
    whole = factor_b @ factor_a
    return (whole.T if turned else whole).reshape(like.shape)


def adapted_in(model: nn.Module) -> dict[str, Any]:
    """Return the layers of ``model`` with adapters by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapted)}


def merged(model: nn.Module, params: Params) -> Params:
    """Return the parameters of the model without adapters: ``params``, and W + (alpha / r) B A for adapted layers.

    ``model``: provides the layers, and W where ``params`` lack it. ``params`` with all adapters of the model. If the
    model has no adapters, ``params`` are returned unchanged.
    """
    if not (layers := adapted_in(model)):
        return params
    kept = {name: value for name, value in params.items() if not name.rpartition(".")[2].startswith(f"{LORA}_")}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        base = params.get(f"{prefix}weight", layer.base.detach().cpu())
        a, b = (params[f"{prefix}{factor}"] for factor in layer.factors)
        scale = params.get(f"{prefix}{SCALE}", layer.lora_scale.detach().cpu())
        kept[f"{prefix}weight"] = base + scale * product(b, a, base, turned=layer.is_turned)
    return kept


def without_adapters(model: nn.Module) -> nn.Module:
    """Take all adapters out of ``model``, in place, and return it. Its weights are merged."""
    for layer in adapted_in(model).values():
        with torch.no_grad():
            layer.base.copy_(layer.weight)
        for name in (*layer.factors, SCALE):
            delattr(layer, name)
        layer.__class__ = next(kind for kind, adapted in _ADAPTED.items() if type(layer) is adapted)
    return model


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _shared_in(model: nn.Module) -> set[int]:
    """Return the ids of the layers whose weights stand at two places of ``model``, such as a tied embedding."""
    owners: dict[int, set[int]] = {}
    for layer, weight in _owned(model):
        owners.setdefault(id(weight), set()).add(id(layer))
    return {layer for some in owners.values() if len(some) > 1 for layer in some}


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    for layer in model.modules():
        for weight in layer.parameters(recurse=False):
            yield layer, weight
