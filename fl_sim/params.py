"""Arithmetic on named tensors: small, pure, always in the order of the first argument's names."""

from __future__ import annotations

import math
from collections.abc import Collection, ItemsView, Iterable, Iterator, ValuesView
from functools import lru_cache
from typing import TypeAlias

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.types import Params, Payloads, Trained

Layout: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of tensors that lie one behind the other in a vector."""


class FlatParams(Params):
    """Named tensors in one vector, ``flat``, so that arithmetic on all of them is one operation.

    The tensors by name are views of the vector, made when they are first asked for. Like all values that flow through
    the program they are not written to: whoever holds one may share it with others.
    """

    __slots__ = ("_views", "flat", "layout")

    def __init__(self, flat: torch.Tensor, layout: Layout) -> None:
        self.flat = flat
        self.layout = layout
        self._views: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor by its name."""
        return self._by_name()[name]

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._by_name())

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self.layout)

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Return names and tensors."""
        return self._by_name().items()

    def values(self) -> ValuesView[torch.Tensor]:
        """Return the tensors."""
        return self._by_name().values()

    def _by_name(self) -> dict[str, torch.Tensor]:
        if self._views is None:
            parts = self.flat.split_with_sizes(_sizes(self.layout))
            self._views = {name: part.view(shape) for (name, shape), part in zip(self.layout, parts, strict=True)}
        return self._views


def flattened(params: Params) -> FlatParams:
    """Return ``params`` as one vector outside of any graph: itself where it is one, a copy where it is not."""
    if isinstance(params, FlatParams):
        return params
    return FlatParams(_joined(params.values()), layout_of(params))


def vector_in(params: Params, layout: Layout) -> torch.Tensor:
    """Return ``params``, which have the names and shapes of ``layout``, one behind the other in its order."""
    if isinstance(params, FlatParams) and params.layout == layout:
        return params.flat
    return _joined(params[name] for name, _ in layout)


def layout_of(params: Params) -> Layout:
    """Return the names and shapes of ``params``."""
    if isinstance(params, FlatParams):
        return params.layout
    return tuple((name, tuple(value.shape)) for name, value in params.items())


def check_layout(what: str, params: Params, layout: Layout) -> None:
    """Raise ValueError, which names ``what`` they are, where ``params`` have other names or shapes than ``layout``.

    Their order may differ.
    """
    had = layout_of(params)
    if had == layout or dict(had) == dict(layout):
        return
    found, wanted = dict(had), dict(layout)
    for name in {**wanted, **found}:
        if name not in found:
            raise ValueError(f"{what} do not fit the model: {name} is missing")
        if name not in wanted:
            raise ValueError(f"{what} do not fit the model: it has no {name}")
        if found[name] != wanted[name]:
            raise ValueError(f"{what} do not fit the model: {name} has the shape {found[name]}, not {wanted[name]}")


def add(left: Params, right: Params, scale: float = 1.0) -> Params:
    """Return left + scale * right."""
    if (pair := _vectors(left, right)) is not None:
        return FlatParams(torch.add(*pair, alpha=scale), layout_of(left))
    return {name: torch.add(value, right[name], alpha=scale) for name, value in left.items()}


def subtract(left: Params, right: Params) -> Params:
    """Return left - right."""
    if (pair := _vectors(left, right)) is not None:
        return FlatParams(torch.sub(*pair), layout_of(left))
    return {name: value - right[name] for name, value in left.items()}


def scale(params: Params, factor: float) -> Params:
    """Return factor * params."""
    if isinstance(params, FlatParams):
        return FlatParams(params.flat * factor, params.layout)
    return {name: value * factor for name, value in params.items()}


def zeros_like(params: Params) -> Params:
    """Return zeros of the same names and shapes."""
    if isinstance(params, FlatParams):
        return FlatParams(torch.zeros_like(params.flat), params.layout)
    return {name: torch.zeros_like(value) for name, value in params.items()}


def is_finite(payloads: Payloads) -> bool:
    """Say whether every number of every tensor is finite.

    A float64 sum of float32 numbers cannot overflow and keeps any NaN or infinity: one pass; isfinite takes three.
    """
    return all(
        math.isfinite(value.sum(dtype=torch.float64))
        for params in payloads.values()
        for value in ([params.flat] if isinstance(params, FlatParams) else params.values())
    )


def num_parameters(params: Params) -> int:
    """Count the numbers in ``params``."""
    return num_in(layout_of(params))


def num_in(layout: Layout) -> int:
    """Count the numbers that tensors of this layout have."""
    return sum(_sizes(layout))


def head_shape(params: Params) -> tuple[int, int]:
    """Return (classes, features) of a model's last linear layer. Raises UserError for a model that has none."""
    matrices = {name: value for name, value in params.items() if value.ndim == 2}
    if not matrices:
        raise UserError(
            "the algorithm needs features, which are what enters the last linear layer of a model, and this model has "
            "no weight matrix: take another model, or another algorithm, such as fedavg"
        )
    classes, features = matrices.get("head.weight", list(matrices.values())[-1]).shape
    return classes, features


def detached(named: Iterable[tuple[str, torch.Tensor]]) -> Params:
    """Copy named tensors, such as ``model.named_parameters()``, out of any graph and to the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in named}


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of ``model`` that are trained, themselves, by name.

    They alone travel, are aggregated, clipped and noised: a frozen one (``requires_grad=False``) is part of the
    architecture, which everybody builds, as a buffer is.
    """
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def placed(params: Params, layers: Params) -> tuple[Params, Params]:
    """Return the parameters and the running statistics of a model with ``params`` that has a server's ``layers``."""
    own = {name: value for name, value in layers.items() if name in params}
    statistics = {name: value for name, value in layers.items() if name not in params}
    return ({**params, **own} if own else params), statistics


def layers_after(trained: Trained, names: Iterable[str]) -> Params:
    """Return the layers of a trained model; ``names``: of the parameters among them."""
    return {**{name: trained.params[name] for name in names}, **trained.statistics}


def placed_in(model: torch.nn.Module, params: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the parameters of ``model`` that ``params`` are to be written to: all trained ones, and those named."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad or name in params}


def copy_into(weights: Params, params: Params) -> None:
    """Write ``params`` over a model's ``weights``. Raises ValueError where names or shapes are others.

    Copying alone would stretch a smaller tensor to the size of its place.
    """
    check_layout("the weights", params, layout_of(weights))
    for name, weight in weights.items():
        weight.copy_(params[name])


def _vectors(left: Params, right: Params) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both as vectors of the same layout where at least one of them is a vector already."""
    if not isinstance(left, FlatParams) and not isinstance(right, FlatParams):
        return None
    if layout_of(left) != layout_of(right):
        return None
    return flattened(left).flat, flattened(right).flat


def _joined(values: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [value.detach().reshape(-1) for value in values]
    return torch.cat(parts) if parts else torch.empty(0)


@lru_cache(maxsize=64)
def _sizes(layout: Layout) -> list[int]:
    return [math.prod(shape) for _, shape in layout]
