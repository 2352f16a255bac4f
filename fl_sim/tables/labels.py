"""The texts of a table: names of rows, columns and run directories, and the lines of the caption."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fl_sim.data.naming import parts_of, short_label, without_settings
from fl_sim.experiment.experiment import Experiment
from fl_sim.experiment.groups import Evaluate, Local
from fl_sim.kinds import Captioned, field_defaults, inner_split, is_none, is_settings, kind_of, short_form, title_of
from fl_sim.report.row_names import method_of, settings_of, short_names
from fl_sim.settings import default_of
from fl_sim.types import Dataset
from strategies.algorithm import Advising, Noted

SEEDS = ("seed", "partition_seed", "model_seed", "sampling_seed")

_DATA = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cifar100-coarse": "CIFAR-100 (superclasses)",
    "svhn": "SVHN",
    "adult": "Adult",
    "diabetes": "Diabetes",
}

_RARE = {
    "clip_norm": "gradients clipped to norm", "label_smoothing": "label smoothing", "augment": "images moved by",
    "batch_norm": "BatchNorm",
}  # fmt: skip
"""Rarely changed settings of local training, {setting: its text in a caption}.

The caption states such a setting only if a run changes it.
"""

_LOCAL = tuple(
    f"local.{name}"
    for name in ("epochs", "steps", "batch_size", "optimizer", "schedule", "learning_rate", "momentum", "weight_decay")
)

_IN_SETTINGS = {
    "clients", "rounds", "model", "features", "normalise", *_LOCAL, *(f"local.{name}" for name in _RARE),
}  # fmt: skip
"""The settings that the caption's line "Settings" states."""

_MOST_PLACES, _FEW = 60, 3
"""Two limits. If a table has more than ``_MOST_PLACES`` rows, a caption names groups of rows in place of single rows.

The same is true for columns. The runs of a group may have at most ``_FEW`` different values of a setting.
"""

_OPTIMIZER = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


def data_label(name: str) -> str:
    """Return the name of a data set as tables show it, such as "MNIST + digits" for "domains:mnist+digits"."""
    if len(parts := parts_of(name)) > 1:
        return short_label(name).replace(without_settings(name), " + ".join(map(data_label, parts)))
    return _DATA.get(name) or short_label(name)


@dataclass(frozen=True)
class RowName:
    """The parts of the name of a table's row.

    ``method``: the full name of the method. ``further``: {setting: value} of all other settings that the name states.
    ``experiment``: one experiment of the row. ``is_chosen``: True if the user chose the name.
    """

    method: str
    further: Mapping[str, str]
    experiment: Experiment
    is_chosen: bool = False


def row_labels(rows: Mapping[str, RowName]) -> dict[str, tuple[str, str]]:
    """Return {row: (short label, remaining settings)} for the rows of a table.

    The label of a row states all settings in which it differs from other rows of the same method, including default
    values. No two rows have the same label. The remaining settings are those that are neither in the label nor in the
    caption's line "Settings".
    """
    spanned: dict[str, dict[str, str]] = {}
    for one in rows.values():
        spanned.setdefault(method_of(one.method), {}).update(one.further)
    whole = {}
    for row, one in rows.items():
        every = {key: one.further.get(key) or _value_at(one.experiment, key) for key in spanned[method_of(one.method)]}
        whole[row] = ", ".join([one.method, *(f"{key}={value}" for key, value in every.items() if value)])
    short = short_names(whole[row] for row, one in rows.items() if not one.is_chosen)
    labels = {row: row if one.is_chosen else short[whole[row]] for row, one in rows.items()}
    found = {}
    for row, one in rows.items():
        shown = labels[row] if list(labels.values()).count(labels[row]) == 1 else row
        named = [] if one.is_chosen else settings_of(shown)
        left = [
            text for text in settings_of(whole[row]) if text not in named and text.partition("=")[0] not in _IN_SETTINGS
        ]
        method = method_of(one.method)
        found[row] = (shown, ", ".join([method, *left] if one.is_chosen and method != shown else left))
    return found


def method(experiment: Experiment, varied: Collection[str] = (), own: Collection[str] = ()) -> str:
    """Return the label of a method: its preprocessing, its algorithm, and its server if it is not the default.

    The label states all parameters that differ from their defaults, and the given further parameters. ``varied``:
    further parameters of the preprocessing. ``own``: further parameters of the algorithm and the server.
    """
    name = label(experiment.algorithm, own)
    if experiment.server != default_of(Experiment, "server"):
        name = f"{name}, {label(experiment.server, own)}"
    if is_none(experiment.preprocess):
        return name
    return f"{label(experiment.preprocess, varied)} + {name}"


def differences(experiments: Iterable[Experiment]) -> frozenset[str]:
    """Return the names of the preprocessing parameters whose values differ between ``experiments``."""
    chosen = [e.preprocess for e in experiments if isinstance(e.preprocess, Captioned)]
    fields = {name for one in chosen for name in field_defaults(type(one))}
    return frozenset(name for name in fields if len({str(getattr(one, name, "")) for one in chosen}) > 1)


def varied_parameters(chosen: Iterable[Any]) -> dict[type, frozenset[str]]:
    """Return {settings class: names of the parameters whose values differ between ``chosen`` objects of this class}."""
    kinds: dict[type, list[Any]] = {}
    for one in chosen:
        kinds.setdefault(type(one), []).append(one)
    return {
        kind: frozenset(name for name in field_defaults(kind) if len({str(getattr(one, name)) for one in some}) > 1)
        for kind, some in kinds.items()
    }


def label(settings: Any, also: Collection[str] = ()) -> str:
    """Return the label of an algorithm, a preprocessing or a partition, with all parameters that are not default.

    ``also``: parameters that the label states even with default values.
    """
    changed = _changed(settings, also)
    # If ``title`` is a property of the settings class, its text already contains the first parameter.
    if not isinstance(vars(type(settings)).get("title", ""), str):
        changed.pop(next((name for name in field_defaults(type(settings)) if name != "kind"), ""), None)
    if (inner := inner_split(settings)) is not None:
        changed.pop("over")
    return title_of(settings) + _in_brackets(changed) + ("" if inner is None else f" {label(inner)}")


def text(value: Any) -> str:
    """Convert a value from the section [grid] of a table to text, for the name of a row.

    >>> text({"kind": "rand-k", "share": 0.1})
    'rand-k (share=0.1)'
    """
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, Mapping) and "kind" in value:
        return text(value["kind"]) + _in_brackets({key: part for key, part in value.items() if key != "kind"})
    return value if isinstance(value, str) else json.dumps(value, default=str)


def caption(
    experiments: Sequence[Experiment],
    notes: Mapping[str, str],
    shares: Mapping[str, float],
    *,
    has_bound: bool,
    places: Sequence[Sequence[str]] = (),
    settings: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the lines of the caption of a table of ``experiments``.

    The first line says which accuracies the table shows. Each further line starts with a label, such as "Data:".

    ``notes``: {data set: note about the data set}. ``shares``: {data set: share of the most frequent class in its test
    records}. ``has_bound``: True if the table has the row Centralized. ``settings``: {row label: settings that no other
    line of the caption states}.

    If the experiments differ in a setting, the caption first gives the most frequent value. The other values follow in
    brackets, each with its rows or columns, such as "0.9 (0 for FedDyn)". ``places``: lists of names, such as the row
    labels or the column names, with one name per experiment. For a setting, the caption uses the first of these lists
    in which experiments with equal names always have equal values of the setting.
    """
    show = partial(_with_places, places=places)
    baselines = ", ".join(f"{data_label(name)} {100 * share:.1f} %" for name, share in shares.items())
    algorithms: list[tuple[object, float]] = [(e.algorithm, e.local.momentum) for e in experiments]
    advice = [one.advice(momentum) for one, momentum in algorithms if isinstance(one, Advising)]
    noted = {data_label(e.data): notes.get(e.data) for e in experiments}
    data = ", ".join(f"{name} (here: {note})" if note else name for name, note in noted.items())
    methods = "; ".join(f"{row}: {given}" for row, given in (settings or {}).items() if given)
    bound = (
        "Centralized: an upper bound, not compared with the others: the same training on all records in one place, "
        f"with as many {'steps as one client' if any(e.local.steps for e in experiments) else 'epochs'} in total."
    )
    baseline = f" Baseline: the most frequent class of the test records, {baselines}." if baselines else ""
    remarks = [f"Methods: {methods}."] if methods else []
    remarks += [f"{one}." for one in dict.fromkeys(advice) if one]
    return (
        f"Test accuracy in percent; last: after the last round; best: {_best(experiments)}.",
        f"Data: {data}.{baseline}",
        f"Settings: {_federation(experiments, show)}; {_training(experiments, show)}; {_exchange(experiments, show)}.",
        f"Seeds: {seeds_in_words(experiments)}.",
        *([" ".join(remarks)] if remarks else []),
        *_captions([e.preprocess for e in experiments]),
        *_captions([e.local.privacy for e in experiments]),
        *dict.fromkeys(e.algorithm.note() for e in experiments if isinstance(e.algorithm, Noted)),
        *_captions([e.calibrate for e in experiments]),
        *([bound] if has_bound else []),
    )


def duration_in_words(result: Mapping[str, Any]) -> str:
    """Return the duration of a run as text.

    For a private run, the text begins with "at most", because the exact duration would reveal the number of records.
    """
    seconds = result["seconds"]["total"]
    return f"at most {seconds:g} s" if result["privacy"] else f"{seconds:.1f} s"


_NOT_NAMED = {"engine", "round_timeout", "keep_every"}
"""Settings that do not change a run's results, so they are not part of its name."""


def run_name(experiment: Experiment, dataset: Dataset) -> str:
    """Return the directory name of a run in a table, such as ``fedavg-digits-label-1-seed-0-1f0c2a9b``.

    The name ends with a hash of the settings and of the numbers of records. The name does not depend on the engine, so
    that another engine can resume the run. In ``experiment``, all defaults that depend on the data must be filled in.
    """
    content = experiment.chosen(*(name for name in Experiment.model_fields if name not in _NOT_NAMED))
    if experiment.evaluate == Evaluate():  # keeps names of runs made before ``evaluate`` existed
        del content["evaluate"]
    records = [len(dataset.train), len(dataset.test), dataset.note]
    digest = hashlib.sha256(json.dumps([content, records], sort_keys=True).encode()).hexdigest()[:8]
    split = "" if experiment.is_central else short_form(experiment.partition)
    features = "" if experiment.features == "none" else experiment.features
    readable = f"{method(experiment)} {without_settings(experiment.data)} {features} {split} seed {experiment.seed}"
    return f"{re.sub(r'[^a-z0-9.]+', '-', readable.lower())[:80].strip('-.')}-{digest}"


def seed_of_means(values: Mapping[str, Sequence[Any]]) -> str:
    """Return the name of the seed setting over which a table averages: one of ``SEEDS``.

    ``values``: {seed setting: its values in the table}. If exactly one seed setting has several values, it is the
    result. Otherwise the result is ``seed``. Each value of any other seed setting has its own row.

    >>> seed_of_means({"seed": [0], "model_seed": [0, 1]}), seed_of_means({"seed": [0, 1], "model_seed": [0, 1]})
    ('model_seed', 'seed')
    """
    several = [name for name in SEEDS if len(values.get(name, ())) > 1]
    return several[0] if len(several) == 1 else "seed"


def seeds_in_words(experiments: Sequence[Experiment]) -> str:
    """Return the text of the caption's line "Seeds": the seeds over which the table averages, and the fixed seeds."""
    found = {name: list(dict.fromkeys(getattr(one, name) for one in experiments)) for name in SEEDS}
    over = seed_of_means(found)
    values, what = found.pop(over), over.replace("_", " ")
    mean = f"mean ± sample standard deviation over {what}s" if len(values) > 1 else f"one {what}"
    listed = ", ".join(map(str, values))
    fixed = [f"{name} {', '.join(map(str, own))}" for name, own in found.items() if own != [None]]
    return "; ".join([f"{mean} {listed}" if len(values) > 1 else f"{mean} ({listed})", *fixed])


def _changed(settings: Any, also: Collection[str] = ()) -> dict[str, Any]:
    """Return {name: value} of all parameters that differ from their defaults, and of the parameters ``also``."""
    changed: dict[str, Any] = {}
    for name, default in field_defaults(type(settings)).items():
        value = getattr(settings, name)
        if value != default and _is_group(value, default):
            changed |= {f"{name}.{inner}": part for inner, part in _changed(value).items()}
        elif value != default or name in also:
            changed[name] = value
    return changed


def _is_group(value: Any, default: Any) -> bool:
    return is_settings(type(value)) and type(value) is type(default) and not hasattr(value, "kind")


def _in_brackets(changed: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{name}={_short(value)}' for name, value in changed.items())})" if changed else ""


def _short(value: Any) -> str:
    """Return a parameter's value as short text. The text for a settings object states its kind and changed settings.

    Some settings objects have no kind. If their class defines the method ``__str__``, the text is made from its result:
    "mlp, trainable=head" of a model becomes "mlp (trainable=head)". Otherwise the text begins with the class's name.
    """
    if is_settings(type(value)):
        changed = _changed(value)
        if not hasattr(value, "kind"):
            if "__str__" not in vars(type(value)):
                return f"{type(value).__name__}{_in_brackets(changed)}"
            name, _, rest = str(value).partition(", ")
            return f"{name} ({rest})" if rest else name
        kind = kind_of(value)
        first = next((name for name in field_defaults(type(value)) if name != "kind"), "")
        return f"{kind}:{_short(changed[first])}" if list(changed) == [first] else f"{kind}{_in_brackets(changed)}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _best(experiments: Sequence[Experiment]) -> str:
    """Return the caption's text on accuracies called "best": it names the records on which the best round is chosen."""
    if all(e.evaluate.measures_nothing for e in experiments):
        return "the same, because nothing is measured"
    if {e.evaluate.test for e in experiments} == {"last"}:
        return "the same, because the test records are used once, after the last round"
    parts = {e.evaluate.validation for e in experiments}
    shares = sorted(part for part in parts if part != "given" and part)
    if not shares and "given" not in parts:
        return "the best evaluated round, picked on the test set and therefore optimistic"
    held_out = " or ".join(f"{100 * share:g} %" for share in shares)
    judged = [f"{held_out} of every client's training records"] if shares else []
    judged += ["the validation records that the data come with"] if "given" in parts else []
    chosen = f"the round that is best on validation, {' or '.join(judged)}"
    return chosen if 0.0 not in parts else f"{chosen}; without them, on the test set and therefore optimistic"


def _federation(experiments: Sequence[Experiment], show: Callable[[Iterable[Any]], str]) -> str:
    return (
        f"{show(e.clients for e in experiments)} clients, model {show(str(e.model) for e in experiments)}"
        f"{_unless('normalise', show(e.normalise for e in experiments), 'published')}"
        f"{_unless('features', show(e.features for e in experiments))}"
        f"{_unless('devices', show(_short(e.devices) for e in experiments))}"
    )


def _exchange(experiments: Sequence[Experiment], show: Callable[[Iterable[Any]], str]) -> str:
    attacks = [f"{_short(e.attack)} by {e.attack.clients} of them" if e.attack.clients else "none" for e in experiments]
    return (
        f"sampler {show(short_form(e.sampler) for e in experiments)}, "
        f"aggregator {show(short_form(e.aggregator) for e in experiments)}"
        f"{_unless('attack', show(attacks))}"
        f"{_unless('compress', show(short_form(e.compress) for e in experiments))}"
    )


def _unless(name: str, values: str, default: str = "none") -> str:
    return "" if values == default else f", {name} {values}"


def _training(experiments: Sequence[Experiment], show: Callable[[Iterable[Any]], str]) -> str:
    local = [e.local for e in experiments]
    further = ""
    for name, words in _RARE.items():
        values = [getattr(one, name) for one in local]
        if {*values} - {0, "none"}:
            further += f", {words} {show(values)}"
    return (
        f"{show(e.rounds for e in experiments)} rounds of {show(map(_length, local))}, "
        f"batch size {show(one.batch_size for one in local)}, {show(_OPTIMIZER[one.optimizer] for one in local)} with "
        f"{show(short_form(one.schedule) for one in local)} learning rate {show(one.learning_rate for one in local)}, "
        f"momentum {show(one.momentum for one in local)}, "
        f"weight decay {show(one.weight_decay for one in local)}{further}"
    )


def _length(local: Local) -> str:
    number, unit = (local.steps, "step") if local.steps else (local.epochs, "epoch")
    return f"{number} local {unit}{'' if number == 1 else 's'}"


def _captions(chosen: Sequence[Any]) -> list[str]:
    kinds = dict.fromkeys(type(one) for one in chosen if isinstance(one, Captioned))
    return [
        said
        for kind in kinds
        for said in kind.captions(
            [one for one in chosen if type(one) is kind], lambda found: _values(map(_short, found))
        )
    ]


def _values(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _with_places(values: Iterable[Any], *, places: Sequence[Sequence[str]]) -> str:
    """Return the most frequent value as text, then each other value with the names of its experiments in ``places``.

    The text uses the first list in ``places`` in which experiments with equal names have equal values. If this list has
    many names, the text uses a shorter list, in which experiments with equal names have few different values.

    >>> _with_places([0.9, 0.0, 0.9], places=[["A", "B", "C"], ["x"] * 3])
    '0.9 (0 for B)'
    """
    texts = [_short(value) for value in values]
    named = []
    for names in places if len(set(texts)) > 1 else ():
        found: dict[str, dict[str, None]] = {}
        for name, one in zip(names, texts, strict=True):
            found.setdefault(name, {})[one] = None
        named.append(found)
    shown = next((found for found in named if all(len(some) == 1 for some in found.values())), None)
    if shown is None:
        return ", ".join(dict.fromkeys(texts))
    if len(shown) > _MOST_PLACES:
        shown = min((found for found in named if all(len(some) <= _FEW for some in found.values())), key=len)
    by_text: dict[str, list[str]] = {}
    for name, some in shown.items():
        by_text.setdefault(" or ".join(some), []).append(name)
    usual = max(by_text, key=lambda text: len(by_text[text]))
    others = (f"{text} for {', '.join(map(_quoted, some))}" for text, some in by_text.items() if text != usual)
    return f"{usual} ({'; '.join(others)})"


def _quoted(place: str) -> str:
    return f"'{place}'" if "," in place else place


def _value_at(experiment: Experiment, key: str) -> str:
    """Return the value of a setting, such as "local.momentum", as text; empty if the experiment lacks the setting."""
    value: Any = experiment
    for name in key.split("."):
        value = getattr(value, name, None)
    return "" if value is None else _short(value)
