"""The code of ``fl-sim privacy counts``: the privacy cost of noisy counts of correct predictions on test records."""

import math
from dataclasses import dataclass
from typing import Any

from clients.noisy_counts import counting_cost
from clients.paid_rounds import ClientProtection, RoundCost
from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon_of_counts, steps_that_fit
from fl_sim.privacy.terms import (
    Adjacency,
    check_two_given,
    delta_advice,
    epsilon_in_words,
    none_if_infinite,
    valid_delta,
)


@dataclass(frozen=True)
class CountsRequest:
    """The quantities of a plan for noisy counts, as in runs with ``evaluate.clients=own`` (``clients.noisy_counts``).

    ``std``: the standard deviation of the noise on a count. ``times``: the number of counts of a client. ``target``:
    the largest allowed epsilon of a test record. At most one of ``std``, ``times`` and ``target`` may be None.
    ``num_records``: the number of test records of a client, for the error of the client's measured accuracy; None if it
    is unknown.
    """

    std: float | None
    times: int | None
    target: float | None
    delta: float
    num_records: int | None = None

    def cost(self, times: int) -> RoundCost:
        """Return the cost of one of ``times`` counts, exactly as a run computes it."""
        return counting_cost(ClientProtection(self.target, self.delta, 1.0, self.std, "secret"), times)


def answer(request: CountsRequest) -> dict[str, Any]:
    """Compute the missing quantity (epsilon, noise or number of counts), and return the whole plan as JSON values.

    Raises UserError if two quantities are missing, or if a value is invalid.
    """
    _check(request)
    delta, times, asked = request.delta, request.times, "epsilon"
    if request.std is None:
        asked = "count_noise"
    cost = request.cost(times or 1)
    if times is None:
        assert request.target is not None
        asked, times = "measurements", steps_that_fit(cost.event, request.target, delta)
    fits = None if request.target is None else steps_that_fit(cost.event, request.target, delta)
    std, count = cost.noise_multiplier, request.num_records
    advice = delta_advice(delta, count) if count else None
    return {
        "unit": "record", "adjacency": str(Adjacency.ADD_OR_REMOVE_ONE), "asked": asked,
        "epsilon": none_if_infinite(epsilon_of_counts({cost.event: times}, delta) if times else 0.0), "delta": delta,
        "count_noise": std, "measurements": times, "measurements_that_fit": fits, "accountant": "rdp",
        "records": count, "std_of_accuracy": std / count if count else None, "warnings": [advice] if advice else [],
    }  # fmt: skip


def in_words(plan: dict[str, Any]) -> str:
    """Format ``plan``, a result of the function ``answer``, as lines of text."""
    lines = [
        f"epsilon           {epsilon_in_words(plan['epsilon'])}, by RDP, at delta {plan['delta']:g}",
        f"noise on a count  standard deviation {plan['count_noise']:.6g}; one record changes a count by at most 1",
        f"measurements      {plan['measurements']}, each with one count of every client",
    ]
    if plan["measurements_that_fit"] is not None:
        lines.append(f"  that fit        {plan['measurements_that_fit']} within the given epsilon")
    lines.append(f"unit              test record of a client, {plan['adjacency']}")
    if plan["records"] is not None:
        error = 100 * plan["std_of_accuracy"]
        lines.append(f"a client's error  {error:.3g} points of accuracy with {plan['records']} test records")
    lines.append("use in a run      local.privacy=dp-sgd evaluate.clients=own, and the noise as evaluate.count_noise")
    return "\n".join(lines)


def _check(request: CountsRequest) -> None:
    valid_delta(request.delta)
    check_two_given({"--count-noise": request.std, "--measurements": request.times, "--epsilon": request.target})
    if request.std is not None and not 0 < request.std < math.inf:
        raise UserError(f"--count-noise {request.std} gives no guarantee: choose a positive number such as 10")
    if request.target is not None and not 0 < request.target < math.inf:
        raise UserError(f"target epsilon {request.target} is not a positive number: choose one such as 8")
