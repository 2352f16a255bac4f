"""CFL in a plain loop, as its paper has it, and as FL-bench does: see ``personal_papers.py``. Needs PyTorch alone."""

import torch
from personal_papers import Result, add, all_scores, descend, loss_on
from personal_problem import Params, Problem, flat, outcome
from torch import Tensor


def cfl(problem: Problem, *, uniform: bool = False, places: bool = False) -> Result:
    """Average models within clusters, and split each cluster of two clients or more in every round.

    That is CFL with a first norm that is never reached, and a second one that always is. ``uniform``: all clients weigh
    the same. ``places``: a cluster's clients are numbered from 0 when they leave it, and those numbers are then taken
    for clients of the run.
    """
    way, models = problem.way, [dict(problem.start) for _ in problem.shards]
    clusters = [list(range(len(models)))]
    for _ in range(way.rounds):
        updates = []
        for model, shard in zip(models, problem.shards, strict=True):
            trained = descend(model, loss_on(shard), way.rate, (tuple(model), way.steps))
            updates.append(add(trained, model, -1.0))
        after = list[list[int]]()
        for inside in clusters:
            if len(inside) == 1:
                after.append(inside)
                continue
            parts = two_parts([flat(updates[client]) for client in inside])
            after += [[place if places else inside[place] for place in part] for part in parts]
        clusters = after
        for inside in clusters:
            weights = [1.0 if uniform else float(problem.sizes[client]) for client in inside]
            for client in inside:
                for other, weight in zip(inside, weights, strict=True):
                    models[client] = add(models[client], updates[other], weight / sum(weights))
    return outcome(None, [flat(model) for model in models]), all_scores(problem, models)


def two_parts(updates: list[Tensor]) -> list[list[int]]:
    """Return the places of one or two groups: the two groups with the largest smallest cosine are joined in turn."""
    groups = [[place] for place in range(len(updates))]
    while len(groups) > 2:
        pairs = [(one, two) for two in range(len(groups)) for one in range(two)]
        one, two = max(pairs, key=lambda pair: _alike(updates, groups[pair[0]], groups[pair[1]]))
        groups = [*(group for group in groups if group not in (groups[one], groups[two])), groups[one] + groups[two]]
    return [sorted(group) for group in groups]


def _alike(updates: list[Tensor], one: list[int], two: list[int]) -> float:
    return min(float(torch.cosine_similarity(updates[a], updates[b], dim=0)) for a in one for b in two)


def with_clusters(found: dict[str, Tensor], clusters: list[int]) -> list[Tensor]:
    """Return each client's model from the tensors of fl-sim's checkpoint, by the number of its cluster."""
    models = list[Tensor]()
    for cluster in clusters:
        group = f"memory/model-{cluster}/" if cluster else "params//"
        model: Params = {name.rpartition("/")[2]: value for name, value in found.items() if group in name}
        models.append(flat(model))
    return models
