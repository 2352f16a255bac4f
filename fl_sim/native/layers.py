"""Conversion of a torch module to the integers that kernel.cpp reads, and the number of multiplications per layer."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim.models import ResidualBlock
from fl_sim.narrow_models import ScaledConv2d, ScaledLinear
from fl_sim.params import Layout, layout_of

KINDS = ("conv", "pool", "ReLU", "linear", "norm", "add", "average", "dropout")
"""The kinds of layers. The index of a kind in this tuple is its number in kernel.cpp."""

_CONV, _POOL, _RELU, _LINEAR, _NORM, _ADD, _AVERAGE, _DROP = range(len(KINDS))
_KINDS: dict[type[nn.Module], int] = {
    nn.Conv2d: _CONV, nn.MaxPool2d: _POOL, nn.ReLU: _RELU, nn.Linear: _LINEAR, nn.GroupNorm: _NORM,
    nn.AdaptiveAvgPool2d: _AVERAGE, ScaledConv2d: _CONV, ScaledLinear: _LINEAR,
}  # fmt: skip
_HALVING = {"kernel_y": 2, "kernel_x": 2, "stride_y": 2, "stride_x": 2, "padding_y": 0, "padding_x": 0}
FIELDS = (
    "kind", "outputs", "kernel_y", "kernel_x", "stride_y", "stride_x", "padding_y", "padding_x", "bias", "relu",
    "pooled", "source", "other", "parts", "epsilon", "inputs", "dropout", "factor",
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MOST_OF_ONE_PIXEL, _MOST_OF_MANY = 300, 1400
"""Limits for the multiplications per output value of a convolution. Above them, PyTorch is faster than compiled code.

The first limit is for kernels of 1 pixel. The second limit is for kernels of more than 3 x 3 pixels.
``benchmarks/large_layers.py`` measures these limits. The compiled code is never slower for 3 x 3 convolutions and for
linear layers.
"""


@dataclass(frozen=True)
class Stack:
    """The layers of a model as arrays of integers, which the compiled trainer (kernel) reads.

    ``layers``: int32, (layers, 18), one row per layer with the columns ``FIELDS``. ``input_shape``: int32, (3,),
    either (channels, height, width) or (features, 1, 1). ``layout``: the names and shapes of the parameters, in
    their order in memory.
    """

    layers: NDArray[np.int32]
    input_shape: NDArray[np.int32]
    layout: Layout

    @cached_property
    def pointers(self) -> tuple[int, int]:
        """Return the memory addresses of ``layers`` and ``input_shape``."""
        return int(self.layers.ctypes.data), int(self.input_shape.ctypes.data)

    @property
    def num_classes(self) -> int:
        """Return the number of classes, that is the number of outputs of the last layer."""
        return int(self.layers[-1, FIELDS.index("outputs")])

    @property
    def num_features(self) -> int:
        """Return the number of inputs of the last layer."""
        return int(self.layers[-1, FIELDS.index("inputs")])

    @cached_property
    def is_piecewise_linear(self) -> bool:
        """Return True if the model has no normalisation layer.

        Then all layers are piecewise linear. For such models the compiled trainer can compute the second derivatives
        that FedMix needs.
        """
        return not bool((self.layers[:, 0] == _NORM).any())


def describe(model: nn.Module, input_shape: tuple[int, ...]) -> Stack | None:
    """Return the description of ``model`` for the compiled trainer.

    Return None if the compiled trainer does not support the model. Supported are Conv2d, GroupNorm, MaxPool2d,
    AdaptiveAvgPool2d(1), ReLU, Dropout, Flatten, Linear and our ResidualBlock in (nested) Sequential. The last layer
    must be Linear. Shared parameters and hooks are not supported. The description does not say which parameters are
    frozen. ``input_shape``: the shape of one record, (channels, height, width) or (features,).
    """
    rows = _Rows(is_flat=len(input_shape) == 1)
    is_known = _add(rows, model) and bool(rows.rows)
    last = rows.rows[-1] if is_known else {}
    ends_linear = last.get("kind") == _LINEAR and not last.keys() & {"relu", "dropout", "factor"}
    if not ends_linear or len(set(rows.seen)) < len(rows.seen) or not _plain_parameters(model):
        return None
    return Stack(
        np.array([[row.get(field, 0) for field in FIELDS] for row in rows.rows], dtype=np.int32),
        np.array((*input_shape, 1, 1)[:3], dtype=np.int32),
        layout_of(dict(model.named_parameters())),
    )


def rows_of(stack: Stack) -> list[dict[str, int]]:
    """Return the description of each layer as a dictionary, {field name: number}. The names are in ``FIELDS``."""
    return [dict(zip(FIELDS, numbers, strict=True)) for numbers in stack.layers.tolist()]


def shapes_of(stack: Stack) -> list[tuple[int, int, int]]:
    """Return shapes (channels, height, width): of the model's input, and of the output of every layer."""
    shapes = [(int(stack.input_shape[0]), int(stack.input_shape[1]), int(stack.input_shape[2]))]
    for row in rows_of(stack):
        channels, height, width = shapes[row["source"]]
        kind = KINDS[row["kind"]]
        if kind in ("linear", "average"):
            height = width = 1
        if kind in ("linear", "conv"):
            channels = row["outputs"]
        if kind in ("conv", "pool"):
            height = (height + 2 * row["padding_y"] - row["kernel_y"]) // row["stride_y"] + 1
            width = (width + 2 * row["padding_x"] - row["kernel_x"]) // row["stride_x"] + 1
        halves = 1 + row["pooled"]
        shapes.append((channels, height // halves, width // halves))
    return shapes


def products_in_output(row: dict[str, int]) -> int:
    """Return the number of multiplications that a layer needs for one number of its output.

    The result is 0 for layers other than convolutions and linear layers.
    """
    if KINDS[row["kind"]] not in ("conv", "linear"):
        return 0
    return row["inputs"] * max(1, row["kernel_y"] * row["kernel_x"])


def products_of(stack: Stack) -> list[int]:
    """Return, for every layer, the number of multiplications in the forward pass of one record."""
    return [
        products_in_output(row) * channels * height * width * (4 if row["pooled"] else 1)
        for row, (channels, height, width) in zip(rows_of(stack), shapes_of(stack)[1:], strict=True)
    ]


def slower_here(stack: Stack) -> str:
    """Return the reason why PyTorch trains a model faster than the compiled trainer; empty if PyTorch is slower.

    The only possible reason is large convolutions: PyTorch is faster if at least half of the model's multiplications
    are in large convolutions.
    """
    products, slow = products_of(stack), dict[int, dict[str, int]]()
    for index, row in enumerate(rows_of(stack)):
        side = max(row["kernel_y"], row["kernel_x"])
        most = _MOST_OF_ONE_PIXEL if side == 1 else _MOST_OF_MANY
        if KINDS[row["kind"]] == "conv" and side not in (2, 3) and products_in_output(row) > most:
            slow[index] = row
    if not slow or 2 * sum(products[index] for index in slow) < sum(products):
        return ""
    row = slow[max(slow, key=lambda index: products[index])]
    return (
        f"convolutions of {row['kernel_y']}x{row['kernel_x']} pixels and {row['inputs']} channels, "
        "which PyTorch computes faster"
    )


@dataclass
class _Rows:
    """Collects the descriptions of a model's layers as rows, one per layer. Two layers may be fused to one row.

    Inputs and outputs of layers are called nodes: node 0 is the model's input, and node i + 1 is the output of row i.
    The ``source`` of a row is the node that it reads. ``node``: the input of the next layer. ``is_flat``: True if this
    node is a vector, without height and width. ``is_fork``: True if other layers also read this node. The next layer
    then cannot be fused with the row that computes the node. ``seen``: the ids of all modules so far.
    """

    is_flat: bool
    rows: list[dict[str, int]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    node: int = 0
    is_fork: bool = True

    def append(self, row: dict[str, int]) -> None:
        """Add a layer as a new row, or include it in the previous row.

        It is included in the previous row if the compiled trainer computes both layers together: a ReLU, and 2 x 2
        pooling after a convolution.

        ReLU and max pooling can be exchanged, because the maximum of rectified numbers equals the rectified maximum.
        """
        last = {"kind": _RELU} if self.is_fork else self.rows[-1]
        halves = row["kind"] == _POOL and row.items() >= _HALVING.items()
        if row["kind"] == _RELU and not self.is_fork and last["kind"] != _AVERAGE:
            last["relu"] = 1
        elif halves and last["kind"] == _CONV and not last.keys() & {"pooled", "dropout"}:
            last["pooled"] = 1
        else:
            self.rows.append({"source": self.node} | row)
            self.node, self.is_fork = len(self.rows), False

    def drop(self, probability: float) -> bool:
        """Add dropout to the row of the previous layer, or as a new row if other layers also read that row's output.

        Returns False for dropout that the compiled trainer does not support: a second dropout of the same output, or
        probability 1.
        """
        if not probability:
            return True
        if self.is_fork:
            self.append({"kind": _DROP})
        is_known = np.float32(probability) < 1 and "dropout" not in self.rows[-1]
        self.rows[-1]["dropout"] = _bits(probability)
        return bool(is_known)

    def fork(self, node: int) -> None:
        """Begin a branch of the network: the next layer reads ``node``, which another layer also reads."""
        self.node, self.is_fork = node, True


def _add(rows: _Rows, module: nn.Module) -> bool:
    """Add the layers of ``module`` to ``rows``, the descriptions of the model's layers.

    Return True if the compiled trainer supports all these layers.
    """
    if any(getattr(module, hooks) for hooks in _HOOKS) or "forward" in vars(module):
        return False
    if type(module) is nn.Sequential:
        return all(_add(rows, child) for child in module)
    if type(module) is ResidualBlock:
        return _add_block(rows, module)
    rows.seen.append(id(module))
    if type(module) is nn.Flatten:
        rows.is_flat = True
        return (module.start_dim, module.end_dim) == (1, -1)
    if type(module) is nn.Dropout:
        return rows.drop(module.p)
    wants_flat = {nn.Linear: True, ScaledLinear: True, nn.ReLU: rows.is_flat}.get(type(module), False)
    row = _row(module) if wants_flat == rows.is_flat else None
    if row is not None:
        rows.append(row)
    return row is not None


def _add_block(rows: _Rows, block: ResidualBlock) -> bool:
    start = rows.node
    rows.fork(start)
    known = not rows.is_flat and _add(rows, block.body)
    end = rows.node
    rows.fork(start)
    known = known and (type(block.shortcut) is nn.Identity or _add(rows, block.shortcut))
    rows.append({"kind": _ADD, "source": end, "other": rows.node, "relu": 1})
    return known and not rows.is_flat


def _row(module: nn.Module) -> dict[str, int] | None:
    """Return the description of a layer as a row of integers.

    Return None if the compiled trainer does not support the layer or its settings.
    """
    kind = _KINDS.get(type(module))
    if kind is None:
        return None
    row, is_known = {"kind": kind}, True
    if isinstance(module, nn.Linear):
        row |= {"inputs": module.in_features, "outputs": module.out_features, "bias": module.bias is not None}
    elif isinstance(module, nn.AdaptiveAvgPool2d):
        is_known = module.output_size in (1, (1, 1))
    elif isinstance(module, nn.GroupNorm):
        row |= {"inputs": module.num_channels, "parts": module.num_groups, "epsilon": _bits(module.eps), "bias": 1}
        is_known = module.affine
    elif isinstance(module, nn.Conv2d):
        row |= {"inputs": module.in_channels, "outputs": module.out_channels, "bias": module.bias is not None}
        is_known = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        is_known = is_known and _add_window(row, module)
    elif isinstance(module, nn.MaxPool2d):
        is_known = not module.ceil_mode and not module.return_indices and _add_window(row, module)
    if isinstance(module, ScaledLinear | ScaledConv2d) and module.factor != 1:
        row["factor"] = _bits(module.factor)
    return row if is_known else None


def _bits(number: float) -> int:
    """Return the bits of a float32 number as an integer. All fields of a layer's description are integers."""
    return int(np.float32(number).view(np.int32))


def _add_window(row: dict[str, int], window: nn.Conv2d | nn.MaxPool2d) -> bool:
    """Add kernel size, stride and padding of a convolution or pooling layer to its description ``row``.

    Return False if the compiled trainer does not support the layer's dilation or padding.
    """
    for name in ("kernel_size", "stride", "padding", "dilation"):
        value, short = getattr(window, name), name.removesuffix("_size")
        row[f"{short}_y"], row[f"{short}_x"] = value if isinstance(value, tuple) else (value, value)
    for axis in ("y", "x"):
        kernel = row[f"kernel_{axis}"]
        most = kernel // 2 if row["kind"] == _POOL else kernel - 1
        if row[f"dilation_{axis}"] != 1 or row[f"padding_{axis}"] > most:
            return False
    return True


def _plain_parameters(model: nn.Module) -> bool:
    parameters = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    # the compiled trainer supports no buffers, and no parameters that several layers share
    if len(parameters) > len(list(model.parameters())) or any(True for _ in model.buffers()):
        return False
    return all(
        type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
        for weight in parameters
    )
