"""Named tensors: arithmetic, a model's trained parameters and running statistics, and detection of forbidden writes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fl_sim.errors import RunError, UserError
from fl_sim.importing import torch
from fl_sim.own_code import name_of
from fl_sim.types import Params, Payloads, Trained

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

Layout: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The names and shapes of tensors that follow each other in one vector, in order."""


class FlatParams(Params):
    """Named tensors stored in one vector ``flat``, so that arithmetic on all tensors is one operation.

    The named tensors are views of the vector, created at the first access. These views are read-only, because other
    objects may share the vector.
    """

    __slots__ = ("_views", "flat", "layout")

    def __init__(self, flat: torch.Tensor, layout: Layout) -> None:
        self.flat = flat
        self.layout = layout
        self._views: dict[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._by_name()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self.layout)

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Return the pairs (name, tensor), like ``dict.items``."""
        return self._by_name().items()

    def values(self) -> ValuesView[torch.Tensor]:
        """Return the tensors, like ``dict.values``."""
        return self._by_name().values()

    def _by_name(self) -> dict[str, torch.Tensor]:
        if self._views is None:
            parts = self.flat.split_with_sizes(_sizes(self.layout))
            self._views = {name: part.view(shape) for (name, shape), part in zip(self.layout, parts, strict=True)}
        return self._views


def flattened(params: Params) -> FlatParams:
    """Return ``params`` as a FlatParams.

    A FlatParams is returned unchanged; any other mapping is copied, without gradients.
    """
    if isinstance(params, FlatParams):
        return params
    return FlatParams(_joined(params.values()), layout_of(params))


def vector_in(params: Params, layout: Layout) -> torch.Tensor:
    """Return ``params`` as one vector in the order of ``layout``. Names and shapes must be equal."""
    if isinstance(params, FlatParams) and params.layout == layout:
        return params.flat
    return _joined(params[name] for name, _ in layout)


def payload_vector(payloads: Payloads, template: Payloads) -> torch.Tensor:
    """Return all numbers of ``payloads`` (groups of tensors) as one vector.

    The tensors are in the order of ``template``, which has the same names.
    """
    rows = [vector_in(payloads[group], layout_of(params)) for group, params in template.items()]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def payloads_in(vector: torch.Tensor, template: Payloads) -> Payloads:
    """Return payloads (groups of float32 tensors) with the numbers in ``vector``: the inverse of ``payload_vector``."""
    layouts = {group: layout_of(params) for group, params in template.items()}
    parts = vector.float().split_with_sizes([num_in(layout) for layout in layouts.values()])
    return {group: FlatParams(part, layout) for (group, layout), part in zip(layouts.items(), parts, strict=True)}


def layout_of(params: Params) -> Layout:
    """Return the layout of ``params``: the names and shapes of the tensors, in order."""
    if isinstance(params, FlatParams):
        return params.layout
    return tuple((name, tuple(value.shape)) for name, value in params.items())


def check_layout(what: str, params: Params, layout: Layout) -> None:
    """Raise ValueError if names or shapes of ``params`` differ from those of ``layout``; the order may differ.

    ``what``: the name of ``params`` in the error message, such as "the weights".
    """
    had = layout_of(params)
    if had == layout or dict(had) == dict(layout):
        return
    found, wanted = dict(had), dict(layout)
    for name in {**wanted, **found}:
        if name not in found:
            raise ValueError(f"{what} do not fit the model: {name} is missing")
        if name not in wanted:
            raise ValueError(f"{what} do not fit the model: the model has no {name}")
        if found[name] != wanted[name]:
            raise ValueError(f"{what} do not fit the model: {name} has the shape {found[name]}, not {wanted[name]}")


def add(left: Params, right: Params, scale: float = 1.0) -> Params:
    """Return left + scale * right for tensors with the same names."""
    if (pair := _vectors(left, right)) is not None:
        return FlatParams(torch.add(*pair, alpha=scale), layout_of(left))
    return {name: torch.add(value, right[name], alpha=scale) for name, value in left.items()}


def subtract(left: Params, right: Params) -> Params:
    """Return left - right for tensors with the same names."""
    if (pair := _vectors(left, right)) is not None:
        return FlatParams(torch.sub(*pair), layout_of(left))
    return {name: value - right[name] for name, value in left.items()}


def scale(params: Params, factor: float) -> Params:
    """Return ``params`` with all tensors multiplied by ``factor``."""
    if isinstance(params, FlatParams):
        return FlatParams(params.flat * factor, params.layout)
    return {name: value * factor for name, value in params.items()}


def mixture(left: Params, right: Params, share: float) -> Params:
    """Return share * left + (1 - share) * right. A share of 1 gives exactly ``left``, and 0 exactly ``right``."""
    if (pair := _vectors(right, left)) is not None:
        return FlatParams(torch.lerp(*pair, share), layout_of(right))
    return {name: torch.lerp(value, left[name], share) for name, value in right.items()}


def inner_product(left: Params, right: Params) -> float:
    """Return the inner product of all numbers in ``left`` and ``right``, as a float64."""
    if (pair := _vectors(left, right)) is not None:
        return float((pair[0] * pair[1]).sum(dtype=torch.float64))
    return float(sum((value * right[name]).sum(dtype=torch.float64) for name, value in left.items()))


def zeros_like(params: Params) -> Params:
    """Return tensors of zeros with the names and shapes of ``params``."""
    if isinstance(params, FlatParams):
        return FlatParams(torch.zeros_like(params.flat), params.layout)
    return {name: torch.zeros_like(value) for name, value in params.items()}


def is_finite(payloads: Payloads) -> bool:
    """Return True if every number of every tensor is finite.

    The check computes the float64 sum of each tensor. If a number is NaN or infinite, the sum is NaN or infinite. A sum
    of finite float32 numbers cannot overflow float64. The sum takes one pass over the numbers, but torch.isfinite takes
    three.
    """
    for params in payloads.values():
        for value in [params.flat] if isinstance(params, FlatParams) else params.values():
            if not math.isfinite(value.sum(dtype=torch.float64)):
                return False
    return True


def num_parameters(params: Params) -> int:
    """Return the number of elements in all tensors of ``params``."""
    return num_in(layout_of(params))


def num_in(layout: Layout) -> int:
    """Return the number of elements in all tensors of ``layout``."""
    return sum(_sizes(layout))


def head_shape(params: Params) -> tuple[int, int]:
    """Return (classes, features) of the last linear layer. Raises UserError if the model has no linear layer."""
    classes, features = params[head_weight(params)].shape
    return classes, features


def head_names(params: Params) -> frozenset[str]:
    """Return the names of the parameters of the last linear layer. Raises UserError if there is no linear layer."""
    layer = head_weight(params).rpartition(".")[0]
    return frozenset(name for name in params if name.rpartition(".")[0] == layer)


def body_names(params: Params) -> frozenset[str]:
    """Return the names of all parameters outside the head (last linear layer). Raises UserError if there are none."""
    if body := frozenset(params) - head_names(params):
        return body
    raise UserError(
        f"the method separates the model's head from its body, and all trained parameters ({', '.join(params)}) belong "
        "to the head: train a part of the body too (model.trainable=last:2 or all, and a model of several layers, such "
        "as mlp); or take algorithm=local-only, where each client trains its own head, or fedavg, with one head "
        "for all"
    )


def head_weight(params: Params) -> str:
    """Return the name of the weight matrix of the last linear layer. Raises UserError if there is no linear layer."""
    matrices = [name for name, value in params.items() if value.ndim == 2]
    if not matrices:
        raise UserError(
            "the algorithm needs features, the inputs of a model's last linear layer, and this model has no linear "
            "layer: use another model, or another algorithm, such as fedavg"
        )
    return "head.weight" if "head.weight" in matrices else matrices[-1]


def detached(named: Iterable[tuple[str, torch.Tensor]]) -> Params:
    """Return copies of named tensors, such as ``model.named_parameters()``, on the CPU and without gradients."""
    return {name: value.detach().to("cpu", copy=True) for name, value in named}


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained parameters of ``model`` by name (no copies).

    Only trained parameters are sent, aggregated, clipped and noised. A frozen parameter (``requires_grad=False``) stays
    at its initial value on every client, as a buffer does.
    """
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def frozen_in(model: torch.nn.Module) -> Params:
    """Return copies, on the CPU, of the frozen parameters of ``model`` by name."""
    return detached((name, weight) for name, weight in model.named_parameters() if not weight.requires_grad)


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of ``model``.

    The copy shares the frozen parameters of ``model``, because no code changes them.
    """
    shared = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    made = copy.deepcopy(model, shared)
    for part in made.modules():
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # makes the weights contiguous, or cuDNN would copy them in every step
    return made


def placed(params: Params, layers: Params) -> tuple[Params, Params]:
    """Return the pair (parameters, running statistics of BatchNorm layers) to load into a model.

    ``params``: the model's parameters. ``layers``: further tensors of BatchNorm layers, such as the personal BatchNorm
    layers of a client. If a tensor in ``layers`` has the name of a parameter, it replaces the parameter. All other
    tensors in ``layers`` are running statistics.
    """
    own = {name: value for name, value in layers.items() if name in params}
    statistics = {name: value for name, value in layers.items() if name not in params}
    return ({**params, **own} if own else params), statistics


def layers_after(trained: Trained, names: Iterable[str]) -> Params:
    """Return tensors of a trained model in one mapping: its running statistics, and the parameters ``names``."""
    return {**{name: trained.params[name] for name in names}, **trained.statistics}


def placed_in(model: torch.nn.Module, params: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the trained parameters of ``model``, and the frozen parameters with names in ``params`` (no copies)."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad or name in params}


def copy_into(weights: Params, params: Params) -> None:
    """Copy ``params`` into a model's ``weights``. Raises ValueError if names or shapes differ.

    Without this check, PyTorch would broadcast a smaller tensor without an error.
    """
    check_layout("the weights", params, layout_of(weights))
    for name, weight in weights.items():
        weight.copy_(params[name])


def _vectors(left: Params, right: Params) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return all numbers of ``left`` and of ``right`` as two vectors, for fast arithmetic.

    Return None if neither is a FlatParams, or if their names or shapes differ.
    """
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


def all_norms_in(model: torch.nn.Module) -> dict[str, _BatchNorm]:
    """Return all BatchNorm layers of ``model`` by name, including layers whose running statistics are never updated."""
    from torch.nn.modules.batchnorm import _BatchNorm  # noqa: PLC0415 (torch is imported late)

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def norms_in(model: torch.nn.Module) -> dict[str, _BatchNorm]:
    """Return {name: layer} of the BatchNorm layers of ``model`` that update their running statistics in training.

    A model's own ``train`` method may leave a layer in evaluation mode. The running statistics of such a layer are
    never updated, so they are treated as constants of the architecture, like other buffers.
    """
    if not (norms := all_norms_in(model)):
        return norms
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        return {name: layer for name, layer in norms.items() if layer.training}
    finally:
        for module, mode in modes:
            module.training = mode


def running_in(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the running statistics of the BatchNorm layers of ``model`` by name (no copies)."""
    return _buffers_of(norms_in(model))


def fixed_in(model: torch.nn.Module) -> Params:
    """Return the tensors of ``model`` that training never changes (no copies, except of integers).

    These are frozen parameters, and running statistics of BatchNorm layers that stay in evaluation mode. ``model``: a
    new model on the CPU.
    """
    trained = norms_in(model)
    kept = _buffers_of({name: layer for name, layer in all_norms_in(model).items() if name not in trained})
    frozen = {name: weight.detach() for name, weight in model.named_parameters() if not weight.requires_grad}
    return {**frozen, **{name: value.to(torch.float32) for name, value in kept.items()}}


def _buffers_of(norms: Mapping[str, _BatchNorm]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}".removeprefix("."): buffer
        for name, layer in norms.items()
        for key, buffer in layer.named_buffers(recurse=False)
    }


def statistics_of(model: torch.nn.Module) -> Params:
    """Return copies, on the CPU and as float32, of the running statistics of ``model``.

    The statistics include each BatchNorm layer's count of batches. As float32 this count is exact up to 2^24. Only a
    layer with ``momentum=None`` uses the count.
    """
    return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in running_in(model).items()}


def load_statistics(model: torch.nn.Module, statistics: Params) -> None:
    """Copy ``statistics`` into the BatchNorm layers of ``model``; reset the layers if ``statistics`` is empty.

    BatchNorm's count of batches may be a mean over clients, so it is rounded. Raises ValueError if names or shapes
    differ.
    """
    if not statistics:
        for layer in norms_in(model).values():
            layer.reset_running_stats()
        return
    running = running_in(model)
    check_layout("the running statistics", statistics, layout_of(running))
    for name, buffer in running.items():
        value = statistics[name]
        buffer.copy_(value if buffer.is_floating_point() else value.round())


@dataclass(frozen=True)
class WriteGuard:
    """A guard that detects writes to tensors that an algorithm's code must only read.

    The clients of a process may share these tensors, such as the global model. A write by one client would then change
    the tensors for all clients. ``writes``: PyTorch's count of writes to each tensor, including writes to its views.
    ``sums``: a sum over the bits of each tensor, which detects writes that PyTorch does not count, such as writes
    through NumPy. The sums take about 1 % of the shortest round's time. If ``sums`` is empty, bits are not compared.
    ``found``: the messages of all detected writes. An error shows the first of these messages, which names the code
    that made the first write.
    """

    tensors: tuple[tuple[str, torch.Tensor], ...]
    writes: tuple[int, ...]
    sums: tuple[int, ...]
    found: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Payloads, *, by_bits: bool = True) -> WriteGuard:
        """Return a guard of all tensors in ``groups``, {name for messages: tensors}.

        ``by_bits``: False omits the sums over the bits, so the guard detects only writes that PyTorch counts.
        """
        tensors: list[tuple[str, torch.Tensor]] = []
        writes, sums = [], []
        for name, params in groups.items():
            for tensor in [params.flat] if isinstance(params, FlatParams) else params.values():
                tensors.append((name, tensor))
                writes.append(_writes(tensor))
                if by_bits:
                    sums.append(_bit_sum(tensor))
        return cls(tuple(tensors), tuple(writes), tuple(sums))

    def check(self, *methods: Callable[..., Any]) -> None:
        """Raise RunError if PyTorch has counted a write to one of the guarded tensors.

        ``methods``: the methods that may have written to the tensor; the message names these methods.
        """
        for (name, tensor), was in zip(self.tensors, self.writes, strict=True):
            if _writes(tensor) != was:
                raise self._write_error(name, methods)

    def check_bits(self, *methods: Callable[..., Any]) -> None:
        """Raise RunError if the bits of a tensor have changed. ``methods``: the methods that may have changed them."""
        for (name, tensor), was in zip(self.tensors, self.sums, strict=False):
            if _bit_sum(tensor) != was:
                raise self._write_error(name, methods)

    def _write_error(self, name: str, methods: tuple[Callable[..., Any], ...]) -> RunError:
        self.found.append(
            f"{' or '.join(map(name_of, methods))} wrote into {name}, which must only be read: other clients in this "
            "process use the same tensor, so the run would be wrong; write into a copy, such as tensor.clone()"
        )
        return RunError(self.found[0])


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 (PyTorch's documentation names it)


def _bit_sum(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return 0
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    whole = len(content) // 8 * 8
    return int(np.add.reduce(content[:whole].view(np.int64))) + int(np.add.reduce(content[whole:], dtype=np.int64))
