"""Statistics over clients, such as the mean accuracy of the clients' own models.

The statistics are computed from the counts of records and predictions in the clients' answers. ``OwnMeasures`` stores
the answers of all clients after one round. A client tests up to four models (see ``clients.evaluate``). "received": the
model from the server. "own": the client's own model, such as a personal model. "trained": the received model after one
more round of local training. "fine_tuned": the own model after some epochs of plain SGD.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clients.evaluate import MODELS, OWN, ROWS, TESTED, VALIDATED, OwnAnswer
from fl_sim.simulation.stage import VALIDATION_ACCURACY
from fl_sim.training.evaluation import ClassCounts, OverClients, known

HELD_OUT: Final = "held_out_"
"""Prefix of the measures over clients that never took part in a round."""

_ON_OWN: Final = " on their own test records, mean over clients, in percent"
_OF_ALL: Final = " of the clients' own models, over all their own test records together, in percent"
_WORSE: Final = "worse than the model that the client trains alone, in percent"

TITLES: Final = {
    "personal.own_accuracy_percent": f"Accuracy of the clients' own models{_ON_OWN}",
    "personal.own_worst_tenth_percent": "Accuracy of the worst tenth of the clients, each with its own model, percent",
    "personal.own_balanced_accuracy_percent": f"Balanced accuracy{_OF_ALL}",
    "personal.own_macro_f1_percent": f"Macro-F1{_OF_ALL}",
    "personal.own_mean_balanced_accuracy_percent": f"Balanced accuracy of the clients' own models{_ON_OWN}",
    "personal.own_mean_macro_f1_percent": f"Macro-F1 of the clients' own models{_ON_OWN}",
    "personal.own_worse_than_alone_percent": f"Share of clients whose own model is {_WORSE}",
    "personal.received_accuracy_percent": f"Accuracy of the models that clients receive{_ON_OWN}",
    "personal.trained_accuracy_percent": f"Accuracy after one more round of local training{_ON_OWN}",
    "personal.fine_tuned_accuracy_percent": f"Accuracy of the clients' own models after fine-tuning{_ON_OWN}",
    "personal.fine_tuned_worse_than_alone_percent": f"Share of clients whose fine-tuned model is {_WORSE}",
    "personal.held_out_fine_tuned_accuracy_percent": f"Accuracy of fine-tuned models of held-out clients{_ON_OWN}",
    "personal.by_source.*.own_accuracy_percent": f"Accuracy of the own models of each source's clients{_ON_OWN}",
    "personal.by_class.*.own_recall_percent": "Recall of each class by own models, mean over clients in percent",
    "personal.by_client.own": "accuracy of the client's own model",
}
"""The titles of measures in tables of runs (``Stage.titles``)."""


@dataclass(frozen=True, eq=False)
class OwnMeasures:
    """The clients' test results after a round, and statistics over clients.

    ``answers``: one answer with counts for each client; empty before the first measurement. ``members``: the clients
    that take part in rounds. ``by_class``: False if clients count correct predictions in total, and not for each class.
    """

    answers: Sequence[OwnAnswer]
    members: NDArray[np.int64]
    by_class: bool = True

    @property
    def models(self) -> Sequence[str]:
        """Return the names of the tested models, such as "own"."""
        return [name for name in MODELS if any(f"{name}/{TESTED}" in one.counts for one in self.answers)]

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Return all measures, {name: value}: first over participating clients, then over held-out clients."""
        return {
            f"{group}{model}_{name}": value
            for group, chosen in self._groups.items()
            for model in MODELS
            for name, value in self._over_clients(model, chosen).items()
        }

    @property
    def recalls(self) -> dict[str, list[float | None]]:
        """Return the recall of each class over all clients' test records, {name: recalls}.

        Names are, for example, ``own_recalls`` and ``held_out_own_recalls``. The recall of a class without records is
        None.
        """
        return {
            f"{group}{model}_recalls": [None if np.isnan(one) else one for one in counts.recalls.tolist()]
            for group, chosen in self._groups.items()
            for model in self.models
            if self.by_class
            if (counts := self._pooled(model, chosen)).held.any()
        }

    def by_source(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return mean accuracies by data source: {name of the source: {"own_accuracy": ...}}.

        Each accuracy is the mean over the clients of the source that have test records. A source without such clients
        is left out. ``names``: the name of each client's source, "" for a client without a source.
        """
        accuracies, sources = {model: self.accuracies(model) for model in self.models}, np.array(names)
        tested = {
            name: {f"{model}_accuracy": known(values[sources == name]) for model, values in accuracies.items()}
            for name in dict.fromkeys(filter(None, names))
        }
        return {
            name: {model: float(values.mean()) for model, values in found.items()}
            for name, found in tested.items()
            if all(map(len, found.values()))
        }

    def recall_of_classes(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the recall of each class: {name of the class: {"own_recall": mean over clients, ...}}.

        Each recall is the mean over the participating clients that have test records of the class. A class without such
        clients is left out. The result is empty if ``by_class`` is False. ``names``: the names of all classes.
        """
        found: dict[str, dict[str, float]] = {}
        for model in self.models if self.by_class else ():
            held, _, right = self._counts(model, TESTED)[self._groups[""]].swapaxes(0, 1)
            for name, values in zip(names, map(known, _ratio(right, held).T), strict=True):
                if len(values):
                    found.setdefault(name, {})[f"{model}_recall"] = float(values.mean())
        return found

    @property
    def _groups(self) -> dict[str, NDArray[np.bool_]]:
        """Return the masks of participating and of held-out clients, {prefix for the names of measures: mask}."""
        if not self.answers:
            return {}
        taking_part = np.zeros(len(self.answers), dtype=np.bool_)
        taking_part[self.members] = True
        return {"": taking_part, HELD_OUT: ~taking_part}

    def _over_clients(self, model: str, chosen: NDArray[np.bool_]) -> dict[str, float]:
        """Return statistics of a model over some clients, {name: value}. Statistics without data are left out.

        ``model``: the name of the model, such as "own". ``chosen``: a mask of the clients.
        """
        measures: dict[str, float] = {}
        if len(tested := known(self.accuracies(model, TESTED)[chosen])):
            over, pooled = OverClients.of(tested), self._pooled(model, chosen)
            measures = {
                "accuracy": over.mean,
                "accuracy_pooled": float(pooled.right.sum() / pooled.held.sum()),
                "worst_tenth": over.worst_tenth,
                "deviation": over.deviation,
                "entropy": over.entropy,
            }
            if by_client := self.over_classes(model):
                measures |= {"balanced_accuracy": pooled.balanced_accuracy, "macro_f1": pooled.macro_f1}
                measures |= {f"mean_{name}": float(known(values[chosen]).mean()) for name, values in by_client.items()}
        for name, values in self.metrics(model).items():
            if len(given := known(values[chosen])):
                measures[name] = float(given.mean())
        validated = known(self.accuracies(model, VALIDATED)[chosen])
        return measures | ({VALIDATION_ACCURACY: float(validated.mean())} if len(validated) else {})

    def accuracies(self, model: str, what: str = TESTED) -> NDArray[np.float64]:
        """Return each client's accuracy with ``model``, or NaN for a client without records.

        ``what``: the kind of records, "test" or "validation".
        """
        held, _, right = self._counts(model, what).sum(axis=2).T
        return _ratio(right, held)

    def over_classes(self, model: str) -> dict[str, NDArray[np.float64]]:
        """Return each client's balanced accuracy and macro-F1 of ``model``, {name of the measure: (clients,)}.

        Balanced accuracy is the mean recall, and macro-F1 the mean F1 score, over the classes of the client's test
        records. A client without test records has NaN. The result is empty if ``by_class`` is False.
        """
        if not self.by_class:
            return {}
        held, predicted, right = self._counts(model, TESTED).swapaxes(0, 1)
        scores = {
            "balanced_accuracy": _ratio(right, held),
            "macro_f1": _ratio(2 * right, (held + predicted) * (held > 0)),
        }
        num_classes = (held > 0).sum(axis=1)
        return {name: _ratio(np.nansum(each, axis=1), num_classes) for name, each in scores.items()}

    def metrics(self, model: str) -> dict[str, NDArray[np.float64]]:
        """Return the user-defined metrics of ``model``, {name: one number per client}. A missing number is NaN."""
        start = f"{model}/"
        names = dict.fromkeys(name for one in self.answers for name in one.metrics if name.startswith(start))
        return {
            name.removeprefix(start): np.array([one.metrics.get(name, np.nan) for one in self.answers])
            for name in names
        }

    @property
    def num_with_metric(self) -> dict[str, int]:
        """Return the number of clients that returned each user-defined metric, {"own_NAME": number}."""
        return {
            f"{model}_{name}": len(known(values)) for model in MODELS for name, values in self.metrics(model).items()
        }

    def _pooled(self, model: str, chosen: NDArray[np.bool_]) -> ClassCounts:
        """Return the total counts of test records and predictions of the ``chosen`` clients, for each class."""
        return ClassCounts(*self._counts(model, TESTED)[chosen].sum(axis=0))

    def _counts(self, model: str, what: str) -> NDArray[np.int64]:
        """Return the rows of ``ClassCounts`` of all clients, shape (clients, 3, classes).

        ``what``: the kind of records, "test" or "validation". A client without records has the count 0 everywhere.
        """
        named = [one.counts.get(f"{model}/{what}") for one in self.answers]
        num_classes = next((one.shape[1] for one in named if one is not None), 1)
        blank = np.zeros((ROWS, num_classes), dtype=np.int64)
        return np.stack([blank if one is None else one for one in named])


def _ratio(part: NDArray[Any], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the elementwise ratio ``part`` / ``whole``; NaN where ``whole`` is 0."""
    shares = np.full(whole.shape, np.nan)
    np.divide(part, whole, out=shares, where=whole > 0)
    return shares


def worse_than_alone(alone: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of clients whose model is less accurate in the run ``result`` than in the run ``alone``.

    In the run ``alone``, each client trains a model on its own records only. Both arguments are contents of
    ``result.json``, of runs with the same partition. The result is {name of the measure: share in percent}. Only
    clients that both runs tested are counted.
    """
    lists = [one.get("personal", {}).get("by_client", {}) for one in (alone, result)]
    found, before = {}, lists[0].get(OWN, [])
    for model, accuracies in lists[1].items():
        pairs = [(new, old) for new, old in zip(accuracies, before, strict=False) if None not in (new, old)]
        if pairs:
            share = sum(new < old for new, old in pairs) / len(pairs)
            found[f"personal.{model}_worse_than_alone_percent"] = 100 * share
    return found
