"""The problem on which fl-sim, three peers and plain loops train own models of clients. Needs PyTorch and numpy alone.

Four clients hold digits with different class shares, and start at the same perceptron: 64 pixels, 20 units, 10 classes.
A batch is all records of a client, so that all programs compute on the same batches whatever they shuffle.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

Params = dict[str, Tensor]

BODY, HEAD = ("1.weight", "1.bias"), ("3.weight", "3.bias")
"""Names of the parameters of the first layer and of the last one."""

METHODS = (
    "fedper", "lg-fedavg", "fedrep", "fedbabu", "fedrod", "ditto", "pfedme", "apfl", "per-fedavg", "per-fedavg exact",
    "fedala", "fedproto", "knn-per", "cfl",
)  # fmt: skip
"""The methods that fl-sim and at least one peer have."""


@dataclass(frozen=True)
class Way:
    """The settings of all methods. ``steps``: a client's steps in a round; of FedRep, as many for head and body each.

    ``rate`` is the learning rate, and also pFedMe's and Per-FedAvg's personal rate: some peers have one rate for both.
    ``strength``: Ditto's and FedProto's lambda; pFedMe's is ``pull``. ``alpha``: the weight of APFL's own model.
    ``neighbours``: kNN-Per's, which weighs them by one half.
    """

    rounds: int = 3
    steps: int = 2
    rate: float = 0.1
    strength: float = 1.0
    pull: float = 5.0
    inner_steps: int = 5
    beta: float = 0.8
    alpha: float = 0.25
    neighbours: int = 10


@dataclass(frozen=True)
class Problem:
    """``shards``: each client's (n, 1, 8, 8) inputs and (n,) labels; ``test``: the records that all are tested on.

    ``start``: the first parameters, by name.
    """

    shards: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]
    start: Params
    way: Way = field(default_factory=Way)

    @property
    def sizes(self) -> list[int]:
        """The number of records of each client."""
        return [len(labels) for _, labels in self.shards]

    def counts(self, client: int) -> Tensor:
        """Return the number of records of each class that ``client`` holds, as floats of shape (10,)."""
        return torch.bincount(self.shards[client][1], minlength=10).float()

    def accuracy(self, client: int, scores: Tensor) -> float:
        """Return the share of right predictions, with test records weighted by the client's class shares.

        ``scores``: shape (test records, 10).
        """
        labels = self.test[1]
        right = (scores.argmax(1) == labels).float()
        recall = torch.stack([right[labels == one].mean() for one in range(10)])
        return float((self.counts(client) * recall).sum() / self.counts(client).sum())


@dataclass(frozen=True)
class Outcome:
    """The numbers after the last round: ``shared`` by the server (a vector), and each client's ``own`` (a matrix)."""

    shared: Tensor
    own: Tensor

    def distance(self, other: "Outcome") -> tuple[float, float]:
        """Return the largest differences of shared numbers and of own ones, NaN where the other has none."""
        pairs = ((self.shared, other.shared), (self.own, other.own))
        for one, two in pairs:
            if one.numel() and two.numel() and one.shape != two.shape:
                raise ValueError(f"numbers of shapes {tuple(one.shape)} and {tuple(two.shape)} cannot be compared")
        shared, own = (float((a - b).abs().max()) if a.numel() and b.numel() else float("nan") for a, b in pairs)
        return shared, own


def perceptron(input_shape: tuple[int, ...] = (1, 8, 8), num_classes: int = 10) -> nn.Sequential:
    """Return the network, whose parameters are those of ``BODY`` and ``HEAD``."""
    inputs = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 20), nn.ReLU(), nn.Linear(20, num_classes))


def flat(params: Params, names: tuple[str, ...] = (*BODY, *HEAD)) -> Tensor:
    """Return the parameters called ``names`` as one vector."""
    return torch.cat([params[name].detach().flatten() for name in names])


def outcome(shared: Tensor | None, own: list[Tensor] | None) -> Outcome:
    """Return an outcome; None: there are no such numbers."""
    nothing = torch.zeros(0)
    return Outcome(nothing if shared is None else shared, nothing if own is None else torch.stack(own))


def write(path: Path, problem: Problem) -> None:
    """Write a problem for ``read``. Its way is the default one."""
    arrays = {f"start {name}": value.numpy() for name, value in problem.start.items()}
    for place, (inputs, labels) in enumerate([*problem.shards, problem.test]):
        arrays[f"inputs {place}"], arrays[f"labels {place}"] = inputs.numpy(), labels.numpy()
    np.savez(path, allow_pickle=False, **arrays)


def read(path: Path) -> Problem:
    """Return the problem that ``write`` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    start = {name.removeprefix("start "): value for name, value in tensors.items() if name.startswith("start ")}
    pairs = sum(name.startswith("inputs") for name in tensors)
    *shards, test = [(tensors[f"inputs {place}"], tensors[f"labels {place}"]) for place in range(pairs)]
    return Problem(shards, test, start)


def write_outcomes(path: Path, outcomes: dict[str, Outcome]) -> None:
    """Write what a program came to, for ``read_outcomes``."""
    arrays = {f"{name}/{part}": getattr(one, part).numpy() for name, one in outcomes.items() for part in _PARTS}
    np.savez(path, allow_pickle=False, **arrays)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the outcomes by method."""
    with np.load(path, allow_pickle=False) as arrays:
        names = dict.fromkeys(name.rpartition("/")[0] for name in arrays.files)
        return {name: Outcome(*(torch.from_numpy(arrays[f"{name}/{part}"]) for part in _PARTS)) for name in names}


_PARTS = ("shared", "own")
