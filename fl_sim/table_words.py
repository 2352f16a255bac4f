"""How methods, splits and settings are written in a table: names of rows and columns, and the caption."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fl_sim.config import Settings, field_defaults
from fl_sim.data import load
from fl_sim.experiment import Experiment
from fl_sim.simulation import short_form
from partitions import Dirichlet, LabelK, Scheme

_DATA = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
}


def data_label(name: str) -> str:
    """Return how a data set is written in a table's head."""
    return _DATA.get(name, name)


def label(settings: Any) -> str:
    """Return how a method or a split is written in the table, with the parameters that are not the default."""
    defaults = field_defaults(type(settings))
    values = {name: getattr(settings, name) for name in defaults}
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    if isinstance(settings, Settings):
        name = {"Scaffold": "SCAFFOLD"}.get(type(settings).__name__, type(settings).__name__)
    else:
        name = _split_name(settings)
        changed.pop(next(name for name in defaults if name != "kind"), None)
    return name + (f" ({', '.join(f'{name}={value}' for name, value in changed.items())})" if changed else "")


def _split_name(scheme: Scheme) -> str:
    """Return NIID-Bench's name where it has one; the first parameter is part of it."""
    if isinstance(scheme, LabelK):
        return f"{scheme.k}-Label"
    if isinstance(scheme, Dirichlet):
        return f"Dir({scheme.beta})"
    return short_form(scheme)


def text(value: Any) -> str:
    """Return a grid's value as it is written in a row's name."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def caption(experiments: Sequence[Experiment], data_root: Path | None, *, has_bound: bool) -> tuple[str, ...]:
    """Return what a reader must know of the federated ``experiments`` of a table, a sentence a line."""
    seeds = _values(e.seed for e in experiments)
    spread = f"mean ± sample standard deviation over seeds {seeds}" if ", " in seeds else f"one seed ({seeds})"
    notes = {e.data: load(e.data, data_root).note for e in experiments}
    measures = "last: after the last round; best: the best evaluated round, picked on the test set and so optimistic"
    bound = (
        "Centralized is the upper bound: the same model and optimiser with all training records in one place and as "
        "many epochs in total; it does not compete."
    )
    return (
        f"Test accuracy in percent, {spread}. {measures}.",
        f"{_values(data_label(e.data) for e in experiments)}; {_federation(experiments)}; {_training(experiments)}.",
        *(f"{data_label(name)} here: {note}." for name, note in notes.items() if note),
        *([bound] if has_bound else []),
    )


def _federation(experiments: Sequence[Experiment]) -> str:
    clients, model = _values(e.clients for e in experiments), _values(e.model for e in experiments)
    sampler = _values(short_form(e.sampler) for e in experiments)
    aggregator = _values(short_form(e.aggregator) for e in experiments)
    return f"{clients} clients, sampler {sampler}, aggregator {aggregator}, model {model}"


def _training(experiments: Sequence[Experiment]) -> str:
    local = [e.local for e in experiments]
    epochs = _values(one.epochs for one in local)
    return (
        f"{_values(e.rounds for e in experiments)} rounds of {epochs} local epoch{'' if epochs == '1' else 's'}, "
        f"batch size {_values(one.batch_size for one in local)}, SGD with learning rate "
        f"{_values(one.learning_rate for one in local)} ({_values(short_form(one.schedule) for one in local)}), "
        f"momentum {_values(one.momentum for one in local)}, weight decay {_values(one.weight_decay for one in local)}"
    )


def _values(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))
