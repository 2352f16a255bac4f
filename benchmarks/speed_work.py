"""The jobs that benchmarks/speed.py measures, and their numbers of floating-point operations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One round: every client trains one epoch on its share of ``clients * records`` images."""

    title: str
    model: str
    data: str
    clients: int
    records: int
    partition: str = "iid"


WORKS = {
    work.title: work
    for work in (
        Work("10 clients x 600", "niid-cnn", "mnist", 10, 600),
        Work("100 clients x 100", "niid-cnn", "mnist", 100, 100),
        Work("Dir(0.05), 100 clients, 10,000 records", "niid-cnn", "mnist", 100, 100, "dirichlet:0.05"),
        Work("niid-cnn on CIFAR-10, 10 x 500", "niid-cnn", "cifar10", 10, 500),
        Work("dafl-cnn on CIFAR-10, 10 x 500", "dafl-cnn", "cifar10", 10, 500),
        Work("resnet on CIFAR-10, 10 x 500", "resnet", "cifar10", 10, 500),
    )
}

GPU_WORK = Work("100 clients x 600, on a GPU", "niid-cnn", "mnist", 100, 600)

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def training_operations(work: Work) -> int:
    """Count a round's floating-point operations in convolutions and matrix products.

    Two for each multiplication and addition; forward, the weights' gradient, and the inputs' gradient but for the first
    layer's. Nothing is left out for the zeros behind pooling and ReLU.
    """
    import torch
    from torch import nn

    from fl_sim.models import MODELS

    model = MODELS[work.model](SHAPES[work.data], 10)
    forward: list[int] = []

    def count(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        weights = next(layer.parameters())
        forward.append(2 * output.numel() * weights[0].numel())

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    with torch.inference_mode():
        model(torch.zeros(1, *SHAPES[work.data]))
    return (3 * sum(forward) - forward[0]) * work.clients * work.records


def product_rate() -> float:
    """Return the floating-point operations a second of the best of 20 large matrix products on one thread."""
    import time

    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds = []
    for _ in range(20):
        start = time.process_time()
        torch.mm(left, right)
        seconds.append(time.process_time() - start)
    return 2 * 1024**3 / min(seconds)
