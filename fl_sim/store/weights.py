"""The initial weights of a model: reading their file, computing its digest, and copying tensors into the model.

Pickled objects in a file are not loaded, because they could run code. The tensors in a file must have the model's names
and shapes. The only exception is the head (last layer). If the file has no head, or a head for another number of
classes, the model gets a new random head.
"""

import hashlib
import io
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from fl_sim.errors import UserError
from fl_sim.foreign_models import source_of
from fl_sim.mistakes import shortened
from fl_sim.own_code import in_one_line
from fl_sim.params import all_norms_in, head_names
from fl_sim.settings import read_table
from fl_sim.store.files import explain, read_whole
from fl_sim.store.run_directory import CONFIG, MODEL
from fl_sim.types import Params

NONE: Final = "none"
"""The value of ``model.weights`` for random weights, also for a model with weights in its library or folder."""

_WRAPPERS: Final = ("state_dict", "model_state_dict", "model")
"""The keys under which training programs store a model's weights. Such files may also contain an optimiser's state."""

_PREFIXES: Final = ("module.", "_orig_mod.")
"""The prefixes that torch's DataParallel and torch.compile put before every name."""

_MOST_NAMED: Final = 2000
"""The maximum length, in characters, of a list of names in an error message."""


@dataclass(frozen=True)
class Placed:
    """The allowed differences between the tensors of a model and the tensors in its file of weights.

    ``new``: the names of the tensors of a new head, which keep their random values. ``classes``: the number of classes
    of the head in the file, 0 if the file has no head. ``summed``: the names of convolution weights for which the model
    has one input channel (grey images) and the file has three (colours). The model gets the sum of the file's weights
    over the three channels.
    """

    new: tuple[str, ...] = ()
    classes: int = 0
    summed: tuple[str, ...] = ()

    def in_words(self, source: str) -> str:
        """Return a sentence for users about the initial weights. ``source``: the file of the weights."""
        said = f"the model started from {source}"
        if self.new:
            why = f"the file's head is for {self.classes} classes" if self.classes else "the file has no head"
            said += f", with a new head ({', '.join(self.new)}), because {why}"
        if self.summed:
            said += f"; {', '.join(self.summed)} is the sum over the file's three colours, as the run's images are grey"
        return said

    @staticmethod
    def uncovered(source: str) -> str:
        """Return a caveat for the privacy statement of a run that starts from the file of weights ``source``."""
        return (
            f"The model started from {source}: the epsilon holds only if these weights were made without the records "
            "of this run."
        )


def records_of(path: str) -> str:
    """Return the name of the data set of the run in the directory ``path``; empty if ``path`` is no run directory."""
    config = Path(path).expanduser() / CONFIG
    return str(read_table(config).get("data", "")) if config.is_file() else ""


def file_of(path: str) -> Path:
    """Return the file of weights at ``path``: the file itself, or the last model of a run directory.

    Raises UserError if there is no such file.
    """
    found = Path(path).expanduser()
    if found.is_dir():
        if not (found / MODEL).is_file():
            what = f"it holds a run without {MODEL}" if (found / CONFIG).exists() else f"it has no {MODEL}"
            raise UserError(
                f"model.weights: {path} is a folder, and {what}: give a file of weights, or the directory of a "
                "finished run that trained a model"
            )
        return found / MODEL
    if not found.exists():
        raise UserError(
            f"model.weights: {path} does not exist: give a safetensors file, a state_dict that torch.save wrote, or a "
            "run directory"
        )
    return found


def digest_of(model: str, path: str) -> str:
    """Return the SHA-256 of the files of weights from which a model starts; empty for random weights.

    ``model``: the name of the model, which may come with its own weights. ``path``: the setting ``model.weights``.
    Raises UserError if a file cannot be read.
    """
    files = _files_of(model, path)
    if not files:
        return ""
    digests = [_digest(file, *_version(file)) for file in files]
    return digests[0].hex() if len(files) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


@lru_cache(maxsize=8)
def _digest(file: Path, size: int, changed: int) -> bytes:  # noqa: ARG001 (another version has another digest)
    """Return the SHA-256 of the content of ``file``, cached, because every run of a table needs it."""
    return hashlib.sha256(_content(file)).digest()


def _version(file: Path) -> tuple[int, int]:
    """Return the size of ``file`` and the time of its last change in nanoseconds, to detect changes of the file."""
    try:
        found = file.stat()
    except OSError as error:
        raise UserError(f"model.weights: {explain(error)}") from error
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=1)
def read_weights(model: str, path: str, digest: str) -> Params:
    """Return the tensors from which a model starts, by name; empty for random weights.

    ``model``, ``path``: as for ``digest_of``. ``digest``: the expected digest. Raises UserError if the files have
    another digest, for a file with other Python objects than tensors, and for tensors with NaN or infinite numbers.
    """
    if digest_of(model, path) != digest:
        raise UserError(
            f"model.weights: {path or model} has changed since the run began (its SHA-256 is not model.digest): "
            "restore the file, or leave model.digest out and choose another --out"
        )
    if not digest:
        return {}
    if not path:
        source = source_of(model)
        assert source is not None, "a model with pretrained weights has a source"
        return source.weights()
    file = file_of(path)
    tensors = _named(_parsed(_content(file), file), file)
    if wrong := [name for name, value in tensors.items() if not torch.isfinite(value).all()]:
        raise UserError(
            f"model.weights: {file} contains NaN or infinite numbers in {_listed(wrong)}: use weights from a training "
            "that did not diverge"
        )
    return tensors


def place(model: nn.Module, weights: Params, source: str) -> Placed:
    """Copy ``weights`` into ``model``, and return the allowed differences in their tensors (see ``Placed``).

    The head (last layer) of ``model`` stays random if ``weights`` has no head, or a head for another number of classes.
    If ``model`` is for grey images, convolution weights for three colours are summed over the colours. If several names
    belong to one tied parameter, ``weights`` needs only one of these names. Constant buffers may be missing. Raises
    UserError for any other difference in names, shapes or constants; the message lists the names. ``source``: the file
    of the weights, for messages.
    """
    wanted: dict[str, torch.Tensor] = dict(model.state_dict())
    named = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in wanted.keys() - weights.keys() if not _may_be_missing(name, model, named, weights)]
    unknown = sorted(weights.keys() - wanted.keys())
    other = [name for name, value in wanted.items() if name in weights and weights[name].shape != value.shape]
    summed = [name for name in other if _is_grey(wanted[name].shape, weights[name].shape)]
    new = _new_head(model, missing, {name: weights[name] for name in other})
    missing = [name for name in missing if name not in new]
    wrong = [name for name in other if name not in new and name not in summed]
    found = [
        f"{name} is {tuple(weights[name].shape)} in the file and {tuple(wanted[name].shape)} in the model"
        for name in wrong
    ]
    differences = [
        *([f"{_listed(sorted(missing))} missing in the file"] if missing else []),
        *([f"{_listed(unknown)} unknown in the model"] if unknown else []),
        *([_listed(found)] if found else []),
    ]
    if differences:
        raise UserError(
            f"model.weights: {source} does not fit the model ({'; '.join(differences)}): use the model to which "
            "these weights belong"
        )
    _check_constants(model, named, weights, source)
    with torch.no_grad():
        for name, value in wanted.items():
            if name in weights and name not in new:
                value.copy_(weights[name].sum(1, keepdim=True) if name in summed else weights[name])
    classes = max((len(weights[name]) for name in new if name in weights), default=0)
    return Placed(tuple(sorted(new)), classes, tuple(summed))


def _files_of(model: str, path: str) -> tuple[Path, ...]:
    if path == NONE:
        return ()
    if path:
        return (file_of(path),)
    source = source_of(model)
    return () if source is None else source.files()


def _content(file: Path) -> bytes:
    try:
        return read_whole(file)
    except OSError as error:
        raise UserError(f"model.weights: {explain(error)}") from error


def _parsed(content: bytes, file: Path) -> object:
    """Return the content of a file of weights. Only tensors, numbers, texts and their containers are read."""
    try:
        if file.suffix == ".safetensors" or content[8:9] == b"{":
            return load(content)
        with warnings.catch_warnings():
            # Warnings about the pickle version are not shown. Content that cannot be read raises an error below.
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise UserError(
            f"model.weights: {file} is no safetensors file, or is damaged ({in_one_line(error)}): save it again"
        ) from error
    except pickle.UnpicklingError as error:
        said = "pickled Python objects, which could run any code" if content else "nothing"
        raise UserError(
            f"model.weights: {file} contains {said}, so the file is refused: save only the tensors, by "
            "safetensors.torch.save_model(model, path) or torch.save(model.state_dict(), path)"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"model.weights: {file} has no weights ({in_one_line(error)}): give a safetensors file, or a state_dict "
            "that torch.save wrote"
        ) from error


def _named(found: object, file: Path) -> Params:
    """Return the named tensors in ``found``, the content of a file. Raises UserError for any other content."""
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(inner := found.get(key), Mapping):
            found = inner
    if not isinstance(found, Mapping) or not found:
        kind = "an empty table" if isinstance(found, Mapping) else type(found).__name__
        raise UserError(f"model.weights: {file} contains {kind}, not tensors by name: save model.state_dict()")
    if other := [shortened(str(name)) for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        raise UserError(
            f"model.weights: {file} contains other values than tensors ({_listed(other)}): save model.state_dict()"
        )
    tensors: dict[str, Any] = {str(name): value for name, value in found.items()}
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _may_be_missing(name: str, model: nn.Module, named: Mapping[str, nn.Parameter], weights: Params) -> bool:
    """Return True if the model's tensor ``name`` may be missing in a file of weights.

    Three kinds of tensors may be missing: constants, the batch counts of norm layers, and a tied parameter that the
    file contains under another name.
    """
    if name in named:
        return any(other in weights for other, weight in named.items() if weight is named[name])
    layer, _, buffer = name.rpartition(".")
    return layer not in all_norms_in(model) or buffer == "num_batches_tracked"


def _new_head(model: nn.Module, missing: list[str], other: Params) -> set[str]:
    """Return the names of the head's tensors if the model needs a new head (last layer); else an empty set.

    The model needs a new head if the file has no head, or a head for another number of classes.

    ``missing``: the names that the file lacks. ``other``: the file's tensors whose shapes differ from the model's.
    """
    named: Params = {name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}
    try:
        head = head_names(named)
    except UserError:
        return set()
    if head <= set(missing):
        return set(head)
    of_head = {name for name in other if name in head}
    fits = all(other[name].ndim and other[name].shape[1:] == named[name].shape[1:] for name in of_head)
    return set(head) if of_head and fits else set()


def _is_grey(here: torch.Size, there: torch.Size) -> bool:
    """Return True if two shapes of weights differ only in the input channels: 1 in ``here`` and 3 in ``there``."""
    return len(here) == 4 and here[1] == 1 and there == torch.Size((here[0], 3, *here[2:]))


def _check_constants(model: nn.Module, named: Mapping[str, nn.Parameter], weights: Params, source: str) -> None:
    """Raise UserError if constants or tied parameters in ``weights`` contradict the model.

    A constant buffer must have the same values as in ``model``. All names of one tied parameter must have equal values.
    The constants are checked because a run does not save constants: it takes them from the model's architecture.
    """
    norms = all_norms_in(model)
    for name, buffer in model.named_buffers():
        is_constant = name in weights and name.rpartition(".")[0] not in norms
        if is_constant and not torch.allclose(buffer, weights[name].to(buffer)):
            raise UserError(
                f"model.weights: {source} has other values in the constant {name} than the model: use the model to "
                "which these weights belong, or make the constant a parameter with requires_grad=False"
            )
    first: dict[int, str] = {}
    for name, weight in named.items():
        twin = first.setdefault(id(weight), name) if name in weights else name
        if twin != name and not torch.equal(weights[twin], weights[name]):
            raise UserError(
                f"model.weights: {source} has other values in {name} than in {twin}, which the model ties to one "
                "parameter: use the model to which these weights belong"
            )


def _listed(names: list[str]) -> str:
    line = ", ".join(names)
    return line if len(line) <= _MOST_NAMED else f"{line[:_MOST_NAMED]}... ({len(names)} names)"
