"""Algorithms with several global models, of which each client trains one: initial models, and layers for updates."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from clients.client_layer import ClientLayer
from fl_sim.errors import Malformed, UserError
from fl_sim.importing import torch
from fl_sim.kinds import Choices, hides_clients, is_none, kind_of
from fl_sim.params import FlatParams, flattened, layout_of
from fl_sim.seeding import rng
from fl_sim.types import ClientUpdate, LocalTask, Packed, Params, Payloads, Reply, Size, Trained
from strategies.aggregators import cohort_size
from strategies.layer import Beginning, Layer

if TYPE_CHECKING:
    from torch import nn

    from fl_sim.store.run_directory import RoundRecord

CHOSEN: Final = "chosen"
"""Name of the payload with the client's choice: a vector with 1 for the chosen model and 0 for all others."""


def model_name(number: int) -> str:
    """Return the name of the broadcast tensors of a model. Models are counted from 0; model 0 is the global model."""
    return f"model-{number}"


def delta_name(number: int) -> str:
    """Return the name of the payload with the update of a model. Models are counted from 0."""
    return f"delta-{number}"


def models_of(first: Params, others: Payloads) -> Sequence[Params]:
    """Return all models: the global model ``first``, then the models among the broadcast tensors ``others``."""
    return [first, *(others[model_name(j)] for j in range(1, 1 + len(others)))]


def further_models(params: Params, count: int, spread: float | Literal["shuffled"]) -> Payloads:
    """Return {name: initial model} for all ``count`` models except the first one, which is ``params``.

    ``spread``: the standard deviation of the normal noise that is added to ``params``, or "shuffled" for the values of
    each tensor in random order. Raises UserError if the order of values makes no difference.
    """
    return {model_name(j): _another(params, j, spread) for j in range(1, count)}


def _another(params: Params, number: int, spread: float | Literal["shuffled"]) -> Params:
    draw = rng(_digest(params), "several models", number)
    if spread != "shuffled":
        noise = {name: torch.from_numpy(draw.standard_normal(tuple(one.shape))) for name, one in params.items()}
        return {name: value + spread * noise[name].to(value.dtype) for name, value in params.items()}
    orders = {name: torch.from_numpy(draw.permutation(value.numel())) for name, value in params.items()}
    other = {name: value.flatten()[orders[name]].reshape(value.shape) for name, value in params.items()}
    if all(torch.equal(value, other[name]) for name, value in params.items()):
        raise UserError(
            "algorithm.spread=shuffled makes no second model: the values of each tensor of the initial model are all "
            "the same; set algorithm.spread to a number, such as 0.05"
        )
    return other


def _digest(params: Params) -> int:
    content = hashlib.sha256()
    for value in params.values():
        content.update(value.detach().numpy().tobytes())
    return int.from_bytes(content.digest()[:8], "big")


def check_choices(algorithm: object, count: int, experiment: Choices) -> None:
    """Raise ValueError if a setting does not fit ``algorithm``, whose clients choose among ``count`` models."""
    what = f"algorithm {kind_of(algorithm)} cannot run"
    if hides_clients(experiment.aggregator):
        raise ValueError(
            f"{what} under aggregator {kind_of(experiment.aggregator)}: a client's choice of a model depends on its "
            "records, and no noise covers it; take fedavg, fedprox or scaffold"
        )
    if (personal := experiment.local.personal) != "none":
        raise ValueError(
            f"{what} with local.personal={personal}: clients choose among whole models, and no part of them stays with "
            "a client; leave local.personal out"
        )
    if count > 1 and not is_none(experiment.compress):
        raise ValueError(
            f"{what} with compress {kind_of(experiment.compress)}: clients send only the chosen model's update, in a "
            "special format that compress does not read; leave compress out"
        )
    if count > 1 and (norms := experiment.local.batch_norm) != "none":
        raise ValueError(
            f"{what} with local.batch_norm={norms}: running statistics would be averaged over the clients of all "
            "models; leave local.batch_norm out, and take a model without BatchNorm"
        )


class SeveralModels(Layer):
    """Base class of the layers of algorithms with several models, of which each client trains one.

    ``chosen``: {client: index of the model of its last round}. ``counts``: the number of clients of each model in the
    last round; empty before the first round. ``column``: the name of a column in the file ``clients.csv``. The column
    lists each client's model.
    """

    column: ClassVar[str] = "chosen_model"

    def __init__(self, chosen: Mapping[int, int], counts: Sequence[int]) -> None:
        self.chosen, self.counts = dict(chosen), list(counts)

    @classmethod
    def applies(cls, experiment: Any) -> bool:
        """Return True if the algorithm has several global models."""
        return bool(experiment.algorithm.num_models > 1)

    def facts(self) -> Mapping[str, Any]:
        """Return the field ``clients_of_models`` for ``result.json``: the number of clients that chose each model."""
        counts = np.bincount(list(self.chosen.values()), minlength=len(self.counts))
        return {"clients_of_models": counts.tolist()} if self.chosen else {}


class OneUpdate(SeveralModels):
    """Counts the clients that choose each model. On clients, leaves out the updates of models that were not chosen."""

    @classmethod
    def of(cls, experiment: Any, out: Path, progress: Mapping[str, Any]) -> OneUpdate:
        """Return the layer for a run. In a resumed run it contains the clients' choices of earlier rounds."""
        del experiment, out
        known = zip(progress.get("clients", []), progress.get("models", []), strict=True)
        return cls(dict(known), progress.get("counts", []))

    @classmethod
    def on_clients(cls, experiment: Any, algorithm: object, model: Callable[[], nn.Module]) -> ClientLayer:
        """Return the layer's code on clients: a client sends only the update of its chosen model."""
        del algorithm, model
        return ClientOneUpdate(experiment.algorithm.num_models)

    @classmethod
    def warnings(cls, experiment: Any, rounds_done: int, idle: Sequence[int]) -> Sequence[str]:
        """Return warnings if cohorts have fewer clients than there are models, or if only one model is measured."""
        del rounds_done, idle
        said, count, size = list[str](), experiment.algorithm.num_models, cohort_size(experiment)
        if size < count:
            said.append(
                f"algorithm.num_models={count} is more than the {size:g} clients of a round: in every round some "
                "models are trained by no client; take a larger cohort, or fewer models"
            )
        if not experiment.evaluate.measures_clients:
            said.append(
                f"the test accuracy is that of the first of {count} models: set evaluate.clients to measure the model "
                "that each client chooses"
            )
        return said

    @classmethod
    def check(cls, experiment: Any, beginning: Beginning) -> None:
        """Raise UserError if a stage trains the evaluated model at the server: it is only one of several models."""
        if beginning.whole:
            raise UserError(
                f"algorithm {kind_of(experiment.algorithm)} has several models, and {beginning.whole[0]} trains one at "
                "the server: leave out one of the two"
            )

    def received(self, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
        """Store which model each client chose. Return the updates as the inner layer returns them."""
        found = {one.client: int(one.payloads[CHOSEN]["share"].abs().argmax()) for one in replies if one.num_examples}
        self.chosen |= found
        count = Counter(found.values())
        num_models = len(replies[0].payloads[CHOSEN]["share"]) if replies else len(self.counts)
        self.counts = [count[j] for j in range(num_models)]
        return self.inner.received(replies)

    def state(self) -> Mapping[str, Any]:
        """Return the clients' choices of models, for the checkpoint."""
        return {"clients": list(self.chosen), "models": list(self.chosen.values()), "counts": self.counts}

    def conclusions(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return a warning about models that no client chose in the last round."""
        empty, said = [j for j, count in enumerate(self.counts) if not count], self.inner.conclusions(rounds)
        if any(self.counts) and empty:
            named = f"model {empty[0]}" if len(empty) == 1 else f"models {', '.join(map(str, empty))}"
            said.append(
                f"in the last round no client chose {named} (from 0) of algorithm.num_models={len(self.counts)}, which "
                f"stayed unchanged; clients of each model: {', '.join(map(str, self.counts))}. Other initial models "
                "may separate clients better: try another model_seed or algorithm.spread, or fewer models"
            )
        return said


@dataclass(frozen=True)
class ClientOneUpdate(ClientLayer):
    """Sends only the update of the chosen model. The server restores zeros as the updates of all other models."""

    num_models: int

    def sent(self, came: LocalTask, task: LocalTask, trained: Trained, update: ClientUpdate) -> ClientUpdate:
        """Return the message with only the chosen model's update, under the name of the first model's update.

        The payloads of all other models are empty.
        """
        del came, task, trained
        payloads = {**update.payloads}
        deltas = [payloads.pop(delta_name(j)) for j in range(self.num_models)]
        chosen = int(payloads[CHOSEN]["share"].argmax())
        packed = {delta_name(j): Packed.of(torch.zeros(0)) for j in range(self.num_models)}
        packed[delta_name(0)] = Packed.of(flattened(deltas[chosen]).flat)
        return replace(update, payloads=payloads, packed={**update.packed, **packed})

    def packs(self, template: Payloads, model: Params) -> Mapping[str, Size]:
        """Return the payload size of each model: the size of one update for the first model, 0 for all others."""
        del model
        size = flattened(template[delta_name(0)]).flat.numel()
        return {delta_name(j): Size(size if j == 0 else 0) for j in range(self.num_models)}

    def unpacked(self, reply: Reply, template: Payloads, server_round: int) -> Reply:
        """Return the reply with one update per model. Raises Malformed if not exactly one model is chosen."""
        del server_round
        share = reply.payloads[CHOSEN]["share"]
        if sorted(share.tolist()) != [0.0] * (self.num_models - 1) + [1.0]:
            raise Malformed("chose no model, or more than one", cure="check the code of this client")
        chosen, packed = delta_name(int(share.argmax())), {**reply.packed}
        sent, *_ = [packed.pop(delta_name(j)) for j in range(self.num_models)]
        update = FlatParams(sent.numbers, layout_of(template[chosen]))
        payloads = {name: update if name == chosen else reply.payloads.get(name, template[name]) for name in template}
        return replace(reply, payloads=payloads, packed=packed)
