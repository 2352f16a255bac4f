"""Worker momentum: messages are the paper's running means, and with the mean it is server momentum."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_sim import Experiment
from fl_sim.errors import UserError
from fl_sim.types import ServerState, Trained
from strategies.fedavg import FedAvg
from strategies.server_opt import FedAvgM
from strategies.worker_momentum import WorkerMomentum


@pytest.fixture
def shards(records: Any) -> list[Any]:
    """1 and 4 times a bowl around 0 and 1."""
    return [records((1, 0, 0)), records((4, 1, 0))]


def sent(simulated: Any, *cohort: int) -> list[float]:
    return [float(update.payloads["delta"]["w"]) for update in simulated.round(*cohort)]


def test_messages_are_running_means_of_the_clients_updates(
    bowl: Any, federation: Any, shards: Any, settings: Any
) -> None:
    """One step of 0.1 from 2: the updates are -0.2 and -0.4, the model 1.7. There they are -0.17 and -0.28."""
    simulated = federation(WorkerMomentum(beta=0.75), bowl(2.0), shards, settings(0.1))
    assert sent(simulated) == pytest.approx([-0.2, -0.4])
    assert simulated.w == pytest.approx(1.7)
    expected = [0.75 * -0.2 + 0.25 * -0.17, 0.75 * -0.4 + 0.25 * -0.28]
    assert sent(simulated) == pytest.approx(expected)
    assert simulated.w == pytest.approx(1.7 + sum(expected) / 2)
    assert [float(state["momentum"]["w"]) for state in simulated.states] == pytest.approx(expected)


def test_who_leaves_out_a_round_continues_with_its_last_mean(
    bowl: Any, federation: Any, shards: Any, settings: Any
) -> None:
    simulated = federation(WorkerMomentum(beta=0.5), bowl(2.0), shards, settings(0.1))
    assert sent(simulated, 0) == pytest.approx([-0.2])  # the model is 1.8 now
    assert sent(simulated, 1) == pytest.approx([-0.32])  # the first message of client 1; the model is 1.48
    assert sent(simulated, 0) == pytest.approx([0.5 * -0.2 + 0.5 * -0.148])


def test_with_the_mean_and_everybody_it_is_server_momentum(
    bowl: Any, federation: Any, shards: Any, settings: Any
) -> None:
    """FedAvgM with server rate 1 - beta, as if the first update had also come in all earlier rounds."""
    beta, local = 0.8, settings(0.1, 0.9, epochs=3)
    ours = federation(WorkerMomentum(beta=beta), bowl(2.0), shards, local)
    theirs = federation(FedAvgM(server_learning_rate=1 - beta, server_momentum=beta), bowl(2.0), shards, local)
    ours.round()
    first = ours.server.params["w"] - 2.0
    theirs.server = ServerState(ours.server.params, memory={"momentum": {"w": first / (1 - beta)}})
    for _ in range(8):
        ours.round()
        theirs.round()
        assert ours.w == pytest.approx(theirs.w, abs=1e-12)


def test_beta_0_is_fedavg_to_the_bit(bowl: Any, federation: Any, shards: Any, settings: Any) -> None:
    ours = federation(WorkerMomentum(beta=0), bowl(2.0), shards, settings(0.1, 0.9, epochs=3))
    theirs = federation(FedAvg(), bowl(2.0), shards, settings(0.1, 0.9, epochs=3))
    for _ in range(5):
        ours.round()
        theirs.round()
        assert ours.w == theirs.w


def test_running_means_have_less_noise(bowl: Any, federation: Any, records: Any, settings: Any) -> None:
    """At a fixed model, the variance of an update's noise falls to (1 - beta) / (1 + beta) of itself."""
    beta, draws = 0.9, torch.Generator().manual_seed(0)
    noise = torch.randn(20_000, generator=draws, dtype=torch.float64)
    algorithm, means = WorkerMomentum(beta=beta), []
    task = federation(algorithm, bowl(0.0), [records((1, 0, 0))], settings(0.1)).task(0)
    for value in noise:
        update = algorithm.finish(task, Trained({"w": value}, {}, 1, 0.0))
        task = replace(task, state=update.state)
        means.append(float(update.payloads["delta"]["w"]))
    assert torch.tensor(means[100:]).var() == pytest.approx((1 - beta) / (1 + beta), rel=0.1)


@pytest.mark.parametrize(("settings_", "said"), [
    ({"algorithm": "worker-momentum:1"}, "less than 1"),
    ({"algorithm": "worker-momentum:-0.1"}, "greater than or equal to 0"),
])  # fmt: skip
def test_impossible_shares_are_refused(settings_: dict[str, Any], said: str) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        Experiment.model_validate({"data": "digits", **settings_})
