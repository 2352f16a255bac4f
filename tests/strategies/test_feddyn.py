"""FedDyn and FedSpeed: the optimum is where rounds end, as in the paper, and FedAvg's fixed point is not."""

from typing import Any

import pytest
import torch

from strategies.fedavg import FedAvg
from strategies.feddyn import FedDyn
from strategies.fedspeed import FedSpeed

OPTIMUM = 0.8
"""1 and 4 times a bowl around 0 and 1: their sum is least at 0.8, with gradients 0.8 and -0.8 there."""


@pytest.fixture
def shards(records: Any) -> list[Any]:
    return [records((1, 0, 0)), records((4, 1, 0))]


@pytest.mark.parametrize(
    ("algorithm", "rounds", "rate"),
    [(FedDyn(alpha=0.1), 220, 0.4), (FedDyn(alpha=1.0), 40, 0.24), (FedSpeed(alpha=1.0, rho=0.0), 40, 0.24)],
    ids=["0.1", "1", "fedspeed"],
)
@pytest.mark.parametrize("halves", [False, True])
def test_rounds_end_in_the_optimum(
    bowl: Any, federation: Any, shards: Any, settings: Any, algorithm: Any, rounds: int, rate: float, *, halves: bool
) -> None:
    simulated = federation(algorithm, bowl(0.0), shards, settings(rate, epochs=5))
    for server_round in range(rounds):
        simulated.round(*([server_round % 2] if halves else []))
    assert simulated.w == pytest.approx(OPTIMUM, abs=1e-6)
    assert [float(state["g_i"]["w"]) for state in simulated.states] == pytest.approx([0.8, -0.8], abs=1e-5)


def test_fedavg_ends_elsewhere(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    simulated = federation(FedAvg(), bowl(0.0), shards, settings(0.24, epochs=25))
    for _ in range(6):
        simulated.round()
    assert simulated.w == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("cohort", [(0, 1), (1,)])
def test_the_optimum_with_the_gradients_there_is_a_fixed_point(
    bowl: Any, federation: Any, shards: Any, settings: Any, alpha: float, cohort: tuple[int, ...]
) -> None:
    simulated = federation(FedDyn(alpha=alpha), bowl(OPTIMUM), shards, settings(0.1, 0.9, epochs=20))
    simulated.states = [{"g_i": {"w": torch.tensor([gradient], dtype=torch.float64)}} for gradient in (0.8, -0.8)]
    for _ in range(3):
        simulated.round(*cohort)
    assert simulated.w == pytest.approx(OPTIMUM, abs=1e-12)


def test_the_first_round_is_the_papers(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    """One step of 0.1 from 0: y = (0, 0.4); h = -alpha 0.2; x = 0.2 - h / alpha = 0.4; g_i = -alpha y_i."""
    simulated = federation(FedDyn(alpha=0.5), bowl(0.0), shards, settings(0.1))
    simulated.round()
    assert simulated.w == pytest.approx(0.4)
    assert float(simulated.server.memory["h"]["w"]) == pytest.approx(-0.1)
    assert [float(state["g_i"]["w"]) for state in simulated.states] == pytest.approx([0.0, -0.2])


def test_who_stays_away_counts_in_h(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    """One of two takes part: y = 0.4; h = -alpha 0.4 / 2; x = 0.4 - h / alpha = 0.6."""
    simulated = federation(FedDyn(alpha=0.5), bowl(0.0), shards, settings(0.1))
    simulated.round(1)
    assert simulated.w == pytest.approx(0.6)
    assert float(simulated.server.memory["h"]["w"]) == pytest.approx(-0.1)


def test_fedspeed_steps_with_the_gradient_uphill(bowl: Any, federation: Any, records: Any, settings: Any) -> None:
    """F(w) = 2 (w - 1)^2 at 0: the gradient is -4 there, -4.4 at w - rho; one step of 0.1 takes a mean of both."""
    simulated = federation(
        FedSpeed(alpha=0.5, rho=0.1, uphill_share=0.25), bowl(0.0), [records((4, 1, 0))], settings(0.1)
    )
    (update,) = simulated.round()
    assert float(update.payloads["delta"]["w"]) == pytest.approx(0.1 * (0.75 * 4 + 0.25 * 4.4))
