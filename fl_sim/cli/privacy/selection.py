"""The code of ``fl-sim privacy selection``: the privacy cost of choosing settings by repeated private runs."""

import math
from dataclasses import dataclass
from typing import Any

from dp_accounting import dp_event

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon_of_counts
from fl_sim.privacy.events import amplify_poisson
from fl_sim.privacy.selection import (
    NegativeBinomialTrials,
    PoissonTrials,
    Trials,
    TrialsKind,
    epsilon_of_selection,
    most_likely_at_most,
    noise_of_selection,
)
from fl_sim.privacy.terms import epsilon_in_words, none_if_infinite, valid_delta

_SHARE = 0.99


@dataclass(frozen=True)
class SelectionRequest:
    """The quantities of a privacy plan for repeated runs. Each run has ``steps`` noisy steps on Poisson-sampled units.

    ``rate``: the sampling rate, in (0, 1]. ``noise``: the noise multiplier, or None. ``target``: the largest allowed
    epsilon of the whole selection, or None. Exactly one of ``noise`` and ``target`` must be given. ``trials``: the
    distribution of the random number of runs.
    """

    rate: float
    noise: float | None
    steps: int
    target: float | None
    delta: float
    trials: Trials

    def counts(self, noise: float) -> dict[dp_event.DpEvent, int]:
        """Return the releases of one run with the noise multiplier ``noise``: {privacy event: number}."""
        return {amplify_poisson(dp_event.GaussianDpEvent(noise), self.rate): self.steps}


def trials_of(distribution: TrialsKind, mean: float, eta: float | None) -> Trials:
    """Return the distribution of the trials. Raises UserError if ``eta`` is given for the Poisson distribution."""
    if distribution == "negative-binomial":
        return NegativeBinomialTrials(mean, 1.0 if eta is None else eta)
    if eta is not None:
        raise UserError(f"--eta {eta:g} is for --distribution negative-binomial: leave it out")
    return PoissonTrials(mean)


def answer(request: SelectionRequest) -> dict[str, Any]:
    """Compute the missing quantity (epsilon or noise), and return the whole plan as JSON values.

    Raises UserError if not exactly one of noise and epsilon is given, or if a value is invalid.
    """
    _check(request)
    trials, delta, noise, asked = request.trials, request.delta, request.noise, "epsilon"
    if noise is None:
        assert request.target is not None
        noise, asked = noise_of_selection(request.counts, trials, request.target, delta), "noise_multiplier"
    counts = request.counts(noise)
    published = {event: number * math.ceil(trials.mean) for event, number in counts.items()}
    shape = (trials.eta, trials.gamma) if isinstance(trials, NegativeBinomialTrials) else (None, None)
    return {
        "asked": asked, "epsilon": none_if_infinite(epsilon_of_selection(counts, trials, delta)), "delta": delta,
        "epsilon_of_one_run": none_if_infinite(epsilon_of_counts(counts, delta)),
        "epsilon_if_all_are_published": none_if_infinite(epsilon_of_counts(published, delta)),
        "noise_multiplier": noise, "sampling_rate": request.rate, "steps": request.steps, "accountant": "rdp",
        "distribution": "poisson" if shape[0] is None else "negative-binomial", "trials": trials.mean,
        "eta": shape[0], "gamma": shape[1],
        "trials_at_99_percent": most_likely_at_most(trials, _SHARE),
    }  # fmt: skip


def in_words(plan: dict[str, Any]) -> str:
    """Format ``plan``, a result of the function ``answer``, as lines of text."""
    law = "Poisson; if the number of trials is 0, a result that uses no data is published"
    if plan["eta"] is not None:
        law = f"truncated negative binomial, eta {plan['eta']:g}, gamma {plan['gamma']:.6g}"
    number, most = math.ceil(plan["trials"]), plan["trials_at_99_percent"]
    names = ("epsilon", "epsilon_of_one_run", "epsilon_if_all_are_published")
    best, one, all_published = (epsilon_in_words(plan[name]) for name in names)
    return "\n".join([
        f"epsilon           {best} for the best of all trials, by RDP, at delta {plan['delta']:g}",
        f"  of one run      {one}",
        f"  of all runs     {all_published} if {number} results were published",
        f"noise multiplier  {plan['noise_multiplier']:.6g}  (noise on the sum / clipping norm)",
        f"one run           {plan['steps']} steps, sampling rate {plan['sampling_rate']:g}",
        f"trials            {plan['trials']:g} on average, at most {most} with probability {_SHARE:g}",
        f"distribution      {law}",
        "conditions        the number of trials is drawn at random for each selection and stays secret; each trial",
        "                  draws its settings at random from a fixed list; only the best result is published; its",
        "                  score is private, or uses public records only",
    ])  # fmt: skip


def _check(request: SelectionRequest) -> None:
    valid_delta(request.delta)
    if (request.noise is None) == (request.target is None):
        raise UserError("give one of --noise-multiplier and --epsilon, and the other one is computed")
    if request.noise is not None and not 0 < request.noise < math.inf:
        raise UserError(f"noise multiplier {request.noise} gives no guarantee: choose a positive number such as 1.0")
