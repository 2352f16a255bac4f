"""Features of a frozen body: if only the head of a model is trained, the body computes each record's features once.

The body is all layers of a model before its head, the last layer. The features of a record are the inputs of the head,
and depend only on this record. So the features are stored, and a round trains the head on the stored features. Features
are computed in batches of a constant size. At this size, the bits of a record's features do not depend on the other
records in the batch. So all processes compute the same features.
"""

import copy
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim.data.kept import Arrays, cache_root, kept_arrays
from fl_sim.data.naming import is_own
from fl_sim.data.scattering import in_threads
from fl_sim.errors import UserError
from fl_sim.own_loss import OwnLoss
from fl_sim.params import copied, norms_in, trainable
from fl_sim.seeding import process_alone, process_state
from fl_sim.trained_part import head_of
from fl_sim.training.loop import to_tensors
from fl_sim.training.records import arithmetic
from fl_sim.types import Dataset, Examples

BATCH: Final = 64
"""The number of records in a forward pass. It is constant, because float rounding depends on the shape of a batch."""

_CLOSE: Final = 1e-5
"""Features with a difference of at most this number count as equal: the difference comes from rounding."""

_FILE: Final = "features.safetensors"
_VERSION: Final = 1
"""The version of the cache files. Increase the version if a change of the code changes features.

Older cache files are then ignored.
"""


@dataclass(frozen=True, eq=False)
class FrozenBody:
    """A model whose body (all layers before the head) is frozen. Only the head is trained.

    ``model``: the whole model, in evaluation mode, on the device that computes features. ``head``: only the head, on
    the CPU; its parameters have the same names as in ``model``. ``size``: the number of features of a record.
    ``batch``: the number of records in one forward pass.
    """

    model: nn.Module
    head: nn.Module
    size: int
    batch: int

    def entered(self, dataset: Dataset) -> Dataset:
        """Return a copy of ``dataset`` with features, the inputs of the head, in place of its records.

        If an earlier run has stored these features in a cache file, they are read from this file. Otherwise they are
        computed and written. Raises RunError if the file cannot be written.
        """
        parts = parts_of(dataset)
        place, identity = self.place(dataset)

        def fits(found: Arrays) -> bool:
            # some stored features are recomputed and compared, because the digest does not detect a change of the
            # model's code
            start = dataset.test.take(np.arange(min(BATCH, len(dataset.test))))
            return all(found[name].shape == (len(part), self.size) for name, part in parts.items()) and np.array_equal(
                found["test"][: len(start)], self.features_of(start, dataset)
            )

        made = kept_arrays(
            place,
            tuple(parts),
            identity,
            lambda: {name: self.features_of(part, dataset) for name, part in parts.items()},
            fits,
            f"the frozen body's features of {sum(map(len, parts.values())):,} records",
            # only the user may read the file, because features of the user's own records are as private as the records
            private=is_own(dataset.name),
        )
        train, test, *given = (replace(part, inputs=made[name]) for name, part in parts.items())
        validation = given[0] if given else None
        return replace(dataset, train=train, test=test, validation=validation, mean=(0.0,), std=(1.0,), vocabulary=0)

    def features_of(self, examples: Examples, dataset: Dataset) -> NDArray[np.float32]:
        """Return the features of ``examples``, records of ``dataset``, shape (records, ``size``).

        All texts of a batch have the same length, because padding would change the rounding of their features. A batch
        with too few records is filled with repeated records.
        """
        used = (examples.inputs != 0) * np.arange(1, examples.inputs.shape[1] + 1) if dataset.vocabulary else None
        lengths = np.zeros(len(examples)) if used is None else used.max(axis=1)
        order = np.argsort(lengths, kind="stable")
        equal = np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1)
        batches = [part[at : at + self.batch] for part in equal for at in range(0, len(part), self.batch)]
        found = np.empty((len(examples), self.size), dtype=np.float32)

        def fill(some: slice) -> None:
            for rows in batches[some]:
                inputs, _ = to_tensors(examples.take(np.resize(rows, self.batch)), dataset)
                found[rows] = entering(self.model, inputs)[: len(rows)].numpy(force=True)

        in_threads(fill, len(batches), 1)
        return found

    def place(self, dataset: Dataset) -> tuple[Path, str]:
        """Return the path of the cache file, and a digest of all values from which the features are computed.

        These values are the records, the body's tensors, and settings such as the batch size. The digest does not
        depend on the code of the body.
        """
        device = next(self.model.parameters()).device.type
        facts = [_VERSION, torch.__version__, device, self.batch, dataset.mean, dataset.std, dataset.vocabulary]
        digest, own = hashlib.sha256(repr(facts).encode()), self.head.state_dict().keys()
        for name, value in self.model.state_dict().items():
            if name not in own:
                digest.update(f"{name} {tuple(value.shape)}".encode())
                digest.update(value.numpy(force=True).tobytes())
        for name, part in parts_of(dataset).items():
            digest.update(f"{name} {part.inputs.dtype} {part.inputs.shape}".encode())
            digest.update(np.ascontiguousarray(part.inputs).data)
        identity = digest.hexdigest()
        return cache_root() / f"{dataset.name.partition(':')[0]}-body-{identity[:20]}" / _FILE, identity


def parts_of(dataset: Dataset) -> dict[str, Examples]:
    """Return the training, test and validation records of ``dataset`` by name."""
    given = {} if dataset.validation is None else {"validation": dataset.validation}
    return {"train": dataset.train, "test": dataset.test, **given}


class _Entered(Exception):  # noqa: N818 (it is no error)
    """The exception that ends a forward pass before the head.

    ``args``: the positional and the named inputs of the head.
    """


def body_of(model: nn.Module, trial: torch.Tensor, device: torch.device, why_not: str) -> FrozenBody | str:
    """Return the ``FrozenBody`` of ``model``, or a text: the reason why its features cannot be stored.

    The result is "" if the model has no frozen body. ``trial``: two normalised records, on which the model is tested.
    ``why_not``: the reason if a setting forbids stored features, else "".
    """
    try:
        head = head_of(model)
    except UserError:
        return ""
    inside = {id(part) for part in head.modules()}
    before = [part for part in model.modules() if id(part) not in inside]
    frozen = {id(one) for part in before for one in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    if isinstance(model, OwnLoss) or not frozen or any(id(weight) in frozen for weight in trainable(model).values()):
        return ""
    if why_not or norms_in(model):
        return why_not or "its BatchNorm layers use the statistics of a batch"
    whole = copied(model)
    features, why = _features_before(whole, trial)
    batch, why = (0, why) if why else _batch_of(whole, trial, features)
    if why:
        return why
    name = next(name for name, part in model.named_modules() if part is head)
    alone: nn.Module = copy.deepcopy(head)
    for part in reversed(name.split(".")):
        alone = nn.Sequential(OrderedDict([(part, alone)]))
    # A copy of the model is moved to the GPU, because other models share the frozen parameters of this model.
    placed = whole if device.type == "cpu" else copy.deepcopy(whole).to(device)
    return FrozenBody(placed, alone, features.shape[1], batch)


def entering(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the features (the inputs of the head) of normalised ``inputs`` of the model.

    ``model``: the model of a ``FrozenBody``; its head is not called.
    """
    device = next(model.parameters()).device
    try:
        with torch.inference_mode(), arithmetic(device):
            model(inputs.to(device))
    except _Entered as found:
        features: torch.Tensor = found.args[0][0]
        return features
    raise AssertionError("the model did not call its head")


def _features_before(model: nn.Module, trial: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return (features, reason): the features of the two records ``trial``, as ``model`` passes them to its head.

    The reason states why features cannot be stored. If they can be stored, the reason is "", and ``model`` gets a hook:
    from now on, a forward pass stops before the head and raises ``_Entered`` with the features.
    """
    calls: list[tuple[Any, Any]] = []
    head = head_of(model)
    hook = head.register_forward_pre_hook(lambda _, given, named: calls.append((given, named)), with_kwargs=True)
    with torch.inference_mode(), process_alone():
        logits = model.eval()(trial)
        hook.remove()
        (features, *others), named = calls[0] if len(calls) == 1 and calls[0][0] else ((None,), {})
        is_plain = isinstance(features, torch.Tensor) and features.ndim == 2 and features.dtype == torch.float32
        if not is_plain or others or named or not torch.equal(head(features), logits):
            return trial, "its head does not compute the logits from features of shape (n, d) alone"
        assert isinstance(features, torch.Tensor)
    head.register_forward_pre_hook(_stop, with_kwargs=True)
    return features, ""


def _stop(head: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> NoReturn:
    del head
    raise _Entered(given, named)


def _batch_of(model: nn.Module, trial: torch.Tensor, features: torch.Tensor) -> tuple[int, str]:
    """Return (batch size, reason): a size at which a record's features do not depend on its batch, bit for bit.

    The size is ``BATCH`` if a test finds no dependence at this size, else 1. The reason is "" if the features of a
    record depend only on this record. Otherwise the reason states what else the features depend on. No features are
    stored in this case, and the size has no meaning. ``features``: the features of ``trial``, two records.
    """
    with process_alone():
        before = process_state()
        trained = entering(model.train(), trial)
        if process_state() != before or not torch.allclose(trained, features, atol=_CLOSE):
            return 0, "it draws random numbers in training, as dropout does"
    model.eval()
    both, others = torch.cat([trial[:1], trial[:1].flip(-1)]), [1] * (trial.ndim - 1)
    found: list[torch.Tensor] = []

    def compute(_: slice) -> None:
        mixed = entering(model, both.repeat(BATCH // 2, *others))[::2]
        found.append(torch.cat([mixed, entering(model, trial[:1].repeat(BATCH, *others))]))

    in_threads(compute, 1, 1)
    (rows,) = found
    if torch.equal(rows, rows[:1].expand_as(rows)):
        return BATCH, ""
    is_close = torch.allclose(rows, rows[:1].expand_as(rows), atol=_CLOSE)
    return 1, "" if is_close else "a record's features depend on the other records of its batch"
