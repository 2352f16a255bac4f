"""FedExP: the server's step is the paper's, by literal numbers."""

from typing import Any

import pytest
import torch

from fl_sim.types import Aggregate, ServerState
from strategies.fedexp import FedExP


def moved(updates: list[list[float]], epsilon: float) -> list[float]:
    """Return x - 0 after one round of clients that send ``updates``."""
    rows = torch.tensor(updates, dtype=torch.float32)
    payloads = {"delta": {"w": rows.mean(0)}, "square": {"norm": rows.pow(2).sum(1).mean().reshape(1)}}
    server = FedExP(epsilon=epsilon).merge(ServerState({"w": torch.zeros(2)}), Aggregate(payloads, 1.0))
    found: list[float] = server.params["w"].tolist()
    return found


def test_orthogonal_updates_are_extrapolated() -> None:
    """(2, 0) and (0, 2) have squares of 4 and a mean of square 2: 4 / (2 * 2) = 1; one of four that moves makes 2."""
    assert moved([[2, 0], [0, 2]], 0.0) == [1, 1]
    assert moved([[4, 0], [0, 0], [0, 0], [0, 0]], 0.0) == [2, 0]  # mean of squares 4, square of the mean 1
    assert moved([[4, 0], [0, 0], [0, 0], [0, 0]], 1.0) == [1, 0]  # 4 / (2 (1 + 1))


def test_agreeing_updates_are_averaged() -> None:
    assert moved([[1, 2], [1, 2]], 0.0) == [1, 2]
    assert moved([[0, 0], [0, 0]], 0.0) == [0, 0]


def test_clients_send_the_square_of_their_update(bowl: Any, federation: Any, records: Any, settings: Any) -> None:
    simulated = federation(FedExP(), bowl(0.0), [records((1, 3, 0)), records()], settings(0.1))
    update, empty = simulated.round()
    assert float(update.payloads["square"]["norm"]) == pytest.approx(0.09)
    assert float(empty.payloads["square"]["norm"]) == 0
    assert simulated.w == pytest.approx(0.3)
