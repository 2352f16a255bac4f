"""Gradient inversion: the reconstruction of training records from the gradient of one step of one client.

The analytic method is for models whose first layer is linear (``fl_sim.threats.first_layer``). It computes a single
record exactly. In a batch, it computes each record that alone activates at least one neuron. For all other models,
an optimiser searches for records with the observed gradient (``fl_sim.threats.gradient_matching``), after their labels
are inferred (``fl_sim.threats.labels``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import numpy as np
import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.seeding import rng
from fl_sim.threats.candidates import Recognised, recognised
from fl_sim.threats.finished import FinishedRun
from fl_sim.threats.first_layer import RowMeans, imprinted, label_of, linear_first, quotient
from fl_sim.threats.gradient_matching import PixelBounds, matched, start_of
from fl_sim.threats.labels import bias_gradients, estimated_counts, head_bias
from fl_sim.threats.observed import Observed, server_of
from fl_sim.training.records import Scale
from fl_sim.types import Params

CANDIDATES = 10
"""The number of candidate records. One of them produced a noisy gradient, and the attacker guesses which one."""
_ANALYTIC, _OPTIMISED = 20, 4
"""The default number of attacked records: for the analytic method, then for the optimiser."""
_STEPS, _VARIATION = 400, 0.1
"""The optimiser's default number of steps, and the default weight of the total variation in its objective."""
_DRAWS, _MOST_NUMBERS = 100, 10**8
"""The number of noise draws for each gradient, and the largest total of random numbers in all draws."""


@dataclass(frozen=True)
class Asked:
    """The user's options for the attack.

    ``records``: the number of attacked records; 0 means the default of the method. ``batch``: the number of records in
    one gradient. ``method``: "analytic", "optimise" or "auto". "auto" means the analytic method if ``batch`` is 1 and
    the model allows this method, else the optimiser. ``steps``: the number of optimiser steps; None for the default.
    ``variation``: the weight of the total variation; None for the default. ``at``: the attacked model: "initial"
    (before round 1) or "final" (after the last round). ``imprint``: True for a malicious server, which sends an imprint
    layer in place of the first layer.
    """

    records: int = 0
    batch: int = 1
    method: Literal["auto", "analytic", "optimise"] = "auto"
    steps: int | None = None
    variation: float | None = None
    at: Literal["initial", "final"] = "final"
    imprint: bool = False


@dataclass(frozen=True, eq=False)
class Inverted:
    """One record and its reconstruction.

    ``record``: the record, as pixels in [0, 1] or in the units of the data set. ``found``: its reconstruction, in the
    same units. ``error``: the largest absolute difference between the normalised record and its reconstruction, divided
    by the record's largest absolute value. ``label_found``: True if the label was inferred correctly. ``typical``: the
    mean of the test records, as a baseline that needs no gradient.
    """

    client: int
    record: torch.Tensor
    found: torch.Tensor
    error: float
    label_found: bool
    typical: torch.Tensor

    @property
    def squared(self) -> float:
        """The mean squared error of the reconstruction over all numbers of the record."""
        return float((self.record - self.found).square().mean())

    @property
    def psnr(self) -> float:
        """The peak signal-to-noise ratio in decibels, for pixels in [0, 1]; infinite for an exact reconstruction."""
        return _psnr(self.squared)

    @property
    def psnr_of_typical(self) -> float:
        """The peak signal-to-noise ratio of the baseline ``typical`` in decibels."""
        return _psnr(float((self.record - self.typical).square().mean()))


def _psnr(squared: float) -> float:
    return math.inf if not squared else -10 * math.log10(squared)


@dataclass(frozen=True)
class Attempt:
    """The attack on one gradient: the reconstructions of its records, in the order of the client's records.

    ``noise_multiplier``: the noise multiplier of the step, None without noise. ``recognised``: the success of a second
    attack, in which the attacker guesses which of ``CANDIDATES`` records produced a noisy gradient; None without noise.
    """

    found: list[Inverted]
    noise_multiplier: float | None = None
    recognised: Recognised | None = None


def attack(finished: FinishedRun, asked: Asked, show: Callable[[str], object] = str) -> tuple[str, list[Attempt]]:
    """Attack one gradient per client, until ``asked.records`` records are attacked.

    Each gradient is of ``asked.batch`` records. Return the name of the used method, and one attempt for each gradient.
    ``show``: a function that is called with progress messages. Raises UserError if clients of this run send no
    gradients, or if the method does not support the model or the batch size.
    """
    job, layer = finished.job, _layer(finished.runtime.model, asked)
    wanted = asked.records or (_ANALYTIC if layer is not None else _OPTIMISED)
    sizes = job.shards.sizes
    holders = np.flatnonzero(sizes >= asked.batch)[: -(-wanted // asked.batch)].tolist()
    if not holders:
        raise UserError(
            f"no client of {finished.out} has {asked.batch} records: give a smaller --batch, at most {sizes.max()}"
        )
    if not torch.is_floating_point(finished.test[0]):
        raise UserError(f"the records of {finished.out} are sequences of tokens: give a run of images or numbers")
    server, attempts = server_of(finished, asked.at), list[Attempt]()
    for number, client in enumerate(holders):
        observed = Observed.of(finished, client, server)
        observed.refuse_protected_updates(finished)
        if asked.imprint and layer is not None:
            observed = observed.at(imprinted(observed.model, layer, finished.test[0]))
        said = f"gradient {number + 1} of {len(holders)}, step"
        found = _reconstructed(finished, observed, client, asked, layer, partial(_show_step, show, said))
        attempts.append(_traced(finished, observed, Attempt(found), len(holders)))
    return "optimise" if layer is None else "analytic", attempts


def _show_step(show: Callable[[str], object], said: str, step: int) -> None:
    show(f"{said} {step}")


def _layer(model: nn.Module, asked: Asked) -> str | None:
    """Choose the method: return the name of the first layer for the analytic method, or None for the optimiser."""
    is_analytic = asked.method == "analytic" or asked.imprint
    if asked.method == "optimise" and asked.imprint:
        raise UserError("--imprint is for the analytic method only: remove --imprint or --method optimise")
    if not is_analytic and (asked.method == "optimise" or asked.batch > 1):
        return None
    try:
        layer = linear_first(model)
    except UserError:
        if is_analytic:
            raise
        return None
    if asked.steps is not None or asked.variation is not None:
        raise UserError(
            "--steps and --variation are for the optimiser, but the analytic method uses no optimiser: "
            "leave them out, or add --method optimise"
        )
    return layer


def _reconstructed(
    finished: FinishedRun, observed: Observed, client: int, asked: Asked, layer: str | None,
    show: Callable[[int], object],
) -> list[Inverted]:  # fmt: skip
    """Return reconstructions of the client's first ``asked.batch`` records from their common gradient."""
    inputs, labels = (part[: asked.batch] for part in finished.held_by(client))
    gradient, units = observed.noisy(observed.summed(inputs, labels), 0), Units.of(finished, inputs)
    if layer is not None:
        if f"{layer}.weight".lstrip(".") not in gradient:
            raise UserError(
                f"the first layer ({layer or 'the model'}) stays on the clients of this run, and analytic inversion "
                "needs its gradient: give a run whose clients send this layer"
            )
        made, guesses = _computed(observed, gradient, layer, inputs, asked)
    else:
        guesses = _guessed(finished, observed, gradient, asked.batch).to(labels)
        start = start_of(tuple(inputs.shape), inputs, rng(finished.job.experiment.seed, "inversion", client))
        made = matched(
            observed.model, gradient, guesses, start,
            steps=asked.steps or _STEPS, variation=_VARIATION if asked.variation is None else asked.variation,
            bounds=units.bounds, show=show,
        )  # fmt: skip
    typical = units.shown(finished.test[0].mean(0, keepdim=True))[0].cpu()
    return _compared(client, (inputs, labels), (made, guesses), units, typical)


def _computed(
    observed: Observed, gradient: Params, layer: str, inputs: torch.Tensor, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return records and labels, computed from ``gradient`` by the analytic method.

    For a batch, the method computes one candidate from each neuron. The result contains the nearest candidate to each
    true record in ``inputs``. A real attacker does not know ``inputs``, and would have to select plausible candidates.
    """
    head = gradient[head_bias(observed)]
    if asked.batch == 1 and not asked.imprint:
        return quotient(gradient, layer).to(inputs).reshape(inputs.shape), head.argmin()[None]
    rows = (RowMeans.between if asked.imprint else RowMeans.of)(gradient, layer)
    neurons = rows.nearest(inputs)
    made = rows.inputs[neurons].to(inputs).reshape(inputs.shape)
    labels = [
        label_of(observed, layer, neuron, record, float(rows.entries[neuron]), len(head))
        for neuron, record in zip(neurons.tolist(), made, strict=True)
    ]
    return made, torch.tensor(labels, device=inputs.device)


def _guessed(finished: FinishedRun, observed: Observed, gradient: Params, batch: int) -> torch.Tensor:
    """Return the estimated labels of ``batch`` records from the gradient of the last layer's bias, (batch,)."""
    bias = gradient[head_bias(observed)]
    if batch == 1:
        return bias.argmin()[None]
    counts = estimated_counts(bias.double().cpu().numpy(), bias_gradients(observed, finished.test), batch)
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _compared(
    client: int, true: tuple[torch.Tensor, torch.Tensor], made: tuple[torch.Tensor, torch.Tensor], units: "Units",
    typical: torch.Tensor,
) -> list[Inverted]:  # fmt: skip
    """Return pairs (record, reconstruction): the assignment with the smallest sum of squared errors."""
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 (the import takes half a second)

    distances = (true[0].double().flatten(1)[:, None] - made[0].double().flatten(1)[None]).square().sum(2)
    places = linear_sum_assignment(np.nan_to_num(distances.cpu().numpy(), nan=math.inf, posinf=1e300))[1]
    found = []
    for record, label, place in zip(*true, places.tolist(), strict=True):
        other = made[0][place]
        error = float((other - record).abs().double().max() / record.abs().max().clamp(min=1e-30))
        before, after = (units.shown(one[None])[0].cpu() for one in (record, other))
        found.append(Inverted(client, before, after, error, bool(made[1][place] == label), typical))
    return found


def _traced(finished: FinishedRun, observed: Observed, attempt: Attempt, gradients: int) -> Attempt:
    """Return ``attempt`` with its noise multiplier and the success of the guessing attack.

    If the steps of the run have no noise, ``attempt`` is returned unchanged.

    ``gradients``: the number of gradients in the whole attack. With many gradients, the attacker makes fewer guesses
    for each of them, to save time.
    """
    if observed.private is None or observed.step is None:
        return attempt
    rounds = max(1, min(_DRAWS, _MOST_NUMBERS // (gradients * observed.step.size)) // CANDIDATES)
    inputs, labels = finished.held_by(attempt.found[0].client)
    more = CANDIDATES - min(CANDIDATES, len(labels))  # the number of candidates from the test records
    tests, test_labels = finished.test
    noise = observed.private.noise_multiplier
    found = recognised(
        observed, torch.cat([inputs[:CANDIDATES], tests[:more]]), torch.cat([labels[:CANDIDATES], test_labels[:more]]),
        noise_multiplier=noise, draws=CANDIDATES * rounds,
    )  # fmt: skip
    return replace(attempt, noise_multiplier=noise, recognised=found)


@dataclass(frozen=True)
class Units:
    """The conversion of normalised inputs to the units of a data set; for images, these are pixels in [0, 1].

    ``scale``: the public constants of normalisation. ``is_image``: True for images, whose pixels are clipped to [0, 1].
    """

    scale: Scale
    is_image: bool

    @classmethod
    def of(cls, finished: FinishedRun, like: torch.Tensor) -> Self:
        """Return the units of a run's data set, as tensors on the device of the inputs ``like`` (n, *input shape)."""
        records = finished.job.records
        scale = Scale.of(records, np.dtype(np.float32), like.ndim).to(like.device)
        return cls(scale, records.train.inputs.dtype == np.uint8)

    @property
    def bounds(self) -> PixelBounds:
        """The smallest and the largest value of a normalised pixel; no limits for inputs that are not images."""
        if not self.is_image:
            return PixelBounds()
        return PixelBounds((0 - self.scale.offset) / self.scale.divisor, (1 - self.scale.offset) / self.scale.divisor)

    def shown(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return normalised ``inputs``, (n, *input shape), in the units of the data set."""
        values = inputs * self.scale.divisor + self.scale.offset
        return values.clamp(0, 1) if self.is_image else values
