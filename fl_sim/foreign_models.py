"""Models of other libraries: their sources by name, and the form of their inputs and outputs.

fl-sim passes one tensor of records to a model, and expects one tensor of logits. A model of the library transformers
has two inputs, token ids and a mask, and returns several named tensors. PyTorch hooks convert inputs and outputs, so
the model's code, names and weights need no change.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.mistakes import shortened
from fl_sim.one_of import find_entry_point, load_entry_point
from fl_sim.token_models import trimmed
from fl_sim.types import Params

Shape: TypeAlias = tuple[int, ...]

SOURCES: Final = "fl_sim.model"
"""The group of Python entry points in which packages list their sources of architectures (``ModelSource``)."""


class ModelSource(Protocol):
    """A source of architectures by name, such as torchvision for ``torchvision:resnet18``.

    An entry point in the group ``SOURCES`` (a constant of this module) defines the name of the source, and a class. The
    class is called with the name of an architecture, such as "resnet18".
    """

    def build(self, input_shape: Shape, num_classes: int, vocabulary: int) -> nn.Module:
        """Return the model with random weights. Raises UserError for an unknown name and for unsupported records.

        ``vocabulary``: the number of different tokens in records of tokens, padding included; 0 for other records.
        """
        ...

    def files(self) -> tuple[Path, ...]:
        """Return the paths of the files with the model's own weights; empty if the model has random weights.

        A run stores a digest of these files, to detect later changes.
        """
        ...

    def weights(self) -> Params:
        """Return the model's own weights, such as pretrained weights, under the names of its parameters.

        The result is empty if the model has random weights.
        """
        ...

    def note(self, input_shape: Shape, vocabulary: int) -> str:
        """Return a warning for the user about this model with records of ``input_shape``; empty if there is none.

        ``vocabulary``: the number of different tokens in the records, as for the method ``build``.
        """
        ...


def source_of(name: str) -> ModelSource | None:
    """Return the source of the architecture ``name``, such as ``torchvision:resnet18``; None for all other models.

    Raises UserError if two packages define sources of the same name.
    """
    kind, colon, place = name.partition(":")
    point = find_entry_point(SOURCES, kind) if colon else None
    if point is None:
        return None
    source: ModelSource = load_entry_point(point)(place)
    return source


def take_tokens(path: str, model: nn.Module, length: int, vocabulary: int) -> None:
    """Add a hook that converts records of tokens to ids and an attention mask, if the model takes ``input_ids``.

    ``path``: the model's name in messages. ``length``: the number of tokens of a record. ``vocabulary``: the number of
    different tokens, padding included. Raises UserError as ``check_tokens`` does.
    """
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        return
    check_tokens(path, model, length, vocabulary)
    model.register_forward_pre_hook(_Ids(_padding(model), "attention_mask" in parameters), with_kwargs=True)


def take_logits(path: str, model: nn.Module, output: Any, num_classes: int) -> Any:
    """Return the logits in ``output``, and change the model so that it returns only the logits.

    ``path``: the model's name in messages. ``output``: the output of the model for two records. Raises UserError if
    none or several of the tensors in ``output`` may be the logits; the message names all tensors.
    """
    parts = _parts(output)
    if not parts:
        return output
    fits = [name for name, value in parts.items() if _are_logits(value, num_classes)]
    chosen: str | int | None = "logits" if "logits" in fits else fits[0] if len(fits) == 1 else None
    if chosen is None:
        said = ", ".join(f"{name}: {_shape(value)}" for name, value in parts.items())
        raise UserError(
            f"model {path!r} returns {type(output).__name__} for a batch ({shortened(said)}), and "
            f"{'several of them' if fits else 'none of them'} can be the logits of shape (2, {num_classes}): return "
            "only the logits, or give them the name 'logits'"
        )
    hook = _Logits(chosen)
    model.register_forward_hook(hook)
    return hook(model, (), output)


def check_tokens(path: str, model: nn.Module, length: int, vocabulary: int) -> None:
    """Raise UserError if records are too long for a model of transformers, or have tokens outside of its vocabulary.

    ``path``, ``length``, ``vocabulary``: as for ``take_tokens``.
    """
    config = getattr(model, "config", None)
    known, most = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    count = vocabulary - (0 if _padding(model) == 0 else 1)
    if isinstance(known, int) and count > known:
        raise UserError(
            f"model {path!r} has a vocabulary of {known:,} tokens, and the data have {count:,}: the tokenizer does not "
            "fit; use the model's own tokenizer by data.tokenizer=PATH"
        )
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            # the positions of a RoBERTa model begin at padding_idx + 1
            most = table.num_embeddings - table.padding_idx - 1
    if isinstance(most, int) and length > most:
        raise UserError(
            f"model {path!r} has {most:,} positions, and the records have {length:,} tokens: set data.max_length={most}"
        )


@dataclass(frozen=True)
class _Ids:
    """A PyTorch hook that converts records of tokens to ids and an attention mask (1: token, 0: padding).

    ``padding``: the model's id for padding; None if it has none. Records use 0 for padding. If the model's id for
    padding is 0, too, ids and tokens are equal. Otherwise token i + 1 of a record becomes id i (fl_sim.data.tokens).
    ``has_mask``: True if the model takes a mask. In this case, the hook also cuts the batch to the length of its
    longest record.
    """

    padding: int | None
    has_mask: bool

    def __call__(self, model: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        del model
        if not given:  # only the model's own code passes no positional arguments: such a call stays unchanged
            return given, named
        tokens = trimmed(given[0].long()) if self.has_mask else given[0].long()
        ids = tokens if self.padding == 0 else torch.where(tokens == 0, self.padding or 0, tokens - 1)
        mask = {"attention_mask": (tokens != 0).long()} if self.has_mask else {}
        return given[1:], {**named, "input_ids": ids, **mask}


@dataclass(frozen=True)
class _Logits:
    """A PyTorch hook that replaces a model's output by the logits in this output.

    ``name``: the name or the index under which the output contains the logits.
    """

    name: str | int

    def __call__(self, model: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        del model, given
        return _parts(output)[self.name] if not isinstance(output, torch.Tensor) else output


def _parts(output: Any) -> dict[str | int, Any]:
    """Return the values in ``output``, a model's mapping, list or tuple, as {name or index: value}.

    For any other output, the result is empty.
    """
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return dict(output._asdict())
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {}


def _are_logits(value: Any, num_classes: int) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and tuple(value.shape) == (2, num_classes)


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _padding(model: nn.Module) -> int | None:
    """Return the token id that ``model`` uses for padding; 0 for a model without a configuration."""
    config = getattr(model, "config", None)
    return 0 if config is None else getattr(config, "pad_token_id", None)
