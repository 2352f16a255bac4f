"""The layer of models of different sizes: each entry of the model is averaged over the clients that have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, is_none, is_own, kind_of
from fl_sim.params import flattened, head_names
from fl_sim.types import Aggregate, Cohort, ServerState
from strategies.aggregators import check_finite
from strategies.algorithm import Sizing, check_one_shape
from strategies.layer import Beginning, Layer, layer_kinds

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.narrow_models import Places
    from strategies.algorithm import Algorithm

CLASSES: Final = "classes"
"""Name of the payload with a 0/1 mask of the classes that a client has."""


class PartsOfModel(Sizing, Protocol):
    """An algorithm whose clients have models of different sizes, and whose server averages each entry."""

    def check_model(self, model: nn.Module) -> None:
        """Raise UserError if no smaller models can be made from ``model``."""
        ...

    def places(self, server: ServerState, size: float) -> Places:
        """Return the positions in the whole model of all entries that a model of ``size`` has."""
        ...


def check_one_size(algorithm: object, experiment: Choices) -> None:
    """Raise ValueError if a setting needs models of one size: clients of ``algorithm`` have models of several sizes."""
    if (aggregator := kind_of(experiment.aggregator)) != "mean":
        why = "this aggregator compares or bounds updates of one shape"
        if hides_clients(experiment.aggregator):
            why = "the number of clients behind an entry is secret, so a fixed noise would not fit its mean"
        raise ValueError(
            f"algorithm {kind_of(algorithm)} cannot run with aggregator {aggregator}: each entry of the model is the "
            f"mean over those clients that have it, and {why}; leave aggregator out, or take fedavg"
        )
    further = {
        "compress": (kind_of(experiment.compress), is_none(experiment.compress)),
        "attack": (kind_of(experiment.attack), experiment.attack.clients == 0),
        "model.trainable": (experiment.model.trainable, experiment.model.trainable == "all"),
    }
    why = f"algorithm {kind_of(algorithm)} gives clients models of different sizes"
    check_one_shape(experiment, why, "take fedavg", further)


class MeanOfHolders(Layer):
    """Averages each entry of a parameter over the clients that have it, weighted by their numbers of records."""

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if the run has a user-defined layer, because it may expect updates of equal shapes."""
        del beginning
        if own := [kind for kind in layer_kinds(experiment) if is_own(kind)]:
            raise UserError(
                f"algorithm {kind_of(experiment.algorithm)} has updates of different shapes, and {own[0].__name__}, a "
                "round layer of your own, expects one shape: leave out one of the two"
            )

    @classmethod
    def begun(cls, experiment: Any, model: nn.Module, server: ServerState) -> ServerState:
        """Raise UserError if no smaller models can be made from the model. Return ``server`` unchanged."""
        experiment.algorithm.check_model(model)
        return server

    def aggregate(self, cohort: Cohort, algorithm: Algorithm, server: ServerState) -> Aggregate | None:
        """Return the mean update of each parameter entry, and 0 for an entry that no client of the cohort has.

        If all clients have the whole model, the result is the aggregator's mean.
        """
        parts = cast("PartsOfModel", algorithm)
        sizes = {one.client: parts.size_of(one.client, server) for one in cohort.replies}
        trained = [one for one in cohort.replies if one.num_examples]
        if set(sizes.values()) <= {1.0} and not any(CLASSES in one.payloads for one in trained):
            return self.inner.aggregate(cohort, algorithm, server)
        head = head_names(server.params)
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in server.params.items()}
        weights = {name: torch.zeros_like(value) for name, value in total.items()}
        for reply in cohort.replies:
            check_finite(reply, cohort.server_round)
        for reply in trained:
            places = parts.places(server, sizes[reply.client])
            classes = reply.payloads[CLASSES]["held"] > 0 if CLASSES in reply.payloads else torch.ones(())
            for name, delta in reply.payloads["delta"].items():
                share = reply.num_examples * torch.ones_like(delta, dtype=torch.float64)
                if name in head and classes.ndim:
                    share *= classes.reshape(-1, *[1] * (delta.ndim - 1))
                total[name][places[name]] += share * delta
                weights[name][places[name]] += share
        mean = {name: (value / weights[name].clamp(min=1)).to(server.params[name]) for name, value in total.items()}
        return Aggregate({"delta": flattened(mean)}, cohort.participation(len(trained))) if trained else None
