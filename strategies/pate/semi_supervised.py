"""PATE's students that also learn from unlabelled records, and nearest neighbours among public records.

``FixMatch`` (Sohn et al. 2020, algorithm 1) predicts pseudo-labels on weakly augmented views of records. Where the
prediction is confident, the network learns this prediction on strongly augmented views. This module extends the paper's
method in two ways. First, at one step early in training, labels with which the network disagrees are left out. (A
network that has not yet memorised the labels disagrees with wrong labels.) Second, confident pseudo-labels from
neighbours replace the network's pseudo-labels.

``FeatureMatchingGan`` (PATE-G) trains the student as the discriminator of a semi-supervised GAN (Salimans et al. 2016,
sections 3.1 and 5). A classifier's L logits also give the probability that a record is real: D(x) = Z / (Z + 1), where
Z is the sum of the exponentials of the logits. This is the same as an extra class "fake" with logit 0. The generator is
trained until the classifier's mean features on generated records match those on real records. Without the
data-dependent initialisation (Salimans and Kingma 2016, section 3) the noise between the layers would be larger than
the signal.

Neighbours: images are compared by their histograms of gradients (Dalal and Triggs 2005). The records that teachers
label are chosen by greedy facility location (Wei, Iyer and Bilmes 2015): each step chooses the record that resembles
many records which no chosen record resembles yet. Labels are propagated over the graph of nearest neighbours (Zhou et
al. 2004). All of these steps read only public records and published labels, so they have no privacy cost.
"""

from __future__ import annotations

import copy
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.errors import UserError
from fl_sim.importing import torch
from fl_sim.seeding import seed_torch, torch_kept
from fl_sim.settings import Settings
from strategies.fixmatch import Augmentation, pseudo_labels, view
from strategies.pate.student import (
    Batches,
    Coins,
    StudentData,
    TrainingPart,
    Watch,
    descend,
    generator_for,
    move_average,
    nobody,
    predict,
    rise_and_cosine,
    set_rate,
)

_LATENT: Final = 100  # the number of random numbers in the GAN generator's input
_START: Final = 500  # the number of records from which the initial scales of the weights are computed
_DIRECTIONS: Final = 8  # the number of bins (directions) in a histogram of gradients
_MOST_COMPARED: Final = 10_000
"""The largest number of records between which all pairwise distances are computed: these take 400 MB."""
_MOST_CHOSEN: Final = 1000
_NEIGHBOURS: Final = 10
_SPREADING: Final = 0.99  # alpha of Zhou et al. 2004: the weight of the neighbours in each iteration
_ITERATIONS: Final = 90


class FixMatch(Settings):
    """FixMatch: confident predictions on weak views (probability >= ``threshold``) are the targets of strong views.

    ``unlabelled_ratio``: the number of unlabelled records per labelled record in a batch. ``neighbours``: if true,
    labels are propagated over a graph of similar records before training; a confident result is the record's
    pseudo-label in all steps. ``doubt_after``: a share of the steps. After this share, labels with which the network
    disagrees are left out; 1 keeps all labels. ``averaging``: the decay of the moving average of the weights; this
    average is the returned model. ``steps``: the number of optimiser steps. ``batch_size``: the number of labelled
    records in a step. ``learning_rate``: the learning rate of AdamW. ``weight_decay``: the weight decay of AdamW.
    ``augmentation``: the random changes of the strong views.
    """

    kind: Literal["fixmatch"] = "fixmatch"
    steps: int = Field(900, ge=1)
    batch_size: int = Field(50, ge=1)
    unlabelled_ratio: int = Field(4, ge=1)
    threshold: float = Field(0.9, gt=0, lt=1)
    learning_rate: float = Field(4e-3, gt=0)
    weight_decay: float = Field(0.02, ge=0)
    averaging: float = Field(0.99, ge=0, lt=1)
    neighbours: bool = True
    doubt_after: float = Field(0.06, ge=0, le=1)
    augmentation: Augmentation = Augmentation(rotation=15, scale=0.12, shear=0.2, shift=0.1, elastic=0.05, erase=0.2)

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return the network ``student_cnn``. Raises UserError for records that are not images."""
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        if len(input_shape) != 3:
            raise UserError(
                f"student fixmatch learns from augmented images, and these records have shape {input_shape}: take "
                "student supervised or random-forest"
            )
        return networks.student_cnn(input_shape, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a copy of ``model`` (the student), trained on ``data``, in evaluation mode."""
        if len(data.unlabelled) == 0 or data.unlabelled.ndim != 4:
            raise UserError(
                f"student fixmatch learns from unlabelled images, (n, channels, height, width), and the pool has shape "
                f"{tuple(data.unlabelled.shape)}: take supervised"
            )
        with torch_kept():
            seed_torch(seed, "fixmatch student")
            generator = generator_for(seed, "fixmatch student")
            fast = copy.deepcopy(model).to(memory_format=torch.channels_last)  # a third faster on a CPU
            return _FixMatchRun(self, data, fast, generator).result(watch).to(memory_format=torch.contiguous_format)


class _FixMatchRun:
    """The state of FixMatch's training: network, averaged weights, class frequencies, labels from neighbours."""

    def __init__(
        self, settings: FixMatch, data: StudentData, model: torch.nn.Module, generator: torch.Generator
    ) -> None:
        self.settings, self.data, self.model, self.generator = settings, data, model, generator
        self.average = copy.deepcopy(model).eval()
        self.trusted = torch.ones(len(data.labels))
        self.predicted = torch.full((data.num_classes,), 1 / data.num_classes)
        self.spread = torch.zeros(len(data.unlabelled), data.num_classes, device=data.unlabelled.device)
        if settings.neighbours:
            shares = spread(torch.cat([data.labelled, data.unlabelled]), data.labels, data.num_classes)
            shares = shares[len(data.labels) :].square()  # squaring makes the probabilities less uniform
            self.spread = shares / shares.sum(dim=1, keepdim=True)

    def result(self, watch: Watch) -> torch.nn.Module:
        settings, data = self.settings, self.data
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            settings.learning_rate,
            betas=(0.9, 0.99),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        labelled = Batches(len(data.labels), settings.batch_size, self.generator)
        unlabelled = Batches(len(data.unlabelled), settings.batch_size * settings.unlabelled_ratio, self.generator)
        doubt = round(settings.doubt_after * settings.steps)
        parts: dict[str, TrainingPart] = {
            "model": self.model, "average": self.average, "optimizer": optimizer, "labelled": labelled,
            "unlabelled": unlabelled, "coins": Coins(self.generator), "beliefs": self,
        }  # fmt: skip
        for step in range(watch.begin(parts), settings.steps):
            if step == doubt:
                self.trusted = self._agreement()
            rate = set_rate(optimizer, settings.learning_rate * rise_and_cosine(step, settings.steps))
            descend(optimizer, self._loss(next(labelled), next(unlabelled)))
            move_average(self.average, self.model, min(settings.averaging, (step + 1) / (step + 10)))
            watch(step + 1, rate, self.average)
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {"trusted": self.trusted, "predicted": self.predicted}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.trusted, self.predicted = state_dict["trusted"], state_dict["predicted"]

    def _loss(self, labelled: torch.Tensor, unlabelled: torch.Tensor) -> torch.Tensor:
        settings, data, moves = self.settings, self.data, self.settings.augmentation
        public, labels = data.unlabelled[unlabelled], data.labels[labelled]
        self.model.train()
        with torch.no_grad():
            guess = self._aligned(self.model(view(moves.weak, public, self.generator)).softmax(dim=1))
            given = self.spread[unlabelled]
            guess = torch.where(given.amax(dim=1, keepdim=True) >= settings.threshold, given, guess)
        pseudo, is_sure = pseudo_labels(guess, settings.threshold)
        views = [view(moves.strong, records, self.generator) for records in (data.labelled[labelled], public)]
        logits = self.model(torch.cat(views))
        ours, theirs = logits[: len(labelled)], logits[len(labelled) :]
        supervised = torch.nn.functional.cross_entropy(ours, labels, reduction="none") * self.trusted[labelled]
        consistent = torch.nn.functional.cross_entropy(theirs, pseudo, reduction="none") * is_sure
        return supervised.mean() + consistent.mean()

    def _aligned(self, guess: torch.Tensor) -> torch.Tensor:
        """Return class probabilities divided by the mean prediction (distribution alignment, Berthelot et al. 2020)."""
        self.predicted = 0.99 * self.predicted + 0.01 * guess.mean(dim=0)
        aligned = guess / self.predicted
        return aligned / aligned.sum(dim=1, keepdim=True)

    def _agreement(self) -> torch.Tensor:
        """Return the labels' weights in training, (labelled records,): 1 if the averaged network agrees, else 0.

        If the network agrees with less than half of the labels, it is not trusted, and all weights are 1.
        """
        agrees = (predict(self.average, self.data.labelled) == self.data.labels).float()
        return agrees if agrees.mean() >= 0.5 else torch.ones_like(agrees)


class FeatureMatchingGan(Settings):
    """Trains classifier and generator by Adam, one step each in turn, as in Salimans et al. 2016.

    ``steps``: the number of training steps. ``learning_rate``: the learning rate of Adam; it falls to 0 over the second
    half of the steps. ``batch_size``: the number of labelled records in a step; equal numbers of unlabelled and of
    generated records are added. ``averaging``: the decay of the moving average of the weights; this average is the
    returned model.
    """

    kind: Literal["pate-g"] = "pate-g"
    steps: int = Field(2000, ge=1)
    batch_size: int = Field(100, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    averaging: float = Field(0.99, ge=0, lt=1)

    def network(self, input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
        """Return ``conv_classifier`` for colour images, and the MNIST network ``gan_classifier`` for other records."""
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        colour = len(input_shape) == 3 and input_shape[0] == 3 and min(input_shape[1:]) >= 8
        build = networks.conv_classifier if colour else networks.gan_classifier
        return build(input_shape, num_classes)

    def train(self, data: StudentData, model: torch.nn.Module, seed: int, watch: Watch = nobody) -> torch.nn.Module:
        """Return a trained copy of ``model``, in evaluation mode.

        The generator learns to match the mean features of real records: the inputs of the last linear layer.
        """
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        if len(data.unlabelled) == 0:
            raise UserError("student pate-g learns from unlabelled records and there are none: take supervised")
        with torch_kept():
            seed_torch(seed, "pate-g student")
            random, model = generator_for(seed, "pate-g student"), copy.deepcopy(model).train()
            networks.start_from(model, data.unlabelled[:_START])
            average, game = copy.deepcopy(model).eval(), _Game(model, data)
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            learner = torch.optim.Adam(trained, self.learning_rate, betas=(0.5, 0.999), fused=True)
            forger = torch.optim.Adam(game.forger.parameters(), self.learning_rate, betas=(0.5, 0.999), fused=True)
            labelled = Batches(len(data.labels), self.batch_size, random)
            public = Batches(len(data.unlabelled), self.batch_size, random)
            parts: dict[str, TrainingPart] = {
                "model": model, "average": average, "forger": game.forger, "optimizer": learner,
                "forger optimizer": forger, "labelled": labelled, "public": public, "coins": Coins(random),
            }  # fmt: skip
            for step in range(watch.begin(parts), self.steps):
                rate = self.learning_rate * min(1.0, 2 * (1 - step / self.steps))
                for optimizer in (learner, forger):
                    set_rate(optimizer, rate)
                real, theirs = data.unlabelled[next(public)], next(labelled)
                descend(learner, game.classifier_loss(data.labelled[theirs], data.labels[theirs], real))
                descend(forger, game.forger_loss(real))
                move_average(average, model, min(self.averaging, (step + 1) / (step + 10)))
                watch(step + 1, rate, average)
        return average


class _Game:
    """A GAN: a classifier (feature extractor and head), a generator (``forger``), and both networks' losses."""

    def __init__(self, model: torch.nn.Module, data: StudentData) -> None:
        from strategies.pate import networks  # noqa: PLC0415 (needs torch as it is imported)

        layers = list(model.children())
        last = -2 if isinstance(layers[-2], networks.GaussianNoise) else -1
        self.body, self.head = torch.nn.Sequential(*layers[:last]), torch.nn.Sequential(*layers[last:])
        self.shape = data.unlabelled.shape[1:]
        self.forger = networks.forger(self.shape, _LATENT).to(data.unlabelled.device)
        self.low, self.high = data.unlabelled.amin(), data.unlabelled.amax()

    def classifier_loss(self, labelled: torch.Tensor, labels: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = self._forged(len(real))
        # One forward pass for all records saves time, because every forward pass normalises the weights again.
        logits = self.head(self.body(torch.cat([labelled, real, fake])))
        ours, logits_real, logits_fake = torch.split(logits, [len(labelled), len(real), len(fake)])
        mass_real, mass_fake = logits_real.logsumexp(dim=1), logits_fake.logsumexp(dim=1)
        # With mass = log Z: -log D(real) = softplus(-mass), and -log(1 - D(fake)) = softplus(mass).
        is_real = torch.nn.functional.softplus(-mass_real).mean() + torch.nn.functional.softplus(mass_fake).mean()
        return torch.nn.functional.cross_entropy(ours, labels) + is_real / 2

    def forger_loss(self, real: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.body(real).mean(dim=0)
        trained = [weight for weight in self.body.parameters() if weight.requires_grad]
        for weight in trained:
            weight.requires_grad = False  # the generator's step needs no gradients of the classifier's weights
        features = self.body(self._forged(len(real))).mean(dim=0)
        for weight in trained:
            weight.requires_grad = True
        loss: torch.Tensor = (features - target).square().mean()
        return loss

    def _forged(self, count: int) -> torch.Tensor:
        forged = self.forger(torch.rand(count, _LATENT, device=self.low.device))
        images: torch.Tensor = self.low + (self.high - self.low) * forged
        return images.reshape(count, *self.shape)


def representatives(inputs: torch.Tensor, count: int) -> NDArray[np.int64]:
    """Return ``count`` indices into ``inputs``, shape (n, *shape), n >= ``count``: representative records first.

    At most 1,000 of the first 10,000 records are chosen as representative. All other records follow in their order in
    ``inputs``.
    """
    away = _distances(descriptors(inputs[:_MOST_COMPARED]))
    near = away.kthvalue(min(_NEIGHBOURS + 1, len(away)), dim=1).values.median().clamp(min=1e-12)
    likeness = away.div_(near).square_().neg_().exp_()
    covered, gains, chosen = torch.zeros(len(likeness)), likeness.sum(dim=1), []
    for _ in range(min(count, len(likeness), _MOST_CHOSEN)):
        best, stale = int(gains.argmax()), -1
        while best != stale:  # lazy greedy: gains only fall, so a gain that is still largest after recomputing is best
            gains[best] = (likeness[best] - covered).clamp(min=0).sum()
            best, stale = int(gains.argmax()), best
        chosen.append(best)
        covered = torch.maximum(covered, likeness[best])
        gains[best] = -1.0
    rest = np.setdiff1d(np.arange(len(inputs)), chosen)
    return np.concatenate([np.array(chosen, dtype=np.int64), rest])[:count]


def spread(inputs: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return class probabilities of each record, shape (n, classes), by propagating ``labels`` to similar records.

    The first ``len(labels)`` records of ``inputs`` have the ``labels``. Each row of the result has sum 1. Classes are
    assumed to be about equally frequent.
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
    """Return a vector of norm 1 for each record, shape (n, d), on the CPU; for images, histograms of gradients.

    For other records, and for images below 8x8 pixels, the vector contains the record's standardised values.
    """
    inputs = inputs.cpu()
    if inputs.ndim != 4 or min(inputs.shape[2:]) < 8:
        rows = inputs.flatten(1)
        rows = (rows - rows.mean(dim=0)) / rows.std(dim=0).clamp(min=1e-6)
    else:
        rows = torch.cat([_gradients(part) for part in torch.split(inputs, 500)])
    return torch.nn.functional.normalize(rows, dim=1)


def _gradients(images: torch.Tensor) -> torch.Tensor:
    """Return descriptors of images: histograms of gradient directions in overlapping cells, (n, directions * cells)."""
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
    """Return the Euclidean distances between ``rows`` of norm 1, shape (n, n)."""
    return (rows @ rows.T).mul_(-2).add_(2).clamp_(min=0).sqrt_()
