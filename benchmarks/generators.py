"""Compare private generators: train a classifier on what ten one-class clients share, and test it on real images.

Every client holds all training records of one class and shares ``gamma`` times as many (the right number: to pick it
privately is a release of its own, the same for all). The classifier sees the pool alone: the default CNN of the data
set, Adam 1e-3, batches of 64, 20 epochs, the last weights, whatever the generator. With ``--features scattering`` it is
the linear discriminant of the pool (``fl_sim.training.discriminant``), with ``--quadratic`` the quadratic one. "real"
shares real records: not private, the ceiling. CPU seconds are those of one client, on one thread.

    PYTHONPATH=. python benchmarks/generators.py [--data mnist] [--kinds mean-embedding,dp-cgan,real]
    PYTHONPATH=. python benchmarks/generators.py --features scattering --kinds gaussian,real --gamma 1 --epsilons 1,10
        [--quadratic] [--epsilons 1,5,10,20,50,inf] [--seeds 0] [--validate] [--set frequencies=60] [--images FOLDER]
        [--json FILE]

``--validate`` trains the generators on the first five sixths of the training set and tests on the last sixth: for
choosing settings (``--set``), which the test set must not.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch.nn import functional

from clients.dafl.dpcgan.settings import DpCgan
from clients.dafl.generator import Generator, PrivateRecords
from clients.dafl.noisy_moments import Gaussian, MeanEmbedding
from fl_sim.data import Features, load
from fl_sim.models import build, default_model
from fl_sim.privacy.mechanisms import Noise
from fl_sim.seeding import rng
from fl_sim.training.discriminant import QuadraticDiscriminant, linear_discriminant, quadratic_discriminant
from fl_sim.types import Dataset, Examples

KINDS = {"mean-embedding": MeanEmbedding, "dp-cgan": DpCgan, "gaussian": Gaussian}
DELTA = 1e-5
EPOCHS, BATCH_SIZE, LEARNING_RATE = 20, 64, 1e-3


@dataclass(frozen=True)
class Score:
    """The accuracy on real images of a classifier that was trained on one pool alone."""

    data: str
    kind: str
    epsilon: float
    seed: int
    accuracy: float
    cpu_seconds_per_client: float
    refused: str


def images_of(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (images in [-1, 1], labels); public features as they are."""
    inputs = torch.from_numpy(np.array(examples.inputs)).to(torch.float32)
    labels = torch.from_numpy(np.array(examples.labels))
    return (inputs / 127.5 - 1 if inputs.ndim == 4 else inputs), labels


def pool_of(
    kind: str,
    settings: dict[str, Any],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    epsilon: float,
    gamma: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, float, str]:
    """Return what all clients share: (images, labels, CPU seconds per client, why a client shared nothing)."""
    num_classes = int(labels.max()) + 1
    images, of_class, refused = [], [], ""
    before = time.process_time()
    for label in range(num_classes):
        own = inputs[labels == label]
        number = round(gamma * len(own))
        if kind == "real":
            images.append(own[torch.from_numpy(rng(seed, "real", label).permutation(len(own))[:number])])
        else:
            generator: Generator = KINDS[kind](**settings)
            bill = generator.bill(len(own), num_classes, epsilon, DELTA)
            refused = refused or bill.refused
            counts = np.zeros(num_classes, dtype=np.int64)
            counts[label] = 0 if bill.refused else number
            if counts.any():
                records = PrivateRecords(own, torch.full((len(own),), label), num_classes)
                noise = Noise.seeded(1000 * seed + label)
                images.append(generator.generate(records, counts, bill, noise, rng(seed, "generator", label)))
            else:
                images.append(own[:0])
        of_class.append(torch.full((len(images[-1]),), label))
    seconds = (time.process_time() - before) / num_classes
    return torch.cat(images), torch.cat(of_class), seconds, refused


def accuracy(
    pool: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
    dataset: Dataset,
    seed: int,
    *,
    quadratic: bool = False,
) -> float:
    """Return the accuracy on ``test`` of a classifier trained on ``pool``."""
    if pool[0].ndim == 2 and quadratic:
        discriminant = QuadraticDiscriminant(pool[0].shape[1], dataset.num_classes)
        discriminant.load_state_dict(quadratic_discriminant(*pool, dataset.num_classes))
        with torch.no_grad():
            return float((discriminant(test[0]).argmax(dim=1) == test[1]).double().mean())
    if pool[0].ndim == 2:
        weights, bias = linear_discriminant(*pool, dataset.num_classes).values()
        return float(((test[0] @ weights.T + bias).argmax(dim=1) == test[1]).double().mean())
    shape = tuple(pool[0].shape[1:])
    mean, std = (torch.tensor(constant).reshape(-1, 1, 1) for constant in (dataset.mean, dataset.std))
    inputs, test_inputs = ((images.add(1).div(2) - mean) / std for images in (pool[0], test[0]))
    model = build(default_model(shape), shape, dataset.num_classes, seed)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    for epoch in range(EPOCHS):
        for batch in torch.from_numpy(rng(seed, "batches", epoch).permutation(len(inputs))).split(BATCH_SIZE):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[batch]), pool[1][batch]).backward()
            optimizer.step()
    with torch.no_grad():
        found = torch.cat([model(chunk).argmax(1) for chunk in test_inputs.split(1000)])
    return float((found == test[1]).float().mean())


def save_grid(path: Path, images: torch.Tensor, labels: torch.Tensor, columns: int = 12) -> None:
    """Write ``columns`` images of each class, a row per class, twice as large as they are."""
    from torchvision.utils import save_image

    rows = [images[labels == label][:columns] for label in range(int(labels.max()) + 1)]
    chosen = torch.cat([row for row in rows if len(row) == columns])
    path.parent.mkdir(parents=True, exist_ok=True)
    large = functional.interpolate(chosen, scale_factor=2, mode="nearest")
    save_image(large, path, nrow=columns, normalize=True, value_range=(-1, 1))


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--features", default="none", choices=get_args(Features))
    parser.add_argument("--kinds", default="mean-embedding,dp-cgan,real")
    parser.add_argument("--epsilons", default="1,5,10,20,50,inf")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--gamma", type=float, default=0.05)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--quadratic", action="store_true", help="of vectors: by the quadratic discriminant")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.quadratic and asked.features == "none":
        parser.error("--quadratic is for vectors: give --features scattering, or leave it out")
    return asked


def summary(scores: Sequence[Score]) -> str:
    """Return one line for the scores of one kind at one epsilon."""
    found = [100 * score.accuracy for score in scores]
    spread = f" +- {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    seconds = statistics.mean(score.cpu_seconds_per_client for score in scores)
    first = scores[0]
    return (
        f"{first.data:14}{first.kind:16}eps {first.epsilon:<6g}{statistics.mean(found):5.1f} %{spread}"
        f"   {seconds:6.2f} CPU s a client   {first.refused}"
    )


def main() -> None:
    """Score every kind at every epsilon."""
    asked = options()
    torch.set_num_threads(1)
    dataset = load(asked.data, None, asked.features)
    train, test = images_of(dataset.train), images_of(dataset.test)
    if asked.validate:
        cut = len(train[1]) * 5 // 6
        train, test = (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])
    settings = dict(pair.split("=", 1) for pair in asked.set)
    scores: list[Score] = []
    for kind in asked.kinds.split(","):
        for epsilon in [math.inf] if kind == "real" else [float(text) for text in asked.epsilons.split(",")]:
            group = []
            for seed in [int(text) for text in asked.seeds.split(",")]:
                *pool, seconds, refused = pool_of(kind, settings, *train, epsilon, asked.gamma, seed)
                chosen = pool[0], pool[1]
                right = accuracy(chosen, test, dataset, seed, quadratic=asked.quadratic) if len(pool[1]) else math.nan
                group.append(Score(asked.data, kind, epsilon, seed, right, seconds, refused))
                if asked.images and seed == group[0].seed and len(pool[1]):
                    save_grid(asked.images / f"{asked.data}_{kind}_{epsilon:g}.png", pool[0], pool[1])
            print(summary(group), flush=True)
            scores += group
    if asked.json:
        asked.json.write_text(json.dumps([asdict(score) for score in scores], indent=1))


if __name__ == "__main__":
    main()
