"""Which models the kernel can train: a torch module as the list of numbers that kernel.cpp reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

_CONV, _POOL, _RELU, _LINEAR = 0, 1, 2, 3
_KINDS: dict[type[nn.Module], int] = {nn.Conv2d: _CONV, nn.MaxPool2d: _POOL, nn.ReLU: _RELU, nn.Linear: _LINEAR}
_HALVING = {"kernel_y": 2, "kernel_x": 2, "stride_y": 2, "stride_x": 2, "padding_y": 0, "padding_x": 0}
_FIELDS = (
    "kind", "outputs", "kernel_y", "kernel_x", "stride_y", "stride_x", "padding_y", "padding_x", "bias", "relu",
    "pooled", "unused",
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Stack:
    """A model as the kernel sees it.

    ``layers``: int32, (layers, 12), in the order of ``_FIELDS``; ``input_shape``: int32, (3,): channels, height, width,
    or (features, 1, 1). ``shapes``: the parameters' names and shapes, in the order in which they lie one after another.
    """

    layers: NDArray[np.int32]
    input_shape: NDArray[np.int32]
    shapes: tuple[tuple[str, torch.Size], ...]

    @cached_property
    def pointers(self) -> tuple[int, int]:
        """Return where ``layers`` and ``input_shape`` lie."""
        return int(self.layers.ctypes.data), int(self.input_shape.ctypes.data)

    @cached_property
    def sizes(self) -> list[int]:
        """Return how many numbers each parameter has."""
        return [shape.numel() for _, shape in self.shapes]


def describe(model: nn.Module, input_shape: tuple[int, ...]) -> Stack | None:
    """Return ``model`` for the kernel; None where it is more than a stack of the layers that the kernel knows.

    Those are Conv2d, MaxPool2d, ReLU, Flatten and Linear in (nested) Sequential, ending in Linear, nothing frozen,
    nothing shared, no hooks. ``input_shape``: of one record, (channels, height, width) or (features,).
    """
    modules = list(_leaves(model))
    rows = _rows(modules, is_flat=len(input_shape) == 1)
    is_whole = rows is not None and rows[-1]["kind"] == _LINEAR and not rows[-1].get("relu")
    if not is_whole or len(set(map(id, modules))) < len(modules) or not _plain_parameters(model):
        return None
    assert rows is not None
    return Stack(
        np.array([[row.get(field, 0) for field in _FIELDS] for row in rows], dtype=np.int32),
        np.array((*input_shape, 1, 1)[:3], dtype=np.int32),
        tuple((name, weight.shape) for name, weight in model.named_parameters()),
    )


def _rows(modules: list[nn.Module | None], *, is_flat: bool) -> list[dict[str, int]] | None:
    """Return the layers' descriptions, fused; None where one does not fit. ``is_flat``: the input has no planes."""
    rows: list[dict[str, int]] = []
    for module in modules:
        if isinstance(module, nn.Flatten):
            if (module.start_dim, module.end_dim) != (1, -1):
                return None
            is_flat = True
            continue
        wants_flat = {nn.Linear: True, nn.ReLU: is_flat}.get(type(module), False)
        row = _row(module) if module is not None and wants_flat == is_flat else None
        if row is None:
            return None
        _append(rows, row)
    return rows or None


def _leaves(module: nn.Module) -> Iterator[nn.Module | None]:
    """Yield the layers in order; None in place of one that is not known."""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        yield None
    elif type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    elif type(module) in {*_KINDS, nn.Flatten}:
        yield module
    else:
        yield None


def _row(module: nn.Module) -> dict[str, int] | None:
    row = {"kind": _KINDS[type(module)]}
    if isinstance(module, nn.Linear):
        return row | {"outputs": module.out_features, "bias": module.bias is not None}
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return None
        row |= {"outputs": module.out_channels, "bias": module.bias is not None}
    if isinstance(module, nn.MaxPool2d) and (module.ceil_mode or module.return_indices):
        return None
    return row if isinstance(module, nn.ReLU) else _sized(row, module)


def _sized(row: dict[str, int], window: Any) -> dict[str, int] | None:
    """Add the window's sizes; None where it is dilated, or padded by a whole kernel."""
    for name in ("kernel_size", "stride", "padding", "dilation"):
        value = getattr(window, name)
        row[f"{name.removesuffix('_size')}_y"], row[f"{name.removesuffix('_size')}_x"] = (
            value if isinstance(value, tuple) else (value, value)
        )
    is_dilated = (row["dilation_y"], row["dilation_x"]) != (1, 1)
    fits = row["padding_y"] < row["kernel_y"] and row["padding_x"] < row["kernel_x"]
    return row if fits and not is_dilated else None


def _append(rows: list[dict[str, int]], row: dict[str, int]) -> None:
    """Add a layer, or fuse it with the one before: a ReLU with any, 2 x 2 pooling with a convolution.

    ReLU and pooling may change places: the largest of rectified numbers is the rectified largest.
    """
    last = rows[-1] if rows else {"kind": _RELU}
    halves = row["kind"] == _POOL and row.items() >= _HALVING.items()
    if row["kind"] == _RELU and rows:
        last["relu"] = 1
    elif halves and last["kind"] == _CONV and not last.get("pooled"):
        last["pooled"] = 1
    else:
        rows.append(row)


def _plain_parameters(model: nn.Module) -> bool:
    parameters = list(model.named_parameters(remove_duplicate=False))
    is_tied = len(parameters) > len(list(model.parameters()))
    return (
        not is_tied
        and all(
            type(weight) is nn.Parameter
            and weight.requires_grad
            and weight.dtype == torch.float32
            and weight.device.type == "cpu"
            for _, weight in parameters
        )
        and not any(True for _ in model.buffers())
    )
