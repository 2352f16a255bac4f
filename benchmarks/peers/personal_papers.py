"""Personal methods in plain loops, as their papers have them, and with the departures that are found in programs.

A function returns the outcome after ``problem.way.rounds`` rounds, and each client's scores on the test records.
Without keywords a loop is the paper's; means are weighted by numbers of records, unless the paper says otherwise. A
program's departures are understood once a loop with keywords comes to the program's numbers. Needs PyTorch alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from personal_problem import BODY, HEAD, Outcome, Params, Problem, flat, outcome
from torch import Tensor
from torch.func import grad
from torch.nn import functional

Weights = Literal["records", "uniform"]
Result = tuple[Outcome, list[Tensor]]
Phase = tuple[Sequence[str], int]


def features(params: Params, inputs: Tensor) -> Tensor:
    """Return z, the inputs of the last layer, of shape (n, 20)."""
    return functional.linear(inputs.flatten(1), params["1.weight"], params["1.bias"]).relu()


def head(params: Params, z: Tensor) -> Tensor:
    """Return the logits of the last layer."""
    return functional.linear(z, params["3.weight"], params["3.bias"])


def logits(params: Params, inputs: Tensor) -> Tensor:
    """Return the network's logits, of shape (n, 10)."""
    return head(params, features(params, inputs))


def loss_on(shard: tuple[Tensor, Tensor]) -> Callable[[Params], Tensor]:
    """Return the function from parameters to the mean cross-entropy over a client's records."""
    inputs, labels = shard
    return lambda params: functional.cross_entropy(logits(params, inputs), labels)


def add(one: Params, other: Params, factor: float) -> Params:
    """Return ``one`` plus ``factor`` times ``other``; names that ``other`` lacks stay."""
    return {name: value + factor * other[name] if name in other else value for name, value in one.items()}


def mix(one: Params, other: Params, share: float) -> Params:
    """Return ``share`` times ``one`` plus the rest times ``other``."""
    return {name: share * value + (1 - share) * other[name] for name, value in one.items()}


def mean(problem: Problem, models: Sequence[Params], weights: Weights = "records") -> Params:
    """Return the mean of the clients' models."""
    sizes = torch.tensor(problem.sizes if weights == "records" else [1] * len(models), dtype=torch.float64)
    shares = (sizes / sizes.sum()).tolist()
    return {
        name: sum((share * model[name] for share, model in zip(shares, models, strict=True)), torch.zeros(()))
        for name in models[0]
    }


def parts(params: Params, names: Sequence[str]) -> Params:
    """Return the parameters called ``names``."""
    return {name: params[name] for name in names}


def gradient(loss: Callable[[Params], Tensor], params: Params) -> Params:
    """Return the gradient with respect to all of ``params``."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), [*leaves.values()]), strict=True))


def descend(params: Params, loss: Callable[[Params], Tensor], rate: float, phase: Phase) -> Params:
    """Return the parameters after a phase: so many steps of SGD on the named ones."""
    names, steps = phase
    trained = parts(params, names)
    for _ in range(steps):
        trained = add(trained, gradient(lambda some: loss({**params, **some}), trained), -rate)
    return {**params, **trained}


def all_scores(problem: Problem, models: Sequence[Params]) -> list[Tensor]:
    """Return the logits of each client's model on the test records."""
    return [logits(model, problem.test[0]) for model in models]


def partial(
    problem: Problem, sent: Sequence[str], phases: Sequence[Phase], fine_tuned: Literal["", "averaged", "own"] = ""
) -> Result:
    """Average the parameters called ``sent`` (FedPer, LG-FedAvg, FedRep, FedBABU); the others are own.

    ``fine_tuned``: at the end clients train all parameters for a round's steps, from the averaged parameters as in
    FedBABU, or from their own last ones.
    """
    way, models = problem.way, [dict(problem.start) for _ in problem.shards]
    server = parts(problem.start, sent)
    for _ in range(way.rounds):
        for client, shard in enumerate(problem.shards):
            models[client] |= server
            for phase in phases:
                models[client] = descend(models[client], loss_on(shard), way.rate, phase)
        server = mean(problem, [parts(model, sent) for model in models])
    names = tuple(name for name in problem.start if name in sent)
    kept = tuple(name for name in problem.start if name not in sent)
    own = [flat(model, kept) for model in models] if kept else None
    used = [{**model, **server} for model in models]
    if fine_tuned:
        starts = used if fine_tuned == "averaged" else models
        every: Phase = (tuple(problem.start), way.steps)
        used = [
            descend(one, loss_on(shard), way.rate, every) for one, shard in zip(starts, problem.shards, strict=True)
        ]
        own = [flat(one) for one in used]
    return outcome(flat(server, names), own), all_scores(problem, used)


def fedper(problem: Problem) -> Result:
    """Average the body."""
    return partial(problem, BODY, [((*BODY, *HEAD), problem.way.steps)])


def lg_fedavg(problem: Problem, sent: Sequence[str] = HEAD) -> Result:
    """Average the head."""
    return partial(problem, sent, [((*BODY, *HEAD), problem.way.steps)])


def fedrep(problem: Problem) -> Result:
    """Train the head before the body, and average the body."""
    return partial(problem, BODY, [(HEAD, problem.way.steps), (BODY, problem.way.steps)])


def fedbabu(problem: Problem, fine_tuned: Literal["averaged", "own"] = "averaged") -> Result:
    """Train and average the body; clients fine-tune the averaged model at the end."""
    return partial(problem, BODY, [(BODY, problem.way.steps)], fine_tuned)


def fedrod(
    problem: Problem, begins: Literal["zero", "generic"] = "generic", *, sums: bool = True, cuts: bool = True,
    relays: bool = False,
) -> Result:  # fmt: skip
    """Train body and generic head by balanced softmax, and a personal head on the sum of both heads' logits.

    ``begins``: the personal head's first values. ``sums`` False: it trains and predicts alone. ``cuts`` False: its
    loss trains the body, too. ``relays``: a client goes on from the last client's generic model, not from the mean, and
    in the first round also from its personal head.
    """
    way, x, carried = problem.way, dict(problem.start), dict(problem.start)
    first = parts(problem.start, HEAD)
    heads = [first if begins == "generic" else add(first, first, -1.0) for _ in problem.shards]

    def joined(generic: Params, own: Params, inputs: Tensor) -> Tensor:
        z = features(generic, inputs)
        z, fixed = (z.detach(), head(generic, z).detach()) if cuts else (z, head(generic, z).detach())
        return head(own, z) + fixed if sums else head(own, z)

    for number in range(way.rounds):
        models = []
        for client, (inputs, labels) in enumerate(problem.shards):
            generic, own, prior = carried if relays else x, heads[client], problem.counts(client).log()
            if relays and not number and client:
                own = heads[client - 1]

            def loss(generic: Params, own: Params, inputs: Tensor = inputs, labels: Tensor = labels,
                     prior: Tensor = prior) -> Tensor:  # fmt: skip
                both = functional.cross_entropy(logits(generic, inputs) + prior, labels)
                return both + functional.cross_entropy(joined(generic, own, inputs), labels)

            for _ in range(way.steps):
                of_generic, of_own = grad(loss, (0, 1))(generic, own)
                generic, own = add(generic, of_generic, -way.rate), add(own, of_own, -way.rate)
            heads[client], carried = own, generic
            models.append(generic)
        x = mean(problem, models)
    used = carried if relays else x
    return outcome(flat(x), [flat(own, HEAD) for own in heads]), [joined(used, own, problem.test[0]) for own in heads]


def ditto(problem: Problem) -> Result:
    """Train x by FedAvg, and an own model v that is pulled to the received x."""
    way, x, owns = problem.way, dict(problem.start), [dict(problem.start) for _ in problem.shards]
    for _ in range(way.rounds):
        models = []
        for client, shard in enumerate(problem.shards):
            loss, own = loss_on(shard), owns[client]
            models.append(descend(x, loss, way.rate, (tuple(x), way.steps)))
            for _ in range(way.steps):
                own = add(add(own, gradient(loss, own), -way.rate), add(own, x, -1.0), -way.rate * way.strength)
            owns[client] = own
        x = mean(problem, models)
    return outcome(flat(x), [flat(own) for own in owns]), all_scores(problem, owns)


def alone(problem: Problem) -> Result:
    """Train each client's own model, and average nothing: Ditto without its pull."""
    found, scores = ditto(replace(problem, way=replace(problem.way, strength=0.0)))
    return outcome(None, list(found.own)), scores


def pfedme(
    problem: Problem, weights: Weights = "uniform", decay: float = 0.0, *, pulls: bool = True, sends_own: bool = False,
    tests: Literal["theta", "received", "start"] = "theta",
) -> Result:  # fmt: skip
    """Solve each batch for theta near w, and move w towards theta.

    ``decay``: a weight decay in theta's steps. ``pulls`` False: theta's steps are not pulled to w. ``sends_own``: theta
    is averaged in the place of w. ``tests``: the model that is tested as the client's own.
    """
    way, x, owns = problem.way, dict(problem.start), [dict(problem.start) for _ in problem.shards]
    for _ in range(way.rounds):
        models = []
        for client, shard in enumerate(problem.shards):
            w = theta = x
            for _ in range(way.steps):
                for _ in range(way.inner_steps):
                    slope = add(gradient(loss_on(shard), theta), theta, decay)
                    slope = add(slope, add(theta, w, -1.0), way.pull) if pulls else slope
                    theta = add(theta, slope, -way.rate)
                w = add(w, add(w, theta, -1.0), -way.rate * way.pull)
            owns[client] = theta
            models.append(theta if sends_own else w)
        x = mix(mean(problem, models, weights), x, way.beta)
    if tests != "theta":
        owns = [x if tests == "received" else problem.start for _ in owns]
    return outcome(flat(x), [flat(own) for own in owns]), all_scores(problem, owns)


def apfl(
    problem: Problem, *, adaptive: bool = False, at: Literal["mixture", "own", "outputs"] = "mixture",
    w: Literal["together", "first", "twice"] = "together", overwrites: bool = False, trains: bool = True,
    often: bool = True, decay: float = 0.0,
) -> Result:  # fmt: skip
    """Train w by FedAvg; v descends the loss of the mixture of v and w, and alpha may, too.

    ``at``: where v's gradient is taken. ``w``: it steps together with v, or first, or first and again. ``overwrites``:
    at the end of a round v becomes the mixture. ``trains`` False: v makes no step. ``often`` False: alpha moves in a
    round's first pass alone. ``decay``: of alpha. The peers' gradient of alpha mixes those at v and at w.
    """
    way, x, owns = problem.way, dict(problem.start), [dict(problem.start) for _ in problem.shards]
    alphas = [way.alpha for _ in problem.shards]
    for _ in range(way.rounds):
        models = []
        for client, shard in enumerate(problem.shards):
            held, v, alpha, loss = x, owns[client], alphas[client], loss_on(shard)
            for step in range(way.steps):
                of_w = gradient(loss, held)
                after = add(held, of_w, -way.rate * (2 if w == "twice" else 1))
                seen = held if w == "together" else add(held, of_w, -way.rate)
                if at == "outputs":
                    of_v = gradient(_mixed_outputs(shard, seen, alpha), v)
                elif at == "own":
                    of_v = gradient(loss, v)
                else:
                    of_v = {name: alpha * value for name, value in gradient(loss, mix(v, seen, alpha)).items()}
                moved = add(v, of_v, -way.rate) if trains else v
                if adaptive and (often or step == 0):
                    if at == "mixture":
                        slope, apart = gradient(loss, mix(v, seen, alpha)), add(v, held, -1.0)
                    else:
                        slope, apart = mix(of_v, of_w, alpha), add(moved, after, -1.0)
                    change = sum(float((slope[name] * apart[name]).sum()) for name in v)
                    alpha = min(1.0, max(0.0, alpha - way.rate * (change + decay * alpha)))
                held, v = after, moved
            owns[client], alphas[client] = mix(v, held, alpha) if overwrites else v, alpha
            models.append(held)
        x = mean(problem, models)
    vectors = [torch.cat([flat(own), torch.tensor([alpha])]) for own, alpha in zip(owns, alphas, strict=True)]
    # A client that overwrites predicts by its own model, all others by a mixture with the received one.
    used = owns if overwrites or at == "outputs" else [mix(own, x, one) for own, one in zip(owns, alphas, strict=True)]
    scores = all_scores(problem, used)
    if at == "outputs":
        [received] = all_scores(problem, [x])
        scores = [alpha * one + (1 - alpha) * received for one, alpha in zip(scores, alphas, strict=True)]
    return outcome(flat(x), vectors), scores


def _mixed_outputs(shard: tuple[Tensor, Tensor], w: Params, alpha: float) -> Callable[[Params], Tensor]:
    inputs, labels = shard
    fixed = logits(w, inputs)
    return lambda v: functional.cross_entropy(alpha * logits(v, inputs) + (1 - alpha) * fixed, labels)


def per_fedavg(
    problem: Problem, weights: Weights = "uniform", *, exact: bool = False, restores: bool = True, passes: int = 1,
    differences: float = 0.0, bent: Literal["w", "inner"] = "w",
) -> Result:  # fmt: skip
    """Do FedAvg on the loss after one step of SGD. All batches are all records.

    ``restores`` False: w keeps the inner step. ``passes``: how often a round's steps are repeated. ``differences``: if
    above 0, the product with the Hessian comes from gradients that are so many slopes apart; ``bent``: where.
    """
    way, x = problem.way, dict(problem.start)
    for _ in range(way.rounds):
        models = []
        for shard in problem.shards:
            w, loss = x, loss_on(shard)

            def after_a_step(params: Params, loss: Callable[[Params], Tensor] = loss) -> Tensor:
                return loss(add(params, grad(loss)(params), -way.rate))

            for _ in range(way.steps * passes):
                inner = add(w, gradient(loss, w), -way.rate)
                slope = grad(after_a_step)(w) if exact and not differences else gradient(loss, inner)
                if exact and differences:
                    there = w if bent == "w" else inner
                    up, down = (gradient(loss, add(there, slope, sign * differences)) for sign in (1, -1))
                    slope = add(slope, add(up, down, -1.0), -way.rate / (2 * differences))
                w = add(w if restores else inner, slope, -way.rate)
            models.append(w)
        x = mean(problem, models, weights)
    used = [descend(x, loss_on(shard), way.rate, (tuple(x), 1)) for shard in problem.shards]
    return outcome(flat(x), None), all_scores(problem, used)


def fedala(problem: Problem, threshold: float = 0.1, *, one_worker: bool = False) -> Result:
    """Begin between the own last head and the received one, by weights in [0, 1] that are trained first.

    All records train the weights, in one batch. ``one_worker``: "own" means the last client's that was at work.
    """
    way, x = problem.way, dict(problem.start)
    places = [0] * len(problem.shards) if one_worker else list(range(len(problem.shards)))
    last: list[Params] = [{} for _ in problem.shards]
    weights = [{name: torch.ones_like(x[name]) for name in HEAD} for _ in problem.shards]
    rested = [False] * len(problem.shards)
    starts = [x for _ in problem.shards]
    for _ in range(way.rounds):
        models = []
        for client, shard in enumerate(problem.shards):
            place, loss, begin = places[client], loss_on(shard), x
            if not last[place] and one_worker:
                last[place] = parts(x, HEAD)
            if last[place]:
                own, apart, losses = last[place], add(parts(x, HEAD), last[place], -1.0), list[float]()
                while not losses or not (rested[place] or _steady(losses, threshold)):
                    begin = {**x, **{name: own[name] + apart[name] * weights[place][name] for name in HEAD}}
                    slope = gradient(loss, begin)
                    losses.append(float(loss(begin)))
                    weights[place] = {
                        name: (weights[place][name] - slope[name] * apart[name]).clamp(0, 1) for name in HEAD
                    }
                begin = {**x, **{name: own[name] + apart[name] * weights[place][name] for name in HEAD}}
                rested[place] = True
            starts[client] = begin
            model = descend(begin, loss, way.rate, (tuple(x), way.steps))
            last[place] = parts(model, HEAD)
            models.append(model)
        x = mean(problem, models)
    return outcome(flat(x), [flat(model, HEAD) for model in models]), all_scores(problem, models)


def _steady(losses: list[float], threshold: float) -> bool:
    last = torch.tensor(losses[-10:], dtype=torch.float64)
    return len(losses) > 10 and float(last.std(correction=0)) < threshold


def fedproto(problem: Problem, *, counts: bool = True, after: bool = False) -> Result:
    """Let class means of z travel alone; local training pulls z towards them.

    ``counts`` False: clients weigh the same in a class's mean. ``after``: z is that of the trained model, not that of
    the steps.
    """
    way, owns = problem.way, [dict(problem.start) for _ in problem.shards]
    prototypes, known = torch.zeros(10, 20), torch.zeros(10, dtype=torch.bool)
    for _ in range(way.rounds):
        means, numbers = [], []
        for client, (inputs, labels) in enumerate(problem.shards):
            own, seen = owns[client], list[Tensor]()

            def loss(params: Params, inputs: Tensor = inputs, labels: Tensor = labels,
                     target: Tensor = prototypes, held: Tensor = known) -> Tensor:  # fmt: skip
                z = features(params, inputs)
                apart = (z - target[labels]).square().mean(1) * held[labels]
                return functional.cross_entropy(head(params, z), labels) + way.strength * apart.mean()

            for _ in range(way.steps):
                seen.append(features(own, inputs))
                own = add(own, gradient(loss, own), -way.rate)
            z = features(own, inputs) if after else torch.stack(seen).mean(0)
            of_class, held_here = functional.one_hot(labels, 10).float(), problem.counts(client)
            means.append(of_class.T @ z / held_here.clamp(min=1)[:, None])
            numbers.append(held_here if counts else (held_here > 0).float())
            owns[client] = own
        total = torch.stack(numbers).sum(0)
        summed = torch.stack([number[:, None] * one for number, one in zip(numbers, means, strict=True)]).sum(0)
        prototypes, known = summed / total.clamp(min=1)[:, None], total > 0
    return outcome(prototypes.flatten(), [flat(own) for own in owns]), all_scores(problem, owns)


def knn_per(problem: Problem, neighbours: int | None = None, *, of_logits: bool = False) -> Result:
    """Train by FedAvg; a client predicts by half the vote of its nearest records and half the softmax.

    Distances are squared and divided by the number of features. ``of_logits``: the logits are added in the place of
    their softmax.
    """
    way = problem.way
    every: Phase = (tuple(problem.start), way.steps)
    [shared, scores] = partial(problem, tuple(problem.start), [every])
    server = _named(shared.shared, problem.start)
    mixed = []
    for (inputs, labels), one in zip(problem.shards, scores, strict=True):
        squares = torch.cdist(features(server, problem.test[0]), features(server, inputs)).square() / 20
        nearest, places = squares.topk(neighbours or way.neighbours, largest=False)
        similar = (-nearest).softmax(1)
        votes = (similar[:, :, None] * functional.one_hot(labels[places], 10)).sum(1)
        mixed.append(0.5 * votes + 0.5 * (one if of_logits else one.softmax(1)))
    return outcome(shared.shared, [one.flatten() for one in mixed]), mixed


def _named(vector: Tensor, like: Params) -> Params:
    values = torch.split(vector, [one.numel() for one in like.values()])
    return {name: value.view_as(one) for value, (name, one) in zip(values, like.items(), strict=True)}


PAPERS: dict[str, Callable[[Problem], Result]] = {
    "fedper": fedper, "lg-fedavg": lg_fedavg, "fedrep": fedrep, "fedbabu": fedbabu, "fedrod": fedrod, "ditto": ditto,
    "pfedme": pfedme, "apfl": apfl, "per-fedavg": per_fedavg,
    "per-fedavg exact": lambda problem: per_fedavg(problem, exact=True), "fedala": fedala, "fedproto": fedproto,
    "knn-per": knn_per,
}  # fmt: skip
