"""Functions that build fl-sim's models for an input shape and a number of classes, and that check the user's models."""

import inspect
import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fl_sim.errors import UserError
from fl_sim.foreign_models import source_of, take_logits, take_tokens
from fl_sim.own_code import in_one_line, load_object, with_place
from fl_sim.own_loss import OwnLoss
from fl_sim.params import all_norms_in, norms_in, running_in
from fl_sim.seeding import process_alone, seed_process, seed_torch, torch_alone
from fl_sim.settings import GRU, TOKEN_NAMES, known_model
from fl_sim.token_models import TOKEN_MODELS
from fl_sim.types import BatchNorm

Shape: TypeAlias = tuple[int, ...]
Factory: TypeAlias = Callable[[Shape, int], nn.Module]
Prepare: TypeAlias = Callable[[nn.Module], nn.Module]
"""A function that changes a new model, for example freezes parameters, and returns the model or a new model."""


def niid_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return NIID-Bench's CNN: conv5x5(6)-pool-conv5x5(16)-pool-120-84-classes (Li et al. 2022, section 5).

    The CNN has 44,426 parameters on images of 28x28x1. Images must have at least 16x16 pixels.
    """
    channels, height, width = _image(input_shape, "niid-cnn", 16)
    flat = 16 * math.prod(((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes),
    )  # fmt: skip


def niid_mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return NIID-Bench's perceptron for tables of numbers, with three hidden layers of 32, 16 and 8 units."""
    return _perceptron(input_shape, (32, 16, 8), num_classes)


def dafl_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return DA-FL's classifier: two 3x3 convolutions (32, 64 channels, padded) with pooling, and two linear layers.

    The paper states "2 conv + 2 FC" without sizes. Images need at least 4x4 pixels, so fl-sim's 8x8 digits fit.
    """
    channels, height, width = _image(input_shape, "dafl-cnn", 4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 128), nn.ReLU(), nn.Linear(128, num_classes),
    )  # fmt: skip


def mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return a perceptron with two hidden layers of 600 and 100 units (784-600-100-10 on MNIST)."""
    return _perceptron(input_shape, (600, 100), num_classes)


def two_nn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return the "2NN" of McMahan et al. 2017, section 3, with two hidden layers of 200 units. FedVLS uses it, too."""
    return _perceptron(input_shape, (200, 200), num_classes)


def logistic(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


class RandomFeatures(nn.Module):
    """Logistic regression on the input and on 2,000 random features: ReLU of frozen random projections of the input.

    The input of the model, d numbers, is scaled to the L2 norm sqrt(d). The m inputs of the head (the last layer) are
    scaled to the L2 norm sqrt(m). So the norm of the head's inputs is public, and these inputs depend on no other
    record. The projections are drawn from the seed of the model.
    """

    WIDTH: Final = 2000

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        size = math.prod(input_shape)
        self.directions = nn.Parameter(torch.randn(size, self.WIDTH) / math.sqrt(size), requires_grad=False)
        self.head = nn.Linear(size + self.WIDTH, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, *input_shape) to (batch, classes)."""
        unit = _to_root(inputs.flatten(1))
        # float64: the last bits of a product depend on the batch size, and rounding the product to float32 removes them
        random = torch.relu(unit.double() @ self.directions.double()).to(unit.dtype)
        logits: torch.Tensor = self.head(_to_root(torch.cat([unit, random], dim=1)))
        return logits


def _to_root(vectors: torch.Tensor) -> torch.Tensor:
    """Return ``vectors``, (n, d), with each row scaled to the L2 norm sqrt(d)."""
    return math.sqrt(vectors.shape[1]) * torch.nn.functional.normalize(vectors, dim=1)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm (Wu and He 2018) and a shortcut (basic block of He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.GroupNorm(8, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.GroupNorm(8, channels),
        )  # fmt: skip
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels_in, h, w) to (batch, channels, h / stride, w / stride)."""
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


def resnet(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return ResNet-8 (16, 32, 64 channels) with GroupNorm, which has no running statistics."""
    channels, _, _ = _image(input_shape, "resnet", 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU(),
        ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes),
    )  # fmt: skip


MODELS: dict[str, Factory] = {
    "niid-cnn": niid_cnn, "niid-mlp": niid_mlp, "dafl-cnn": dafl_cnn, "mlp": mlp, "2nn": two_nn, "logistic": logistic,
    "resnet": resnet, "random-features": RandomFeatures,
}  # fmt: skip


def default_model(input_shape: Shape, vocabulary: int = 0, *, has_labels: bool = True) -> str:
    """Return the name of the default model for records of ``input_shape``.

    Images get NIID-Bench's CNN. Images smaller than 16x16 pixels get DA-FL's CNN. Feature vectors get "mlp". Sequences
    of tokens get "gru", or "decoder" if they have no labels. ``vocabulary``: above 0 for sequences of tokens, and 0 for
    all other records.
    """
    if vocabulary:
        return GRU if has_labels else "decoder"
    if len(input_shape) != 3:
        return "mlp"
    return "niid-cnn" if min(input_shape[1:]) >= 16 else "dafl-cnn"


def build(
    name: str,
    input_shape: Shape,
    num_classes: int,
    seed: int,
    *,
    batch_norm: BatchNorm = "none",
    vocabulary: int = 0,
    trial: torch.Tensor | None = None,
    prepare: Prepare = lambda model: model,
) -> nn.Module:
    """Return the model called ``name``: a model of fl-sim, of a library (fl_sim.foreign_models), or of the user.

    Initial weights depend only on ``seed``. ``vocabulary``: if above 0, records are sequences of token ids below this
    number. ``trial``: two records, on which a model of the user or of a library is tested. ``prepare``: a function that
    changes the new model, and returns the model to use. A model of a library is tested only once for equal
    functions ``prepare`` (by ==), so equal functions must make the same change. Raises UserError for an unknown name,
    for a model that fails the test, and, if ``batch_norm`` is set, for a model without BatchNorm layers.
    """
    own = None
    if ":" in name:
        own = _build_own(name, input_shape, num_classes, seed, batch_norm, vocabulary, trial, prepare)
    if batch_norm != "none" and (own is None or not norms_in(own)):
        kept = own is not None and all_norms_in(own)
        has = "keeps all its BatchNorm layers in evaluation mode" if kept else "has no BatchNorm layers"
        raise UserError(f"model {name!r} {has}: leave local.batch_norm={batch_norm} out")
    if own is not None:
        return own
    if (known_model(name) in TOKEN_NAMES) != (vocabulary > 0):
        what = "these records are such sequences" if vocabulary else "these records are no such sequences"
        raise UserError(
            f"only the models {', '.join(TOKEN_NAMES)} are for sequences of tokens, and {what}: leave model out, or "
            "take a model for these records"
        )
    with torch_alone():
        seed_torch(seed, "model")
        if vocabulary:
            model = TOKEN_MODELS[name](vocabulary, input_shape[0], num_classes)
        else:
            model = MODELS[name](input_shape, num_classes)
    return prepare(model)


def is_tried(
    name: str, input_shape: Shape, num_classes: int, batch_norm: BatchNorm, vocabulary: int, prepare: Prepare
) -> bool:
    """Return True if this process has already tested this model of a library. The seed of the model does not matter."""
    source = source_of(name)
    return source is not None and (source, input_shape, num_classes, batch_norm, vocabulary, prepare) in _TRIED


@lru_cache(maxsize=16)
def has_own_loss(
    name: str, input_shape: Shape, num_classes: int, batch_norm: BatchNorm = "none", vocabulary: int = 0
) -> bool:
    """Return True if the model called ``name`` computes its loss itself. The arguments are those of ``build``."""
    return isinstance(build(name, input_shape, num_classes, 0, batch_norm=batch_norm, vocabulary=vocabulary), OwnLoss)


def products(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the computing cost of a model: the multiplications in linear and convolution layers for one record."""
    counts = list[int]()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            each = module.weight[0].numel()
            module.register_forward_hook(lambda _, __, made, each=each: counts.append(made[0].numel() * each))
    with torch.no_grad():
        model(torch.zeros(1, *input_shape))
    return sum(counts)


def _image(input_shape: Shape, name: str, smallest: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise UserError(
            f"model {name!r} needs images of at least {smallest}x{smallest}, these records have shape {input_shape}; "
            "mlp, 2nn and logistic take any shape, dafl-cnn images from 4x4"
        )
    return input_shape[0], input_shape[1], input_shape[2]


def _perceptron(input_shape: Shape, hidden: tuple[int, ...], num_classes: int) -> nn.Module:
    widths = (math.prod(input_shape), *hidden)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], num_classes))


def _build_own(
    path: str,
    input_shape: Shape,
    num_classes: int,
    seed: int,
    batch_norm: BatchNorm,
    vocabulary: int,
    trial: torch.Tensor | None,
    prepare: Prepare,
) -> nn.Module:
    """Return the model from the user's factory at the import path ``path``, after a test on two records.

    ``trial``: two records of the data set, in the form in which models receive records; None: two random records.

    Raises UserError, which names the model and the requirement, if the factory fails or the model does not fit. A model
    must be a module that maps (n, *input_shape) float32 records to (n, classes) float32 logits. Its parameters must be
    float32 and have known sizes; at least one must be trained. Its buffers must never change, because they are not
    averaged. Only the running statistics of BatchNorm layers may change, unless ``batch_norm`` is "none".
    """
    source = source_of(path)
    factory = _factory(path) if source is None else lambda shape, classes: source.build(shape, classes, vocabulary)
    if trial is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, vocabulary, (2, *input_shape), generator=generator) if vocabulary else None
        trial = torch.randn(2, *input_shape, generator=generator) if tokens is None else tokens.to(torch.float32)
    with process_alone():
        model = _made(path, factory, input_shape, num_classes, seed)
        _check_parameters(path, model)
        is_known = (path, source or factory) in _REPEATABLE
        if not is_known:
            _check_repeats(path, model, _made(path, factory, input_shape, num_classes, seed))
            _REPEATABLE.add((path, source or factory))
        model = prepare(model)
        if vocabulary:
            take_tokens(path, model, math.prod(input_shape), vocabulary)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        logits, has_loss = _logits(path, model, trial), isinstance(model, OwnLoss)
        logits = logits if has_loss else take_logits(path, model, logits, num_classes)
        # the model of a library is tested only once, because such a test takes seconds
        if not is_tried(path, input_shape, num_classes, batch_norm, vocabulary, prepare):
            _check_logits(path, logits, () if has_loss else (num_classes,))
            if before:
                _check_buffers(path, model, before, batch_norm)
            if before and not (source and is_known):
                other = _made(path, factory, input_shape, num_classes, seed + 1)
                _check_drawn(path, before, prepare(other))
            if vocabulary:
                _check_vocabulary(path, model, trial, vocabulary)
            # this check of a second call comes last, because the checks of buffers have clearer error messages
            _check_again(path, model, trial, logits)
            _TRIED.add((source, input_shape, num_classes, batch_norm, vocabulary, prepare))
        with torch.no_grad():
            # restore the buffers, which the test has changed
            for name, buffer in running_in(model).items():
                buffer.copy_(before[name])
    return model


_WANTED: Final = "a function of (input_shape, num_classes) that returns a new torch.nn.Module"
_CURE: Final = (
    "draw random numbers from the global generators of torch, NumPy or Python, which fl-sim seeds before each call, "
    "not from a generator of its own"
)
_REPEATABLE: Final[set[tuple[str, Any]]] = set()
"""Pairs (import path, factory or source) that passed this check: two calls with one seed gave equal models."""
_TRIED: Final[set[Hashable]] = set()
"""The arguments of models that passed all tests of ``_build_own``, without the seed: (source, ..., ``prepare``)."""


def _factory(path: str) -> Callable[..., Any]:
    found: Any = load_object(path, "model")
    if isinstance(found, nn.Module) or not callable(found):
        raise UserError(f"model {path!r} is {in_one_line(repr(found))}, not {_WANTED}")
    factory: Callable[..., Any] = found
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some functions that are written in C have no signature
        return factory
    try:
        signature.bind((), 0)
    except TypeError as error:
        raise UserError(f"model {path!r} takes {in_one_line(str(signature))}, but must be {_WANTED}") from error
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
        raise UserError(f"model {path!r} has {has}: there is nothing to train; give it parameters that are trained")
    if lazy := [name for name, value in (*named.items(), *model.named_buffers()) if is_lazy(value)]:
        raise UserError(
            f"model {path!r} has parameters without a size before the first batch ({lazy[0]}): compute the sizes from "
            "input_shape, for example with nn.Linear instead of nn.LazyLinear"
        )
    if other := [(name, weight.dtype) for name, weight in named.items() if weight.dtype != torch.float32]:
        name, dtype = other[0]
        raise UserError(
            f"model {path!r} has {str(dtype).removeprefix('torch.')} parameters ({name}): they must be float32; "
            "local.precision sets the number format of matrix products"
        )


def _check_repeats(path: str, model: nn.Module, again: nn.Module) -> None:
    first, second = model.state_dict(), again.state_dict()
    if other := [name for name, value in first.items() if name not in second or not torch.equal(value, second[name])]:
        raise UserError(
            f"model {path!r} differs between two calls of its factory with the same seed (in {other[0]}): {_CURE}"
        )


def _logits(path: str, model: nn.Module, trial: torch.Tensor) -> Any:
    """Return the model's logits for the two records ``trial``, in training mode.

    If the model computes its loss itself, return the losses. Every call seeds the random generators with the same seed.
    """
    records, shape = trial.to(next(model.parameters()).device), tuple(trial.shape[1:])
    was_training = model.training
    try:
        seed_process(0, "trial")
        if isinstance(model, OwnLoss):
            return model.train().loss_of(records, torch.zeros(len(records), dtype=torch.int64)).losses
        return model.train()(records)
    except (Exception, SystemExit) as error:
        raise UserError(f"model {path!r} cannot take records of shape {shape}: {with_place(error)}") from error
    finally:
        model.train(was_training)


def _check_vocabulary(path: str, model: nn.Module, trial: torch.Tensor, vocabulary: int) -> None:
    """Raise UserError if the model fails for the highest token id of the data, ``vocabulary`` - 1.

    The test of the model with two records does not detect this failure if the two records lack this token.
    """
    try:
        _logits(path, model, torch.full_like(trial, vocabulary - 1))
    except UserError as error:
        raise UserError(
            f"model {path!r} fails for token id {vocabulary - 1:,}, the highest of the {vocabulary:,} ids of these "
            f"records: use the model's own tokenizer by data.tokenizer=PATH, or a larger model ({error})"
        ) from error


def _check_logits(path: str, logits: Any, shape: tuple[int, ...]) -> None:
    """Raise UserError unless ``logits`` is a float32 tensor of shape (2, *shape) that has a gradient."""
    if not isinstance(logits, torch.Tensor):
        raise UserError(
            f"model {path!r} returns {type(logits).__name__} for a batch, not a tensor of logits: return only logits"
        )
    if tuple(logits.shape) != (2, *shape) or logits.dtype != torch.float32:
        raise UserError(
            f"model {path!r} returns {str(logits.dtype).removeprefix('torch.')} of shape {tuple(logits.shape)} for 2 "
            f"records, not float32 {'logits' if shape else 'losses'} of shape {(2, *shape)}"
        )
    if not logits.requires_grad:
        raise UserError(
            f"model {path!r} returns logits that depend on none of its trained parameters: remove torch.no_grad or "
            "detach from its forward"
        )


def _check_again(path: str, model: nn.Module, trial: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise UserError if the model returns other logits in a second call with the same records and seeds.

    ``logits``: the result of the first call.
    """
    if not torch.equal(logits, _logits(path, model, trial)):
        raise UserError(
            f"model {path!r} returned different logits for the same records in a second call, with the same seeds of "
            f"the generators of torch, NumPy and Python: {_CURE}"
        )


def _check_buffers(path: str, model: nn.Module, before: dict[str, torch.Tensor], batch_norm: BatchNorm) -> None:
    """Raise UserError if the test has changed a buffer; ``before``: the buffers before the test.

    Running statistics of BatchNorm layers may change, unless ``batch_norm`` is "none".
    """
    running = running_in(model)
    for name, buffer in model.named_buffers():
        if (name in before and torch.equal(buffer, before[name])) or (name in running and batch_norm != "none"):
            continue
        if name in running:
            raise UserError(
                f"model {path!r} keeps running statistics ({name}), which federated averaging would lose: set "
                "local.batch_norm=average or personal, or use nn.GroupNorm, or a norm with track_running_stats=False"
            )
        raise UserError(
            f"model {path!r} keeps running statistics ({name}), which federated averaging would lose: fl-sim supports "
            "only those of nn.BatchNorm; use a norm without running statistics, such as nn.GroupNorm"
        )


def _check_drawn(path: str, before: dict[str, torch.Tensor], other: nn.Module) -> None:
    """Raise UserError if a buffer of the model depends on the seed.

    Buffers are not sent, so the clients' models would then differ in this buffer.

    ``before``: the buffers of the model. ``other``: the same model, built with another seed.
    """
    for name, buffer in other.named_buffers():
        if name not in before or not torch.equal(buffer, before[name]):
            raise UserError(
                f"model {path!r} draws the buffer {name} at random, but buffers are not sent to clients: make it an "
                "nn.Parameter with requires_grad=False"
            )
