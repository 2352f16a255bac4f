"""What FedAsync and FedBuff make of updates, by hand; what they and a deadline go together with."""

from typing import Any

import pytest
import torch

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.settings import kinds_of
from fl_sim.types import Reply, ServerState
from strategies.fedavg import FedAvg
from strategies.server_opt import FedAvgM
from strategies.servers import Arrival, FedAsync, FedBuff

TAKEN = {
    "fedavg", "fedprox", "fedmix", "naivemix", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedlc", "fedrs",
    "balanced-softmax", "fedntd", "fedvls", "fedsam", "knn-per", "per-fedavg", "fedit", "ffa-lora",
}  # fmt: skip


def one(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value])}


def arrival(delta: float, start: float = 0.0, staleness: int = 0, count: int = 5, client: int = 0) -> Arrival:
    return Arrival(Reply(client, {"delta": one(delta)}, count, 0.1 if count else None), one(start), staleness)


def w(server: ServerState) -> float:
    return float(server.params["w"])


def test_fedasync_mixes_models_and_never_takes_a_change_for_one() -> None:
    """x = 10; the client was sent 4 and sends +2, so its model is 6; three steps later it counts .6 / 2."""
    server = FedAsync().step(ServerState(one(10.0)), FedAvg(), [arrival(2.0, start=4.0, staleness=3)], 9, 5)
    assert w(server) == pytest.approx(0.7 * 10 + 0.3 * 6)


def test_fedasync_takes_a_fresh_whole_model_as_it_is() -> None:
    start = 0.1234567
    server = FedAsync(mixing=1.0).step(ServerState(one(start)), FedAvg(), [arrival(1e-4, start=start)], 1, 5)
    assert torch.equal(server.params["w"], torch.tensor([start]) + torch.tensor([1e-4]))


def test_fedbuff_adds_changes_weighed_by_their_age() -> None:
    """(2 + 4 / 2 + 9 / 3) / 3 = 7 / 3, times a server learning rate of .5."""
    arrivals = [arrival(2.0), arrival(4.0, staleness=3, count=50), arrival(9.0, staleness=8)]
    server = FedBuff(buffer=3, server_learning_rate=0.5).step(ServerState(one(1.0)), FedAvg(), arrivals, 9, 5)
    assert w(server) == pytest.approx(1 + 0.5 * 7 / 3)


def test_fedbuff_counts_records_where_it_is_told_to() -> None:
    arrivals = [arrival(2.0, count=1), arrival(4.0, staleness=3, count=3)]
    server = FedBuff(buffer=2, weighting="examples").step(ServerState(one(1.0)), FedAvg(), arrivals, 9, 5)
    assert w(server) == pytest.approx(1 + (2 + 3 * 4 / 2) / 4)


def test_a_server_optimiser_takes_the_buffer_for_its_mean_update() -> None:
    algorithm = FedAvgM(server_momentum=0.5)
    server = algorithm.init(one(0.0))
    for _ in range(2):
        server = FedBuff(buffer=1).step(server, algorithm, [arrival(1.0)], 1, 5)
    assert w(server) == pytest.approx(1 + 1.5)


@pytest.mark.parametrize("kind", [FedAsync(), FedBuff(buffer=1)])
def test_a_client_without_records_changes_nothing(kind: Any) -> None:
    before = ServerState(one(3.0))
    assert kind.step(before, FedAvg(), [arrival(0.0, start=1.0, staleness=2, count=0)], 4, 5) is before


@pytest.mark.parametrize("kind", sorted(kinds_of("algorithm")))
def test_an_algorithm_composes_only_where_clients_send_what_changed_and_keep_nothing(kind: str) -> None:
    table = {"algorithm": kind, "devices": "constant", "server": "fedbuff"}
    if kind in TAKEN or kind in {"fedcm", "mofedsam"}:  # whose broadcast is found with the model
        experiment_from(table)
    else:
        with pytest.raises(UserError):
            experiment_from(table)


@pytest.mark.parametrize("kind", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_fedasync_has_a_server_step_of_its_own(kind: str) -> None:
    with pytest.raises(UserError, match=f"algorithm {kind} cannot run with server=fedasync, which replaces"):
        experiment_from({"algorithm": kind, "devices": "constant", "server": "fedasync"})


CLOCK: dict[str, Any] = {"devices": "constant"}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"server": "fedbuff"}, "set devices, for example devices=log-normal"),
        ({"server": "synchronous:30"}, "set devices, for example devices=log-normal"),
        ({**CLOCK, "server": {"late": "partial"}}, "has no effect without a deadline"),
        ({**CLOCK, "server": "fedbuff:50"}, "server.buffer=50 is more than the run's 10 clients"),
        (
            {**CLOCK, "server": {"kind": "fedasync", "concurrency": 11}},
            "server.concurrency=11 is more than the run",
        ),
        ({**CLOCK, "server": "fedbuff", "sampler": "fixed-size:3"}, "cannot run with sampler fixed-size"),
        ({**CLOCK, "server": "fedbuff", "aggregator": "krum"}, "cannot run with aggregator krum"),
        ({**CLOCK, "server": "fedbuff", "attack": "sign-flip"}, "cannot run with attack sign-flip"),
        (
            {**CLOCK, "server": "fedbuff", "local": {"batch_norm": "average"}},
            "cannot run with local.batch_norm=average",
        ),
        ({**CLOCK, "server": "fedbuff", "engine": {"kind": "inprocess", "stack": 5}}, "cannot run with engine.stack=5"),
        ({**CLOCK, "server": "fedbuff", "compress": "top-k:0.1"}, "cannot run with compress top-k"),
        ({**CLOCK, "server": "fedbuff", "aggregator": "global-dp"}, "so no epsilon is known"),
        ({**CLOCK, "aggregator": "global-dp"}, "No epsilon here covers this"),
        ({**CLOCK, "preprocess": "da-fl"}, "No epsilon here covers this"),
        ({"devices": {"kind": "constant", "seconds_per_step": 0}}, "devices.seconds_per_step"),
        ({"devices": {"kind": "constant", "seconds_per_step": -1}}, "devices.seconds_per_step"),
        ({"devices": {"kind": "constant", "upload_mbps": 0}}, "devices.upload_mbps"),
        ({"devices": {"kind": "constant", "availability": 0}}, "devices.availability"),
        ({"devices": {"kind": "log-normal", "sigma": "nan"}}, "devices.sigma"),
        ({"server": "fedbuf"}, "did you mean 'fedbuff'?"),
        ({"devices": "lognormal"}, "did you mean 'log-normal'?"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line_that_says_what_to_do(
    table: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError) as refused:
        experiment_from(table)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
