"""Models with exits: a classifier after each block. A client may then have a smaller model: only the first blocks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.types import Params

_SIDE = 4
"""The smallest number of pixels per side to which an exit pools images."""


class MeanOfExits(nn.Module):
    """The head of a model with exits. Its input is the logits of all exits."""

    draws_random_numbers = False

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Map (batch, exits, classes) to the mean over the exits, (batch, classes)."""
        return logits.mean(1)


class WithExits(nn.Module):
    """A model with a classifier (exit) after each of its blocks. Its logits are the mean of the logits of all exits.

    ``blocks``: each block receives the output of the block before it. ``exits``: exit i maps the output of block i to
    logits. A user's own model function may return such a model, too.
    """

    draws_random_numbers = False

    def __init__(self, blocks: Sequence[nn.Module], exits: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.exits = nn.ModuleList(exits)
        self.head = MeanOfExits()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, *input_shape) to (batch, classes)."""
        logits = list[torch.Tensor]()
        for block, leave in zip(self.blocks, self.exits, strict=True):
            inputs = block(inputs)
            logits.append(leave(inputs))
        mean: torch.Tensor = self.head(torch.stack(logits, dim=1))
        return mean

    def first(self, depth: int | None) -> WithExits:
        """Return a copy of this model that has only the first ``depth`` blocks and their exits; None: all blocks.

        Raises UserError if the model has fewer blocks.
        """
        if depth is not None and depth > (most := len(self.blocks)):
            raise UserError(
                f"a client of depth {depth} needs {depth} blocks, and this model has {most}: give depths of at most "
                f"{most}, or use a deeper model"
            )
        return WithExits(*(copy.deepcopy([*parts][:depth]) for parts in (self.blocks, self.exits)))


def with_exits(model: nn.Module, input_shape: tuple[int, ...]) -> WithExits:
    """Return ``model`` with an exit after each of its blocks. The weights of new exits are drawn by torch's generators.

    ``model``: an nn.Sequential that ends in an nn.Linear, which becomes the last exit. If some of its layers consist of
    other layers, such as a ResNet's residual blocks, each such layer is a block. Otherwise each layer with a weight
    matrix is a block. Layers between two blocks belong to the earlier block. Layers before the first block belong to
    the first block. Each new exit is one linear layer; input images are first pooled to 4 to 7 pixels per side. A
    ``WithExits`` is returned unchanged. ``input_shape``: the shape of one record. Raises UserError for any other model,
    and for a model of fewer than two blocks.
    """
    if isinstance(model, WithExits):
        return model
    layers = [*model] if type(model) is nn.Sequential else []
    if not layers or not isinstance(layers[-1], nn.Linear):
        raise UserError(
            f"exits cannot be added to a {type(model).__name__}: possible is an nn.Sequential whose last layer is an "
            "nn.Linear, or a model of the class fl_sim.exits.WithExits; use resnet, niid-cnn, dafl-cnn, mlp, 2nn or "
            "niid-mlp"
        )
    *body, last = layers
    weighted = [place for place, layer in enumerate(body) if any(one.ndim > 1 for one in layer.parameters())]
    starts = [place for place in weighted if any(True for _ in body[place].children())] or weighted
    if len(starts) < 2:
        raise UserError(
            "exits need a model of two blocks or more, and this model has no layer between its first block and its "
            "last layer: use a deeper model, such as mlp"
        )
    blocks = [nn.Sequential(*body[start:end]) for start, end in pairwise((0, *starts[1:], len(body)))]
    exits, outputs = list[nn.Module](), torch.zeros(1, *input_shape)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for block in blocks[:-1]:
            outputs = block(outputs)
            sides = tuple(max(1, side // _SIDE) for side in outputs.shape[2:])
            flat = nn.Sequential(nn.AvgPool2d(sides), nn.Flatten()) if len(sides) == 2 else nn.Sequential(nn.Flatten())
            exits.append(nn.Sequential(*flat, nn.Linear(flat(outputs).shape[1], last.out_features)))
    return WithExits(blocks, [*exits, nn.Sequential(last)]).train(was_training)


def num_exits(names: Collection[str]) -> int:
    """Return the number of exits of a ``WithExits``. ``names``: the names of its parameters."""
    return len({name.split(".")[1] for name in names if name.startswith("exits.")})


def first_blocks(params: Params, depth: int) -> Params:
    """Return the parameters of the first ``depth`` blocks and of their exits (no copies).

    ``params``: the parameters of a ``WithExits``.
    """
    return {name: value for name, value in params.items() if int(name.split(".")[1]) < depth}
