"""How good a model is on records: what it takes each for, and its mean cross-entropy."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fl_sim.params import copy_into, load_statistics, placed_in, running_in
from fl_sim.training.losses import LogitsOf
from fl_sim.training.precision import arithmetic
from fl_sim.training.records import Scale, Source
from fl_sim.types import Params

EVALUATION_BATCH = 500
"""Records per forward pass of an evaluation: small enough for the cache, large enough for the operators."""

EVALUATION_BATCH_ON_GPU = 2_000
"""The same where launches cost more than arithmetic does."""


@dataclass(frozen=True, eq=False)
class Scores:
    """What a model makes of n records.

    ``loss``: its mean cross-entropy. ``labels``: (n,), what the records are; ``predicted``: (n,), what the model takes
    them for. ``margins``: (n,), for two classes, by how much the logit of class 1 exceeds that of class 0.
    """

    loss: float
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    margins: NDArray[np.float32] | None = None

    @cached_property
    def accuracy(self) -> float:
        """Return which part of the records the model is right about, in [0, 1]."""
        return int((self.labels == self.predicted).sum()) / len(self.labels)


def evaluate(
    model: nn.Module,
    params: Params,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    *,
    scale: Scale | None = None,
    workers: int = 1,
) -> Scores:
    """Return how well ``params`` do on (n, *input shape) inputs and (n,) labels.

    ``scale`` normalises inputs that are bytes. ``workers`` threads share out the batches; the numbers are the same for
    any number of them. Products are float32 on a GPU, too, whatever the training's are.
    """
    network, source = ready(model, params), Source(inputs, labels, scale)
    return score(lambda batch: network(source.normalised(batch)), inputs, labels, workers=workers)


def ready(model: nn.Module, params: Params) -> nn.Module:
    """Return ``model`` with the weights ``params``, running statistics among them if it has any, in evaluation mode."""
    running = running_in(model)
    statistics = {name: value for name, value in params.items() if name in running}
    weights = {name: value for name, value in params.items() if name not in running} if statistics else params
    with torch.inference_mode():
        copy_into(placed_in(model, weights), weights)
        load_statistics(model, statistics)
    return model.eval()


def score(logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor, *, workers: int = 1) -> Scores:
    """Return how well what ``logits_of`` makes of the inputs does: see ``evaluate``."""
    threads = torch.get_num_threads()

    def scored(batch: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # holds for the thread that calls it
        with torch.inference_mode():
            logits = logits_of(batch)
            loss = functional.cross_entropy(logits, targets, reduction="sum").double()
            return (loss, logits.argmax(1), *([logits[:, 1] - logits[:, 0]] if logits.shape[1] == 2 else []))

    size = EVALUATION_BATCH if inputs.device.type == "cpu" else EVALUATION_BATCH_ON_GPU
    batches = torch.split(inputs, size), torch.split(labels, size)
    with ThreadPoolExecutor(workers) as pool, arithmetic(inputs.device):
        scores = list(pool.map(scored, *batches) if workers > 1 else map(scored, *batches))
    losses, *others = zip(*scores, strict=True)
    loss = sum(torch.stack(losses).tolist()) / len(labels)  # the GPU is waited for
    predicted, *margins = (torch.cat(parts).numpy(force=True) for parts in others)
    return Scores(loss, labels.numpy(force=True), predicted, margins[0] if margins else None)
