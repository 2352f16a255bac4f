"""The setting ``model.trainable``: the parameters of a model that are trained and sent.

All other parameters are frozen. A frozen parameter has ``requires_grad=False`` and keeps its initial value. Every
process creates or loads this value itself. A frozen parameter is never sent, aggregated, clipped or noised
(``fl_sim.params.trainable``).
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from fl_sim.adapters import LORA, SCALE, adapt, merged, without_adapters
from fl_sim.errors import UserError
from fl_sim.mistakes import guess, shortened
from fl_sim.params import all_norms_in, fixed_in, num_parameters, trainable
from fl_sim.settings import TRAINABLE
from fl_sim.types import Params

_MOST_NAMES: Final = 20
"""The largest number of names that an error message lists."""


@dataclass(frozen=True)
class TrainedPart:
    """The part of a model that is trained, from the settings in the group ``model``.

    ``trainable``: words such as ``head``, or names of parameters or modules, separated by commas. ``rank``, ``alpha``,
    ``dropout`` and ``target_modules`` (names separated by commas) are settings of adapters (``fl_sim.adapters``).
    ``seed``: the seed of the adapters' initial values.
    """

    trainable: str = "all"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    seed: int = 0
    target_modules: str = ""

    def __call__(self, model: nn.Module) -> None:
        """Add the adapters of the settings to ``model``, then freeze all parameters that are not trained.

        BatchNorm layers without a trained parameter stay in evaluation mode, so their running statistics never change.
        If only the head is trained, all layers outside the head stay in evaluation mode, without dropout. So the
        features of a record are always the same. Raises UserError for names that the model does not have, and if no
        parameter would be trained.
        """
        if self.trainable == "all":
            return
        words = self.trainable.split(",")
        chosen = {name for word in words if word != LORA for name in _named_by(word, model)}
        if LORA in words:
            if not any(_is_adapter(name) for name in trainable(model)):
                targets = self.target_modules.split(",") if self.target_modules else ()
                adapt(model, self.rank, self.alpha, self.dropout, self.seed, targets=targets, without=chosen)
            chosen |= {name for name in trainable(model) if _is_adapter(name)}
        if not chosen:
            raise UserError(
                f"model.trainable={self.trainable} leaves nothing to train in this model: {_has(trainable(model))}; "
                f"set it to another of {', '.join(TRAINABLE)}, or to names of parameters or modules"
            )
        _freeze_all_but(chosen, model)
        for layer in all_norms_in(model).values():
            if not trainable(layer):
                _stay_in_evaluation(layer)
        for part in _body_of_trained_head(model):
            _stay_in_evaluation(part)
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # the compiled trainer reads the dropout rate, but ignores the evaluation mode

    def in_words(self, model: nn.Module) -> str:
        """Return a sentence with the numbers of trained and of all parameters of ``model``.

        The parameters must already be frozen by a call of this object.
        """
        named = {name: weight for name, weight in model.named_parameters() if not name.endswith(SCALE)}
        sizes = [num_parameters(part) for part in (trainable(model), named)]
        return (
            f"model.trainable={self.trainable} trains {sizes[0]:,} of {sizes[1]:,} parameters: all other parameters "
            "are never sent, clipped or noised"
        )


def whole(model: nn.Module, params: Params) -> Params:
    """Return all parameters of ``model`` with merged adapters: the weight of an adapted layer is W + (alpha / r) B A.

    ``params``: the trained parameters, including those of adapters. The values of all other parameters come from
    ``model``.
    """
    return merged(model, {**fixed_in(model), **params})


def as_made(model: nn.Module) -> nn.Module:
    """Merge all adapters into the weights of ``model``, in place, and return ``model``.

    The outputs of the model do not change.
    """
    return without_adapters(model)


def train_alone(model: nn.Module, names_of: Callable[[list[str], list[str]], Collection[str]]) -> None:
    """Freeze all parameters of ``model`` in place, except the parameters whose names ``names_of`` returns.

    ``names_of``: a function of the algorithm. It receives the names of the trained parameters, and the names of all
    other parameters. Raises UserError if the function raises ValueError, or returns an unknown name or no name.
    """
    named, trained = dict(model.named_parameters()), trainable(model)
    try:
        chosen = {*names_of(list(trained), [name for name in named if name not in trained])}
    except ValueError as error:
        raise UserError(str(error)) from error
    if not chosen or chosen - named.keys():
        wrong = f"{', '.join(sorted(chosen - named.keys())) or 'no name'}"
        raise UserError(f"the algorithm trains {wrong}, but the model has {', '.join(named)}: name some of these")
    _freeze_all_but(chosen, model)


def head_of(model: nn.Module) -> nn.Module:
    """Return the head: the module whose input is the features.

    The head is ``model.head`` if it exists, else the last nn.Linear. Raises UserError if the model has neither.
    """
    head = getattr(model, "head", None)
    if isinstance(head, nn.Module):
        return head
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(
            "the algorithm needs features, the inputs of a model's last linear layer, but "
            f"{type(model).__name__} has none: set self.head to the module that computes logits from features, or "
            "choose another model"
        )
    return linear[-1]


def _named_by(word: str, model: nn.Module) -> set[str]:
    """Return the names of the parameters of ``model`` that ``word``, one entry of model.trainable, selects."""
    named = trainable(model)
    if word == "all":
        return {*named}
    if word == "head":
        return _inside(named, head_of(model))
    if word == "bias":
        return {name for name in named if name.rpartition(".")[2].startswith("bias")}
    if word == "norm":
        return {name for part in model.modules() if _is_norm(part) for name in _inside(named, part)}
    if number := re.fullmatch(r"last:([1-9]\d{0,5})", word):
        layers = [
            part for part in model.modules() if any(weight.requires_grad for weight in part.parameters(recurse=False))
        ]
        if int(number[1]) > len(layers):
            raise UserError(
                f"model.trainable={word}: this model has {len(layers)} layers with trained parameters: give at most "
                "this number"
            )
        last = {id(weight) for part in layers[-int(number[1]) :] for weight in part.parameters(recurse=False)}
        return {name for name, weight in named.items() if id(weight) in last}
    if found := {name for name in named if name == word or name.startswith(f"{word}.")}:
        return found
    raise UserError(
        f"model.trainable names {shortened(word)!r}{guess(word, [*TRAINABLE, *named])}, and this model has no such "
        f"trained parameter or module: {_has(named)}; words are {', '.join(TRAINABLE)}"
    )


def _freeze_all_but(chosen: Collection[str], model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in chosen)


def _inside(named: Mapping[str, torch.Tensor], module: nn.Module) -> set[str]:
    inside = {id(weight) for weight in module.parameters()}
    return {name for name, weight in named.items() if id(weight) in inside}


def _body_of_trained_head(model: nn.Module) -> list[nn.Module]:
    """Return the modules that do not overlap with the head, if only the head is trained; else an empty list."""
    try:
        inside = {id(part) for part in head_of(model).modules()}
    except UserError:
        return []
    outside = [part for part in model.modules() if inside.isdisjoint(map(id, part.modules()))]
    in_head = {id(weight) for weight in head_of(model).parameters()}
    return outside if all(id(weight) in in_head for weight in trainable(model).values()) else []


def _stay_in_evaluation(layer: nn.Module) -> None:
    """Put ``layer`` into evaluation mode permanently: later calls of ``train`` do not change the mode."""
    layer.eval()
    layer.train = _stays  # type: ignore[method-assign,assignment]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _is_adapter(name: str) -> bool:
    return f"{LORA}_" in name


def _has(named: Mapping[str, torch.Tensor]) -> str:
    names = list(named)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"it trains {', '.join(names[:_MOST_NAMES])}{more}" if names else "it trains no parameter"


def _stays(mode: bool = True) -> None:  # noqa: FBT001, FBT002 (torch's own)
    """Do nothing: this function replaces ``train`` of a frozen layer that stays in evaluation mode."""
