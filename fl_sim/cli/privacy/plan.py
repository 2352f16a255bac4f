"""The three questions of planning: epsilon from noise, noise from epsilon, steps that fit; and a plot."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dp_accounting import dp_event
from matplotlib.figure import Figure

from fl_sim.errors import UserError
from fl_sim.privacy import events
from fl_sim.privacy.accounting import bounds, epsilon_of_counts, noise_multiplier, steps_that_fit
from fl_sim.privacy.events import adjacency, amplify_fixed_size, amplify_poisson
from fl_sim.privacy.terms import Accountant, Adjacency, delta_advice, rounded_up, valid_delta
from fl_sim.report.picture import save_plot

_MOST_STEPS: Final = 10**18
_CURVES: Final[tuple[tuple[Accountant, int, str], ...]] = (("rdp", 200, "-"), ("pld", 8, "o"))


NOT_IN_RUNS: Final = (
    "DP-SGD on records that one holder has, as in da-fl's dp-cgan. Clients of fl-sim run take no private steps in "
    "rounds, and no secure sum hides their updates from the server: a record is protected there by preprocess=da-fl, "
    "calibrate.epsilon or algorithm=pate, a client by aggregator=global-dp"
)
"""What a plan of DP-SGD does not say that fl-sim run does."""


@dataclass(frozen=True)
class Sampling:
    """How units are chosen: with probability ``rate`` each, or ``cohort`` of ``population`` without replacement.

    ``population`` may be None under Poisson sampling, where it is not needed and not public.
    """

    unit: str
    rate: float | None
    cohort: int | None
    population: int | None

    def amplify(self, event: dp_event.DpEvent) -> dp_event.DpEvent:
        """Return what ``event`` costs when its units are sampled this way."""
        if self.rate is not None:
            return amplify_poisson(event, self.rate)
        assert self.cohort is not None
        assert self.population is not None
        return amplify_fixed_size(event, self.cohort, self.population)


@dataclass(frozen=True)
class Question:
    """What the user knows; one of ``noise`` (noise multiplier), ``steps`` and ``target`` (epsilon) may be missing."""

    sampling: Sampling
    noise: float | None
    steps: int | None
    target: float | None
    delta: float
    accountant: Accountant


def answer(question: Question) -> dict[str, Any]:
    """Return the plan as JSON values. Raises UserError where too little is known or a value makes no sense."""
    _check(question)
    sampling, delta, accountant = question.sampling, question.delta, question.accountant
    noise, steps = question.noise, question.steps
    asked = "epsilon"
    if noise is None:
        assert steps is not None
        assert question.target is not None
        asked, noise = (
            "noise_multiplier",
            noise_multiplier(sampling.amplify, steps, question.target, delta, accountant=accountant),
        )
    event = sampling.amplify(dp_event.GaussianDpEvent(noise))
    fits = None
    if question.target is not None and asked == "epsilon":
        fits = steps_that_fit(event, question.target, delta, accountant=accountant)
    if steps is None:
        assert fits is not None
        asked, steps = "steps", fits
    counts = Counter({event: steps}) if steps else Counter()
    found = bounds(counts, delta)
    epsilons: dict[Accountant, float] = {"rdp": found.rdp, "pld": found.least}
    advice = delta_advice(delta, sampling.population) if sampling.population else None
    return {
        "unit": sampling.unit,
        "asked": asked,
        "epsilon": _json(epsilons[accountant]),
        "delta": delta,
        "noise_multiplier": noise,
        "sampling_rate": events.sampling_rate(event),
        "steps": steps,
        "accountant": accountant,
        "epsilon_rdp": _json(epsilons["rdp"]),
        "epsilon_pld": None if found.pld is None else _json(found.pld),
        "no_pld": found.reason,
        "epsilon_least": _json(found.least),
        "accountant_least": found.accountant,
        "target_epsilon": question.target,
        "steps_that_fit": fits,
        "adjacency": str(adjacency(event) or Adjacency.ADD_OR_REMOVE_ONE),
        "sampling": events.sampling_in_words(event, sampling.unit),
        "not_in_runs": NOT_IN_RUNS if sampling.unit == "record" else "",
        "warnings": [advice] if advice else [],
    }


def in_words(plan: dict[str, Any]) -> str:
    """Return the plan as lines for people."""
    source = f"the smaller of two sound bounds (RDP {_show(plan['epsilon_rdp'])}, PLD {_show(plan['epsilon_pld'])})"
    if plan["no_pld"]:
        source = f"by RDP; {plan['no_pld']}"
    lines = [
        f"epsilon           {_show(plan['epsilon_least'])}, {source}",
        f"planned by        {plan['accountant'].upper()}",
        f"delta             {plan['delta']:g}",
        f"noise multiplier  {plan['noise_multiplier']:.6g}  (noise on the sum / clipping norm of one {plan['unit']})",
        f"steps             {plan['steps']}",
        f"unit              {plan['unit']}, {plan['adjacency']}",
        f"sampling          {plan['sampling']}",
    ]
    if plan["unit"] == "record":
        lines.append(f"where that runs   {NOT_IN_RUNS}")
    if plan["steps_that_fit"] is not None:
        lines.append(f"steps that fit    {plan['steps_that_fit']} within epsilon {plan['target_epsilon']:g}")
    return "\n".join(lines)


def plot(question: Question, plan: dict[str, Any], path: Path) -> None:
    """Draw epsilon over steps, by both accountants, into ``path`` (its suffix decides the format)."""
    if not plan["steps"]:
        raise UserError("nothing to plot: not one step fits; raise --epsilon or --noise-multiplier")
    event = question.sampling.amplify(dp_event.GaussianDpEvent(plan["noise_multiplier"]))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    title = f"{plan['unit']}, {plan['adjacency']}: q = {plan['sampling_rate']:.4g}, z = {plan['noise_multiplier']:.4g}"
    for accountant, num_points, style in _CURVES:
        at = sorted({max(1, round(plan["steps"] * point / num_points)) for point in range(1, num_points + 1)})
        values = [epsilon_of_counts({event: steps}, question.delta, accountant=accountant) for steps in at]
        axes.plot(at, values, style, label=accountant.upper())
    if question.target is not None:
        axes.axhline(question.target, color="black", linestyle=":", label="budget")
    axes.set(xlabel="steps", ylabel=f"epsilon at delta {question.delta:g}", ylim=(0, None), title=title)
    axes.legend()
    save_plot(figure, path)


def _check(question: Question) -> None:
    valid_delta(question.delta)
    count = "--rounds" if question.sampling.unit == "client" else "--steps"
    known = {"--noise-multiplier": question.noise, count: question.steps, "--epsilon": question.target}
    missing = [name for name, value in known.items() if value is None]
    if len(missing) > 1:
        raise UserError(f"too little to plan with: {' and '.join(missing)} are missing; give two of {', '.join(known)}")
    if question.noise is not None and not 0 < question.noise < math.inf:
        raise UserError(f"noise multiplier {question.noise} gives no guarantee: choose a positive number such as 1.0")
    if question.steps is not None and not 1 <= question.steps <= _MOST_STEPS:
        raise UserError(f"{_short(question.steps)} steps: give 1 to {_MOST_STEPS:g}")
    if question.target is not None and not 0 < question.target < math.inf:
        raise UserError(f"target epsilon {question.target} is not a positive number: choose one such as 8")


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else "that many"


def _json(epsilon: float) -> float | None:
    return None if math.isinf(epsilon) else epsilon


def _show(epsilon: float | None) -> str:
    return "none" if epsilon is None else rounded_up(epsilon, 5)
