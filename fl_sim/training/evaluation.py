"""How good a model is on records: accuracy and mean cross-entropy."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional

from fl_sim.batch_norm import load_statistics, running_in
from fl_sim.params import copy_into
from fl_sim.training.losses import LogitsOf
from fl_sim.training.precision import arithmetic
from fl_sim.training.records import Scale, Source
from fl_sim.types import Params

EVALUATION_BATCH = 500
"""Records per forward pass of an evaluation: small enough for the cache, large enough for the operators."""

EVALUATION_BATCH_ON_GPU = 2_000
"""The same where launches cost more than arithmetic does."""


def evaluate(
    model: nn.Module,
    params: Params,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    *,
    scale: Scale | None = None,
    workers: int = 1,
) -> tuple[float, float]:
    """Return (accuracy in [0, 1], mean cross-entropy) of ``params`` on (n, *input shape) inputs and (n,) labels.

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
        copy_into(dict(model.named_parameters()), weights)
        load_statistics(model, statistics)
    return model.eval()


def score(logits_of: LogitsOf, inputs: torch.Tensor, labels: torch.Tensor, *, workers: int = 1) -> tuple[float, float]:
    """Return (accuracy in [0, 1], mean cross-entropy) of what ``logits_of`` makes of the inputs: see ``evaluate``."""
    threads = torch.get_num_threads()

    def scored(batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # holds for the thread that calls it
        with torch.inference_mode():
            logits = logits_of(batch)
            correct = (logits.argmax(1) == targets).sum(dtype=torch.float64)
            return torch.stack([correct, functional.cross_entropy(logits, targets, reduction="sum").double()])

    size = EVALUATION_BATCH if inputs.device.type == "cpu" else EVALUATION_BATCH_ON_GPU
    batches = torch.split(inputs, size), torch.split(labels, size)
    with ThreadPoolExecutor(workers) as pool, arithmetic(inputs.device):
        scores = list(pool.map(scored, *batches) if workers > 1 else map(scored, *batches))
    correct, loss = (sum(parts) for parts in zip(*torch.stack(scores).tolist(), strict=True))  # the GPU is waited for
    return correct / len(labels), loss / len(labels)
