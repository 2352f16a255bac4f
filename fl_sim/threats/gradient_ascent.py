"""Gradient ascent: one client unlearns its own records approximately, then all others train (Halimi et al. 2022).

Client u increases the loss on its records by projected gradient ascent. The model must stay in a ball around a
reference model w_ref, from which the ascent starts. The formula w_ref = w - p / (1 - p) (w_u - w) estimates the mean of
the other clients' models. Here w is the final model, w_u is the model of u after one more local training from w, and p
is the weight of u. (Equation 2 of Halimi et al. 2022 is this formula with p = 1 / N for N clients. There, w_u is the
client's model of the last round, which a finished run does not store.) The radius of the ball is a fraction of the mean
distance from w_ref to random initial models. The ascent ends early if the accuracy on a batch is not above chance
level. Some rounds of the other clients follow.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from fl_sim.params import detached, inner_product, subtract, trainable
from fl_sim.seeding import rng
from fl_sim.threats.replay import LocalSteps, Replay
from fl_sim.types import Params, ServerState
from strategies.algorithm import payload_template, weighting_of

_RANDOM_MODELS = 10
_LARGEST_GRADIENT = 5.0  # gradients are clipped to this L2 norm, as in the authors' code


@dataclass(frozen=True)
class GradientAscent:
    """The settings of gradient ascent.

    ``radius``: the radius of the ball around the reference model, as a fraction of the mean distance between the
    reference model and random models; 1/3 in Halimi et al. 2022. ``epochs``: the maximum number of epochs of ascent
    over the client's records. ``rounds``: the number of rounds of the other clients after the ascent.
    """

    radius: float = 1 / 3
    epochs: int = 5
    rounds: int = 3

    def unlearned(self, replay: Replay, client: int, first: int) -> tuple[ServerState, LocalSteps]:
        """Return the server state after unlearning ``client``, and the numbers of rounds and local steps.

        ``first``, the client's first round, is not used by this method.
        """
        del first
        server, after = replay.last, replay.num_rounds
        reference = self.reference(replay, client)
        params, steps = self.ascended(replay, client, reference)
        server, work = replace(server, params=params), LocalSteps(rounds=1, steps=steps + replay.num_steps(client))
        for server_round in range(after + 1, after + 1 + self.rounds):
            if clients := replay.cohort(server_round, client):
                server = replay.merged(server, replay.updates(server, clients, server_round), server_round)
            work += LocalSteps(rounds=1, steps=sum(map(replay.num_steps, clients)))
        return server, work

    def reference(self, replay: Replay, client: int) -> Params:
        """Return the reference model, an estimate of the mean of the other clients' models."""
        server, sizes = replay.last, replay.finished.job.shards.sizes
        [group] = payload_template(replay.strategy.algorithm, server)
        [reply] = replay.updates(server, [client], replay.num_rounds + 1)
        is_by_records = weighting_of(replay.strategy.algorithm) == "examples"
        weight = float(sizes[client] / sizes.sum()) if is_by_records else 1 / int((sizes > 0).sum())
        change = reply.payloads[group]
        return {name: value - change[name] * (weight / (1 - weight)) for name, value in server.params.items()}

    def ascended(self, replay: Replay, client: int, reference: Params) -> tuple[Params, int]:
        """Return the parameters after gradient ascent on the client's records, and the number of ascent steps."""
        job = replay.finished.job
        local, model = job.experiment.local, job.model().to(job.device)
        inputs, labels = replay.finished.held_by(client)
        coins = rng(job.experiment.seed, "gradient ascent", client)
        seeds = rng(job.experiment.seed, "random models").integers(2**31, size=_RANDOM_MODELS).tolist()
        others = [detached(trainable(job.built(seed)).items()) for seed in seeds]
        radius = self.radius * float(np.mean([distance(reference, other) for other in others]))
        centre = {name: value.to(job.device) for name, value in reference.items()}
        params: Params = centre
        model.load_state_dict(dict(replay.last.model), strict=False)
        model.eval()
        rate, steps = replay.rate(replay.num_rounds), 0
        for chosen in _batches(self.epochs, len(labels), local.batch_size, coins):
            gradient, right = _gradient(model, params, inputs[chosen], labels[chosen])
            if right <= 1 / job.dataset.num_classes:
                break
            length = math.sqrt(inner_product(gradient, gradient))
            step = rate * min(1.0, _LARGEST_GRADIENT / max(length, 1e-30))
            params = projected({name: value + step * gradient[name] for name, value in params.items()}, centre, radius)
            steps += 1
        return {name: value.cpu() for name, value in params.items()}, steps


def distance(left: Params, right: Params) -> float:
    """Return the L2 distance between the parameters of two models.

    A tensor that only one of the models has is ignored.
    """
    both = [name for name in left if name in right]
    gap = subtract({name: left[name] for name in both}, {name: right[name] for name in both})
    return math.sqrt(inner_product(gap, gap))


def projected(params: Params, centre: Params, radius: float) -> Params:
    """Return the point nearest to ``params`` in the ball of ``radius`` around ``centre``."""
    if (far := distance(params, centre)) <= radius:
        return params
    return {name: value + (params[name] - value) * (radius / far) for name, value in centre.items()}


def _batches(epochs: int, count: int, size: int, coins: np.random.Generator) -> Iterator[torch.Tensor]:
    for _ in range(epochs):
        yield from torch.split(torch.from_numpy(coins.permutation(count)), size)


def _gradient(model: nn.Module, params: Params, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[Params, float]:
    """Return the gradient of the mean cross-entropy of a batch, and the accuracy on this batch, in [0, 1]."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    logits = functional_call(model, leaves, (inputs,))
    found = torch.autograd.grad(functional.cross_entropy(logits, labels), list(leaves.values()))
    return dict(zip(leaves, found, strict=True)), float((logits.argmax(1) == labels).float().mean())
