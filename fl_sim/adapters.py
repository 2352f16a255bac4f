"""Low-rank adapters (LoRA, Hu et al. 2022): a layer with frozen weights W computes with W + (alpha / r) B A.

The matrices A and B are trained. ``r`` is the rank of the adapter, and ``alpha`` is a constant factor. A layer with an
adapter keeps the names of its parameters. It gets two further parameters: A, shape (r, inputs), and B, shape (outputs,
r). Their names are ``lora_A`` and ``lora_B``, or ``lora_embedding_A`` and ``lora_embedding_B`` for embeddings. The
attribute ``weight`` of the layer is W + (alpha / r) B A. Some code of PyTorch reads ``weight`` and does not call
``forward``. Such code computes the same outputs.
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
"""The value of ``model.trainable`` for adapters. The names of an adapter's parameters contain ``lora_``, as in PEFT."""

SCALE: Final = "lora_scale"
"""The name of the frozen parameter alpha / r in an adapted layer."""


class Adapted(nn.Module):
    """The base class of layers with an adapter.

    ``factors``: the names of the adapter's matrices A and B. ``lora_scale``: alpha / r, a frozen parameter.
    ``lora_dropout``: the dropout rate of the adapter's inputs.
    """

    factors: ClassVar[tuple[str, str]] = ("lora_A", "lora_B")
    lora_scale: nn.Parameter
    lora_dropout: float

    @property
    def base(self) -> torch.Tensor:
        """Return the frozen weights W of the layer."""
        return self._own("weight")

    @property
    def weight(self) -> torch.Tensor:
        """Return the weights of the layer with its adapter: W + (alpha / r) B A, in the shape of W."""
        return self.base + self.lora_scale * product(self.b, self.a, self.base, turned=self.is_turned)

    @property
    def a(self) -> torch.Tensor:
        """Return the adapter's matrix A, shape (r, inputs)."""
        return self._own(self.factors[0])

    @property
    def b(self) -> torch.Tensor:
        """Return the adapter's matrix B, shape (outputs, r)."""
        return self._own(self.factors[1])

    @property
    def is_turned(self) -> bool:
        """Return True for an embedding: its weights W have the transposed shape (inputs, outputs).

        The inputs of an embedding are tokens, so W has one row for each token.
        """
        return isinstance(self, nn.Embedding)

    @property
    def draws_random_numbers(self) -> bool:
        """Return True if the adapter has dropout.

        Trainers read this attribute of every layer. It tells them that training draws random numbers.
        """
        return self.lora_dropout > 0

    def dropped(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` after the adapter's dropout, as inputs of the product B A. The weights W get no dropout."""
        return functional.dropout(inputs, self.lora_dropout, self.training) if self.lora_dropout else inputs

    def _own(self, name: str) -> torch.Tensor:
        weight = self._parameters[name]
        assert weight is not None
        return weight


class LoraLinear(Adapted, nn.Linear):  # type: ignore[override]  # its weight is a property
    """A linear layer with an adapter."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs).

        In evaluation mode, the layer computes with the weights W + (alpha / r) B A. In training mode, it computes the
        outputs of W and of the adapter separately, because only the adapter has dropout.
        """
        if not self.training:
            return functional.linear(inputs, self.weight, self.bias)
        inner = functional.linear(self.dropped(inputs), self.a)
        return functional.linear(inputs, self.base, self.bias) + self.lora_scale * functional.linear(inner, self.b)


class LoraConv2d(Adapted, nn.Conv2d):  # type: ignore[override]  # its weight is a property
    """A convolution with an adapter (Conv-LoRA): A is a convolution to r channels, and B is a 1 x 1 convolution."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, channels, h, w) to (n, outputs, h', w').

        In evaluation mode, the layer computes with the weights W + (alpha / r) B A. In training mode, it computes the
        outputs of W and of the adapter separately. An exception is a grouped convolution without dropout: it always
        computes with W + (alpha / r) B A.
        """
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
    """An embedding with an adapter: the matrix A has a column for each token.

    The adapter does not change the vector of the padding token.
    """

    factors: ClassVar[tuple[str, str]] = ("lora_embedding_A", "lora_embedding_B")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (n, length) tokens to (n, length, width).

        In evaluation mode, the layer computes with the weights W + (alpha / r) B A. In training mode, it computes the
        outputs of W and of the adapter separately, because only the adapter has dropout.
        """
        if not self.training:
            return functional.embedding(inputs, self.weight, self.padding_idx)
        kept = functional.embedding(inputs, self.base, self.padding_idx)
        inner = self.dropped(functional.embedding(inputs, self.a.T, self.padding_idx))
        return kept + self.lora_scale * functional.linear(inner, self.b)


_ADAPTED: Final[Mapping[type[nn.Module], type[nn.Module]]] = {
    nn.Linear: LoraLinear, nn.Conv2d: LoraConv2d, nn.Embedding: LoraEmbedding,
}  # fmt: skip
"""{class of a layer: class of the layer with an adapter}.

Subclasses of these layers get no adapter, because they may use their weights in another way.
"""


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

    ``targets``: the layers that get adapters, by their full names or by the last part of the names; empty for all
    layers of these types. ``without``: names of parameters that are trained directly; their layers get no adapter.
    ``rank``: the rank of all adapters; with 0, no adapter is added. If W has fewer rows or columns than ``rank``, the
    adapter has this smaller rank. B is initially 0, so adapters do not change the model's outputs. A is initially
    uniform in [-a, a] with a = 1 / sqrt(inputs), as in PEFT. A depends on ``seed`` only, so all clients have the same
    A. Raises UserError if the model has no layer of these types, or no layer with a name in ``targets``.
    """
    shared = _shared_in(model)
    places = [
        (name, layer) for name, layer in model.named_modules()
        if type(layer) in _ADAPTED and f"{name}.weight".removeprefix(".") not in without and id(layer) not in shared
        and getattr(layer, "max_norm", None) is None
    ]  # fmt: skip
    if not places:
        raise UserError(
            "model.trainable=lora adds adapters to nn.Linear, nn.Conv2d and nn.Embedding, but this model has no such "
            "layer, or only layers that share their weights: set model.trainable=head, or all"
        )
    for target in targets:
        if not any(_is_called(name, target) for name, _ in places):
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name, _ in places))
            raise UserError(
                f"model.target_modules names {shortened(target)!r}{guess(target, ends)}, but no name of a layer that "
                "can have an adapter ends with it; the layers that can have an adapter are "
                f"{shortened(', '.join(name for name, _ in places))}"
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
    """Return the adapter's product B A, in the shape of the weights ``like``.

    ``turned``: True for an embedding, whose weights are transposed. The result is then (B A)^T.
    """
    whole = factor_b @ factor_a
    return (whole.T if turned else whole).reshape(like.shape)


def adapted_in(model: nn.Module) -> dict[str, Any]:
    """Return the layers of ``model`` that have adapters, as {name: layer}."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapted)}


def merged(model: nn.Module, params: Params) -> Params:
    """Return the parameters of the model without adapters: an adapted layer has the weights W + (alpha / r) B A.

    ``params``: the parameters of ``model`` and of all adapters. If ``params`` does not contain the frozen weights W of
    a layer, they are taken from ``model``. If the model has no adapters, ``params`` is returned unchanged.
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
    """Remove all adapters from ``model``, in place, and return ``model``. W becomes W + (alpha / r) B A."""
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
    """Return the layers of ``model`` that share a parameter with another layer (tied embeddings), by ``id``.

    These layers get no adapter, because an adapter changes the weights of only one layer.
    """
    owners: dict[int, set[int]] = {}
    for layer, weight in _owned(model):
        owners.setdefault(id(weight), set()).add(id(layer))
    return {layer for some in owners.values() if len(some) > 1 for layer in some}


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    for layer in model.modules():
        for weight in layer.parameters(recurse=False):
            yield layer, weight
