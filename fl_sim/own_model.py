"""The user's own model, ``model=package.module:factory``: built, tried on two records, and refused in words."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fl_sim.errors import UserError
from fl_sim.own_code import in_one_line, load_object, with_place
from fl_sim.running_statistics import running_in
from fl_sim.seeding import process_alone, seed_process
from fl_sim.sequences import tokens_like
from fl_sim.types import BatchNorm

_CURE = (
    "draw from the global generators of torch, NumPy or Python, which are seeded for it, not from one that seeds "
    "itself or goes on from call to call"
)

_REPEATED: set[tuple[str, Any]] = set()
"""Models that were found to be the same when made twice."""

WANTED = "a function of (input_shape, num_classes) that returns a fresh torch.nn.Module"


def build_own(
    path: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    batch_norm: BatchNorm = "none",
    vocabulary: int = 0,
    trial: torch.Tensor | None = None,
) -> nn.Module:
    """Return what the factory at the import path ``path`` makes; its initial weights depend on ``seed`` alone.

    ``vocabulary``: above 0, records are sequences of tokens below it. ``trial``: two records of the data set, as models
    see them, to try the model on: ids and categories among them are such (None: random numbers, or tokens).

    Raises UserError, which says which model and what is wanted, for a factory that fails, for anything but a module
    that makes (n, classes) float32 logits of (n, *input_shape) float32 records, has float32 parameters of known sizes
    some of which are trained, and whose buffers, if any, are the same at all times: they are not averaged. Running
    statistics of BatchNorm layers are, where ``batch_norm`` says so.
    """
    factory = _factory(path)
    with process_alone():
        model = _made(path, factory, input_shape, num_classes, seed)
        _check_parameters(path, model)
        _check_repeats(path, model, partial(_made, path, factory, input_shape, num_classes, seed))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        trial = _random_records(input_shape, vocabulary) if trial is None else trial
        logits = _checked_logits(path, model, num_classes, trial)
        if before:
            _check_buffers(path, model, before, batch_norm)
            _check_drawn(path, before, _made(path, factory, input_shape, num_classes, seed + 1))
        _check_same_logits(path, logits, _logits(path, model, trial))
        with torch.no_grad():
            for name, buffer in running_in(model).items():  # which the trial has changed
                buffer.copy_(before[name])
    return model


def _factory(path: str) -> Callable[..., Any]:
    found: Any = load_object(path, "model")
    if isinstance(found, nn.Module) or not callable(found):
        raise UserError(f"model {path!r} is {in_one_line(repr(found))}, not {WANTED}")
    factory: Callable[..., Any] = found
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some that are written in C have none
        return factory
    try:
        signature.bind((), 0)
    except TypeError as error:
        raise UserError(f"model {path!r} takes {in_one_line(str(signature))}, but must be {WANTED}") from error
    return factory


def _made(
    path: str, factory: Callable[..., Any], input_shape: tuple[int, ...], num_classes: int, seed: int
) -> nn.Module:
    seed_process(seed, "model")
    try:
        model = factory(input_shape, num_classes)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"model {path!r} failed when it was called with ({input_shape}, {num_classes}): {with_place(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {path!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _check_parameters(path: str, model: nn.Module) -> None:
    named = dict(model.named_parameters())
    if not any(weight.requires_grad for weight in named.values()):
        has = "only frozen parameters (requires_grad=False)" if named else "no parameters"
        raise UserError(f"model {path!r} has {has}: there is nothing to train")
    if lazy := [name for name, value in (*named.items(), *model.named_buffers()) if is_lazy(value)]:
        raise UserError(
            f"model {path!r} leaves sizes open until the first batch ({lazy[0]}): give them, such as nn.Linear instead "
            "of nn.LazyLinear, from input_shape"
        )
    if other := [(name, weight.dtype) for name, weight in named.items() if weight.dtype != torch.float32]:
        name, dtype = other[0]
        raise UserError(
            f"model {path!r} holds {str(dtype).removeprefix('torch.')} parameters ({name}): they must be float32; "
            "local.precision chooses what products are computed in"
        )


def _random_records(input_shape: tuple[int, ...], vocabulary: int) -> torch.Tensor:
    if vocabulary:
        return tokens_like(input_shape, vocabulary)
    return torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0))


def _check_repeats(path: str, model: nn.Module, again: Callable[[], nn.Module]) -> None:
    """Raise UserError for a model that is another one when it is made ``again`` of the same seed; asked once."""
    if (path, load_object(path, "model")) in _REPEATED:
        return
    first, second = model.state_dict(), again().state_dict()
    if other := [name for name, value in first.items() if name not in second or not torch.equal(value, second[name])]:
        raise UserError(
            f"model {path!r} is another one each time it is made of the same seed ({other[0]} differs): {_CURE}"
        )
    _REPEATED.add((path, load_object(path, "model")))


def _logits(path: str, model: nn.Module, trial: torch.Tensor) -> Any:
    """Return what the model makes of two records while it trains, always by the same draws."""
    records, shape = trial.to(next(model.parameters()).device), tuple(trial.shape[1:])
    was_training = model.training
    try:
        seed_process(0, "trial")
        return model.train()(records)
    except (Exception, SystemExit) as error:
        raise UserError(f"model {path!r} cannot take records of shape {shape}: {with_place(error)}") from error
    finally:
        model.train(was_training)


def _checked_logits(path: str, model: nn.Module, num_classes: int, trial: torch.Tensor) -> torch.Tensor:
    logits = _logits(path, model, trial)
    if not isinstance(logits, torch.Tensor):
        raise UserError(
            f"model {path!r} makes {type(logits).__name__} of a batch, not a tensor of logits: return these alone"
        )
    if tuple(logits.shape) != (2, num_classes) or logits.dtype != torch.float32:
        raise UserError(
            f"model {path!r} makes {str(logits.dtype).removeprefix('torch.')} of shape {tuple(logits.shape)} of 2 "
            f"records, not float32 logits of shape (2, {num_classes})"
        )
    if not logits.requires_grad:
        raise UserError(
            f"model {path!r} makes logits that depend on none of its trained parameters: is there a torch.no_grad or a "
            "detach in its forward?"
        )
    return logits


def _check_same_logits(path: str, logits: torch.Tensor, second: torch.Tensor) -> None:
    """Raise UserError for logits that are others the second time, after buffers were checked: these tell more."""
    if not torch.equal(logits, second):
        raise UserError(
            f"model {path!r} makes other logits of the same records the second time, with the generators of torch, "
            f"NumPy and Python seeded alike: {_CURE}"
        )


def _check_buffers(path: str, model: nn.Module, before: dict[str, torch.Tensor], batch_norm: BatchNorm) -> None:
    """Raise UserError for buffers that a forward pass has changed since ``before`` and that are not averaged."""
    running = running_in(model)
    for name, buffer in model.named_buffers():
        if (name in before and torch.equal(buffer, before[name])) or (name in running and batch_norm != "none"):
            continue
        if name in running:
            raise UserError(
                f"model {path!r} keeps running statistics ({name}), which federated averaging would lose: say what "
                "becomes of them with local.batch_norm=average or personal, or use nn.GroupNorm, or a norm with "
                "track_running_stats=False"
            )
        raise UserError(
            f"model {path!r} keeps running statistics ({name}), which federated averaging would lose: of layers with "
            "such fl-sim knows those of nn.BatchNorm alone; use a norm without them, such as nn.GroupNorm"
        )


def _check_drawn(path: str, before: dict[str, torch.Tensor], other: nn.Module) -> None:
    """Raise UserError for buffers that are not as ``before`` in a model of another seed."""
    for name, buffer in other.named_buffers():
        if name not in before or not torch.equal(buffer, before[name]):
            raise UserError(
                f"model {path!r} draws the buffer {name} at random, and buffers are not sent to clients: make it an "
                "nn.Parameter with requires_grad=False"
            )
