"""The code of ``fl-sim privacy global-dp``, ``dp-sgd`` and ``local-dp``: compute epsilon, noise or number of steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from dp_accounting import dp_event
from matplotlib.figure import Figure

from fl_sim.errors import UserError
from fl_sim.privacy import events
from fl_sim.privacy.accounting import bounds, delta_profile, epsilon_of_counts, noise_multiplier, steps_that_fit
from fl_sim.privacy.events import amplify_fixed_size, amplify_poisson, single_steps
from fl_sim.privacy.terms import (
    Accountant,
    Adjacency,
    check_two_given,
    delta_advice,
    epsilon_in_words,
    rounded_up,
    valid_delta,
)
from fl_sim.report.picture import save_plot

_MOST_STEPS: Final = 10**18
_CURVES: Final[tuple[tuple[Accountant, int, str], ...]] = (("rdp", 200, "-"), ("pld", 8, "o"))

IN_RUNS: Final = (
    "DP-SGD on the records of one data holder, as in local.privacy=dp-sgd of fl-sim run (steps: local steps times "
    "rounds of the client) and in the generator dp-cgan of preprocess=da-fl. It protects a record; "
    "aggregator=global-dp protects a client"
)
"""A sentence for the user: the privacy unit of a DP-SGD plan, and the use of the plan in ``fl-sim run``."""


@dataclass(frozen=True)
class Sampling:
    """Poisson sampling of units at ``rate``, or sampling of ``cohort`` out of ``population`` without replacement.

    ``unit``: the privacy unit. ``population``: the number of all units; None is allowed for Poisson sampling, which
    does not use this number.
    """

    unit: str
    rate: float | None
    cohort: int | None
    population: int | None

    def amplify(self, event: dp_event.DpEvent) -> dp_event.DpEvent:
        """Return one step as an event for the accountant: the mechanism ``event`` on randomly sampled units."""
        if self.rate is not None:
            return amplify_poisson(event, self.rate)
        assert self.cohort is not None
        assert self.population is not None
        return amplify_fixed_size(event, self.cohort, self.population)

    def charges(self, noise: float, steps: int) -> Mapping[dp_event.DpEvent, int]:
        """Return ``steps`` steps as events for the accountant: {event: number of repetitions}.

        ``noise``: the noise multiplier.
        """
        return {self.amplify(dp_event.GaussianDpEvent(noise)): steps}

    def least_noise(self, steps: int, target: float, delta: float, accountant: Accountant) -> float:
        """Return the smallest noise multiplier with which ``steps`` steps cost at most epsilon ``target``."""
        return noise_multiplier(self.amplify, steps, target, delta, accountant=accountant)

    def most_steps(self, noise: float, target: float, delta: float, accountant: Accountant) -> int:
        """Return the largest number of steps that cost at most epsilon ``target``."""
        return steps_that_fit(self.amplify(dp_event.GaussianDpEvent(noise)), target, delta, accountant=accountant)

    def further(self, noise: float) -> Mapping[str, str]:
        """Return additional lines for the printed plan, {label: sentence}. For this sampling there are none."""
        del noise
        return {}


class PlannedReleases(Protocol):
    """The interface of releases whose privacy is planned, such as the steps of DP-SGD or the rounds of Global DP.

    In this module, a step is one release of a noisy sum: a step of DP-SGD, or a round of the other methods.
    """

    @property
    def unit(self) -> str:
        """The privacy unit."""

    @property
    def population(self) -> int | None:
        """The number of all privacy units; None if it is unknown."""

    def amplify(self, event: dp_event.DpEvent) -> dp_event.DpEvent:
        """Return one step as an event for the accountant: the mechanism ``event`` on randomly sampled units."""

    def charges(self, noise: float, steps: int) -> Mapping[dp_event.DpEvent, int]:
        """Return ``steps`` steps as events for the accountant: {event: number of repetitions}."""

    def least_noise(self, steps: int, target: float, delta: float, accountant: Accountant) -> float:
        """Return the smallest noise multiplier with which all releases cost at most epsilon ``target``."""

    def most_steps(self, noise: float, target: float, delta: float, accountant: Accountant) -> int:
        """Return the largest number of steps that cost at most epsilon ``target``."""

    def further(self, noise: float) -> Mapping[str, str]:
        """Return additional lines for the printed plan, {label: sentence}."""


@dataclass(frozen=True)
class BudgetRequest:
    """The quantities of a privacy plan.

    ``sampling``: the planned releases (noisy outputs), including the sampling of privacy units. ``noise``: the noise
    multiplier. ``target``: the largest allowed epsilon. At most one of ``noise``, ``steps`` and ``target`` may be None.
    The plan then computes this quantity from the other two.
    """

    sampling: PlannedReleases
    noise: float | None
    steps: int | None
    target: float | None
    delta: float
    accountant: Accountant


def answer(request: BudgetRequest) -> dict[str, Any]:
    """Compute the missing quantity (epsilon, noise or steps), and return the whole privacy plan as JSON values.

    Raises UserError if two quantities are missing, or if a value is invalid.
    """
    _check(request)
    sampling, delta, accountant = request.sampling, request.delta, request.accountant
    noise, steps = request.noise, request.steps
    asked = "epsilon"
    if noise is None:
        assert steps is not None
        assert request.target is not None
        asked = "noise_multiplier"
        noise = sampling.least_noise(steps, request.target, delta, accountant)
    event = sampling.amplify(dp_event.GaussianDpEvent(noise))
    fits = None
    if request.target is not None and asked == "epsilon":
        fits = sampling.most_steps(noise, request.target, delta, accountant)
    if steps is None:
        assert fits is not None
        asked, steps = "steps", fits
    counts = single_steps(sampling.charges(noise, steps))
    found = bounds(counts, delta)
    epsilons: dict[Accountant, float] = {"rdp": found.rdp, "pld": found.least}
    advice = delta_advice(delta, sampling.population) if sampling.population else None
    at_target = None
    if request.noise and request.steps and request.target and found.pld is not None:
        repeated = [dp_event.SelfComposedDpEvent(one, number) for one, number in counts.items()]
        [at_target] = delta_profile(repeated, [request.target])
    return {
        "unit": sampling.unit, "asked": asked, "epsilon": _json(epsilons[accountant]), "delta": delta,
        "noise_multiplier": noise, "sampling_rate": events.sampling_rate(event), "steps": counts.total(),
        "accountant": accountant, "epsilon_rdp": _json(epsilons["rdp"]),
        "epsilon_pld": None if found.pld is None else _json(found.pld), "no_pld": found.reason,
        "epsilon_least": _json(found.least), "accountant_least": found.accountant,
        "target_epsilon": request.target, "steps_that_fit": fits, "delta_at_target": at_target,
        "mu": _mu(counts), "further": dict(sampling.further(noise)),
        "adjacency": str(events.adjacency(event) or Adjacency.ADD_OR_REMOVE_ONE),
        "sampling": events.sampling_in_words(event, sampling.unit),
        "in_runs": IN_RUNS if sampling.unit == "record" else "",
        "warnings": [advice] if advice else [],
    }  # fmt: skip


def in_words(plan: dict[str, Any]) -> str:
    """Format ``plan``, a result of the function ``answer``, as lines of text."""
    rdp, pld = (epsilon_in_words(plan[name]) for name in ("epsilon_rdp", "epsilon_pld"))
    source = f"the smaller of two sound bounds (RDP {rdp}, PLD {pld})"
    if plan["no_pld"]:
        source = f"by RDP; {plan['no_pld']}"
    lines = [
        f"epsilon           {epsilon_in_words(plan['epsilon_least'])}, {source}",
        f"planned by        {plan['accountant'].upper()}",
        f"delta             {plan['delta']:g}",
        f"noise multiplier  {plan['noise_multiplier']:.6g}  (noise on the sum / clipping norm of one {plan['unit']})",
        f"steps             {plan['steps']}",
        f"unit              {plan['unit']}, {plan['adjacency']}",
        f"sampling          {plan['sampling']}",
    ]
    if plan["unit"] == "record":
        lines.append(f"use in a run      {IN_RUNS}")
    if plan["delta_at_target"] is not None:
        at_target = f"{plan['target_epsilon']:<9g}{plan['delta_at_target']:.4g}"
        lines.append(f"delta at {at_target}  (the delta of these steps at this epsilon, by PLD)")
    lines += [f"{label:18}{sentence}" for label, sentence in plan["further"].items()]
    if plan["mu"] is not None:
        lines.append(f"Gaussian DP       mu {rounded_up(plan['mu'])} (exact, because no step samples units)")
    if plan["steps_that_fit"] is not None:
        lines.append(f"steps that fit    {plan['steps_that_fit']} within epsilon {plan['target_epsilon']:g}")
    return "\n".join(lines)


def plot(request: BudgetRequest, plan: dict[str, Any], path: Path) -> None:
    """Draw how epsilon grows with the number of steps, one curve per accountant (RDP and PLD), into the file ``path``.

    The suffix of ``path`` determines the format of the file.
    """
    if not plan["steps"]:
        raise UserError("nothing to plot: not one step fits the budget; raise --epsilon or --noise-multiplier")
    charges = partial(request.sampling.charges, plan["noise_multiplier"])
    most = plan["steps_that_fit"] if request.steps is None else request.steps
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    title = f"{plan['unit']}, {plan['adjacency']}: q = {plan['sampling_rate']:.4g}, z = {plan['noise_multiplier']:.4g}"
    for accountant, num_points, style in _CURVES:
        at = sorted({max(1, round(most * point / num_points)) for point in range(1, num_points + 1)})
        values = [epsilon_of_counts(charges(steps), request.delta, accountant=accountant) for steps in at]
        axes.plot(at, values, style, label=accountant.upper())
    if request.target is not None:
        axes.axhline(request.target, color="black", linestyle=":", label="budget")
    axes.set(xlabel="steps", ylabel=f"epsilon at delta {request.delta:g}", ylim=(0, None), title=title)
    axes.legend()
    save_plot(figure, path)


def _check(request: BudgetRequest) -> None:
    valid_delta(request.delta)
    count = "--rounds" if request.sampling.unit == "client" else "--steps"
    check_two_given({"--noise-multiplier": request.noise, count: request.steps, "--epsilon": request.target})
    if request.noise is not None and not 0 < request.noise < math.inf:
        raise UserError(f"noise multiplier {request.noise} gives no guarantee: choose a positive number such as 1.0")
    if request.steps is not None and not 1 <= request.steps <= _MOST_STEPS:
        steps = str(request.steps) if abs(request.steps) < 10**30 else "so many"
        raise UserError(f"{steps} steps: give 1 to {_MOST_STEPS:g}")
    if request.target is not None and not 0 < request.target < math.inf:
        raise UserError(f"target epsilon {request.target} is not a positive number: choose one such as 8")


def _mu(counts: Mapping[dp_event.DpEvent, int]) -> float | None:
    """Return the joint privacy of all releases as the parameter mu of Gaussian DP (Dong et al. 2022).

    The result is None if privacy units are sampled for any release.
    """
    if any(events.sampling_rate(event) != 1 for event in counts):
        return None
    total = 0.0
    for event, number in counts.items():
        # the sensitivity in clipping norms: 1 if a unit is added or removed, 2 if a unit is replaced by another
        moved = 1 if isinstance(event, dp_event.GaussianDpEvent) else 2
        total += number * (moved / event.noise_multiplier) ** 2
    return math.sqrt(total)


def _json(epsilon: float) -> float | None:
    return None if math.isinf(epsilon) else epsilon
