"""FedExP: the server's step is the paper's, by literal numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run
from fl_sim.types import Aggregate
from strategies.fedexp import FedExP


def moved(updates: list[list[float]], epsilon: float) -> list[float]:
    """Return x - 0 after one round of clients that send ``updates``."""
    rows = torch.tensor(updates, dtype=torch.float32)
    payloads = {"delta": {"w": rows.mean(0)}, "square": {"norm": rows.pow(2).sum(1).mean().reshape(1)}}
    algorithm = FedExP(epsilon=epsilon)
    server = algorithm.merge(algorithm.init({"w": torch.zeros(2)}), Aggregate(payloads, 1.0))
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


def test_the_mean_of_the_last_two_models_is_reported_and_clients_go_on_from_the_last(
    bowl: Any, federation: Any, records: Any, settings: Any
) -> None:
    """One client of curvature 1 at 3 with a rate of 0.1: w is 0.3, 0.57, 0.813; its update is the mean."""
    simulated = federation(FedExP(), bowl(0.0), [records((1, 3, 0))], settings(0.1))
    found = []
    for _ in range(3):
        simulated.round()
        found.append((simulated.w, float(simulated.algorithm.reported(simulated.server)["w"])))
    assert found == [pytest.approx(pair) for pair in [(0.3, 0.3), (0.57, 0.435), (0.813, 0.6915)]]
    assert FedExP(average_two=False).reported(simulated.server) is simulated.server.params


def test_what_is_evaluated_is_what_is_saved_and_the_result_says_which(tmp_path: Path) -> None:
    ends, results = {}, {}
    for rounds, average in ((1, True), (2, True), (2, False)):
        algorithm = {"kind": "fedexp", "average_two": average}
        chosen = {"model": "logistic", "rounds": rounds, "partition": "iid", "algorithm": algorithm}
        out = tmp_path / f"{rounds} {average}"
        results[rounds, average] = run(experiment_from({**chosen, "engine": "inprocess"}), out)
        ends[rounds, average] = load_file(out / "model.safetensors")
    for name, first in ends[1, True].items():
        assert torch.equal(ends[2, True][name], (first + ends[2, False][name]) * 0.5)
    assert results[2, True]["evaluated_model"] == "the mean of the last two models"
    assert results[2, False]["evaluated_model"] == "the last model"
    assert results[2, True]["final_accuracy"] != results[2, False]["final_accuracy"]
