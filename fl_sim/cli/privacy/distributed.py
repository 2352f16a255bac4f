"""The code of ``fl-sim privacy distributed-dp`` and ``distributed-dp-sgd``: noise, cost and message size of sums."""

from dataclasses import dataclass
from typing import Any

from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon_of_counts, steps_that_fit
from fl_sim.privacy.modular_sums import NoisyGrid, noise_for
from fl_sim.privacy.terms import (
    Adjacency,
    check_two_given,
    delta_advice,
    epsilon_in_words,
    none_if_infinite,
    valid_delta,
)


@dataclass(frozen=True)
class SumsRequest:
    """The quantities of a privacy plan for secure aggregation, without a trusted server.

    ``grid``: the number of clients, and the settings by which vectors are clipped and rounded to a grid. The noise
    multiplier in ``grid`` is ignored. ``noise``: the noise multiplier. ``target``: the largest allowed epsilon. At most
    one of ``noise``, ``rounds`` and ``target`` may be None. ``dropped``: the number of clients that drop out in each
    round. ``unit``: the privacy unit. ``num_units``: the number of privacy units in a round.
    """

    grid: NoisyGrid
    noise: float | None
    rounds: int | None
    target: float | None
    delta: float
    dropped: int = 0
    unit: str = "client"
    num_units: int = 0


def answer(request: SumsRequest) -> dict[str, Any]:
    """Compute the missing quantity (epsilon, noise or rounds), and return the whole privacy plan as JSON values.

    Raises UserError if two quantities are missing, or if a value is invalid.
    """
    _check(request)
    noise, rounds, delta, asked = request.noise, request.rounds, request.delta, "epsilon"
    if noise is None:
        assert rounds is not None
        assert request.target is not None
        noise, asked = noise_for(request.grid, rounds, request.target, delta), "noise_multiplier"
    grid = request.grid.with_noise(noise)
    event = grid.event(grid.shares)
    if rounds is None:
        assert request.target is not None
        rounds, asked = steps_that_fit(event, request.target, delta), "rounds"
    with_drops = grid.event(grid.shares - request.dropped)
    units = request.num_units or grid.shares
    advice = delta_advice(delta, units)
    return {
        "unit": request.unit, "adjacency": str(Adjacency.ADD_OR_REMOVE_ONE), "asked": asked,
        "epsilon": none_if_infinite(epsilon_of_counts({event: rounds}, delta) if rounds else 0.0), "delta": delta,
        "noise_multiplier": noise, "rounds": rounds, "accountant": "rdp", "mechanism": grid.mechanism,
        "clients": grid.shares, "dropped": request.dropped,
        "epsilon_with_dropped": none_if_infinite(epsilon_of_counts({with_drops: rounds}, delta) if rounds else 0.0),
        "bits": grid.bits, "numbers": grid.padded, "bytes": grid.num_bytes,
        "grid_step": 1 / (grid.scale * grid.clipping_norm), "std_of_share": grid.share_variance**0.5,
        "std_of_mean": grid.std_of_mean * grid.shares / units / grid.clipping_norm,
        "warnings": [advice] if advice else [],
    }  # fmt: skip


def in_words(plan: dict[str, Any]) -> str:
    """Format ``plan``, a result of the function ``answer``, as lines of text."""
    lines = [
        f"epsilon           {epsilon_in_words(plan['epsilon'])}, by RDP, at delta {plan['delta']:g}",
        f"noise multiplier  {plan['noise_multiplier']:.6g}  (noise on the sum / clipping norm of one {plan['unit']})",
        f"rounds            {plan['rounds']}",
        f"unit              {plan['unit']}, {plan['adjacency']}; trusted: secure aggregation; not trusted: the server",
        f"a client's noise  {plan['mechanism']}, standard deviation {plan['std_of_share']:.4g} grid steps",
        f"a grid step       {plan['grid_step']:.3g} clipping norms",
        f"a message         {plan['numbers']:,} numbers of {plan['bits']} bits, {plan['bytes']:,} bytes",
        f"error             {plan['std_of_mean']:.4g} clipping norms on each number of the mean",
    ]
    if plan["dropped"]:
        lines.append(
            f"with drop-outs    {epsilon_in_words(plan['epsilon_with_dropped'])} if {plan['dropped']} drop out a round"
        )
    return "\n".join(lines)


def _check(request: SumsRequest) -> None:
    valid_delta(request.delta)
    check_two_given({"--noise-multiplier": request.noise, "--rounds": request.rounds, "--epsilon": request.target})
    if not 0 <= request.dropped < request.grid.shares:
        raise UserError(f"{request.dropped} of {request.grid.shares} clients cannot drop out: at least one must answer")
