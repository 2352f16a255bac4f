"""Which public records are alike: those to ask teachers about first, and what a few labels say of all the others.

Images are compared by their histograms of gradients (Dalal and Triggs 2005). The records to ask about are a greedy
facility location (Wei, Iyer and Bilmes 2015): each new one is the record that most others are like and that no earlier
one speaks for. Labels spread over the graph of nearest neighbours (Zhou et al. 2004). All of it looks at public records
and at released labels alone, so none of it costs anything.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fl_sim.importing import torch

_DIRECTIONS: Final = 8
_MOST_COMPARED: Final = 10_000
"""Every record is compared with every other: 400 MB."""
_MOST_CHOSEN: Final = 1000
_NEIGHBOURS: Final = 10
_SPREADING: Final = 0.99
_ITERATIONS: Final = 90


def representatives(inputs: torch.Tensor, count: int) -> NDArray[np.int64]:
    """Return indices of ``count`` of ``inputs``, (n, *shape), n at least ``count``: representative ones first.

    At most 1,000 of the first 10,000 records are chosen, the others follow in their own order.
    """
    away = _distances(descriptors(inputs[:_MOST_COMPARED]))
    near = away.kthvalue(min(_NEIGHBOURS + 1, len(away)), dim=1).values.median().clamp(min=1e-12)
    likeness = away.div_(near).square_().neg_().exp_()
    spoken_for, gains, chosen = torch.zeros(len(likeness)), likeness.sum(dim=1), []
    for _ in range(min(count, len(likeness), _MOST_CHOSEN)):
        best, stale = int(gains.argmax()), -1
        while best != stale:  # gains only fall as more is spoken for: a fresh one that still leads is the largest
            gains[best] = (likeness[best] - spoken_for).clamp(min=0).sum()
            best, stale = int(gains.argmax()), best
        chosen.append(best)
        spoken_for = torch.maximum(spoken_for, likeness[best])
        gains[best] = -1.0
    rest = np.setdiff1d(np.arange(len(inputs)), chosen)
    return np.concatenate([np.array(chosen, dtype=np.int64), rest])[:count]


def spread(inputs: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return each record's share of every class, (n, classes); the first ``len(labels)`` of ``inputs`` have labels.

    Rows add up to 1. Classes are taken to be about equally frequent.
    """
    from scipy import sparse  # noqa: PLC0415 (a plain run does not need it)

    described = descriptors(inputs)
    near, who = [], []
    for rows in torch.split(torch.arange(len(described)), 1000):
        likeness = described[rows] @ described.T
        likeness[torch.arange(len(rows)), rows] = -torch.inf
        values, places = likeness.topk(min(_NEIGHBOURS, len(described) - 1), dim=1)
        near.append(1 - values)
        who.append(places)
    away, place = torch.cat(near).double().numpy(), torch.cat(who).numpy()
    weights = np.exp(-away / max(float(np.median(away[:, -1])), 1e-12))
    starts = np.arange(len(place) + 1) * place.shape[1]
    graph = sparse.csr_array((weights.ravel(), place.ravel(), starts), shape=(len(place), len(place)))
    graph = graph + graph.T
    scale = sparse.dia_array((1 / np.sqrt(graph.sum(axis=1))[None], [0]), shape=graph.shape)
    graph = (scale @ graph @ scale).tocsr()
    given = np.zeros((len(place), num_classes))
    given[np.arange(len(labels)), labels.numpy(force=True)] = 1.0
    shares = given
    for _ in range(_ITERATIONS):
        shares = _SPREADING * (graph @ shares) + (1 - _SPREADING) * given
    shares = shares / np.maximum(shares.sum(axis=0), 1e-12) + 1e-12
    return torch.from_numpy(shares / shares.sum(axis=1, keepdims=True)).float().to(inputs.device)


def descriptors(inputs: torch.Tensor) -> torch.Tensor:
    """Return a row of numbers per record, (n, d), of length 1, on the CPU: images by how strongly they change whither.

    Records that are no images of at least 8x8: their own numbers, each standardised.
    """
    inputs = inputs.cpu()
    if inputs.ndim != 4 or min(inputs.shape[2:]) < 8:
        rows = inputs.flatten(1)
        rows = (rows - rows.mean(dim=0)) / rows.std(dim=0).clamp(min=1e-6)
    else:
        rows = torch.cat([_gradients(part) for part in torch.split(inputs, 500)])
    return torch.nn.functional.normalize(rows, dim=1)


def _gradients(images: torch.Tensor) -> torch.Tensor:
    """Return histograms of the directions in which images change, in overlapping cells, (n, directions * cells)."""
    smooth = 3 if min(images.shape[2:]) >= 16 else 1
    around = 2 + smooth // 2
    grey = torch.nn.functional.pad(images.mean(dim=1, keepdim=True), (around, around, around, around), mode="replicate")
    grey = torch.nn.functional.avg_pool2d(grey, smooth, 1)
    across, down = grey[:, :, 1:-1, 2:] - grey[:, :, 1:-1, :-2], grey[:, :, 2:, 1:-1] - grey[:, :, :-2, 1:-1]
    strength, angle = (across.square() + down.square()).sqrt(), torch.atan2(down, across)
    directions = torch.arange(_DIRECTIONS).view(1, -1, 1, 1) * (2 * torch.pi / _DIRECTIONS)
    votes = strength * torch.nn.functional.relu(torch.cos(angle - directions)) ** 4
    cell = max(2, min(images.shape[2:]) // 9)
    cells = torch.nn.functional.avg_pool2d(torch.nn.functional.avg_pool2d(votes, 3, 1, 1), cell + 2, cell).flatten(2)
    even: torch.Tensor = cells / (cells.norm(dim=1, keepdim=True) + 0.5)
    return even.flatten(1).sqrt()


def _distances(rows: torch.Tensor) -> torch.Tensor:
    """Return Euclidean distances between rows of length 1, (n, n)."""
    return (rows @ rows.T).mul_(-2).add_(2).clamp_(min=0).sqrt_()
