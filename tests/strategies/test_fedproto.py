"""FedProto: prototypes are means over all records of a class, and features are pulled to them."""

from typing import Any

import pytest
import torch
from torch import nn

from fl_sim.errors import UserError
from fl_sim.seeding import torch_kept
from fl_sim.types import LocalSettings, LocalTask
from strategies.algorithm import payload_template
from strategies.fedproto import FedProto

SETTINGS = LocalSettings(0.1, 0.0, 0.0, batch_size=4, epochs=1)


def model() -> nn.Module:
    with torch_kept():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 3))


def simulated(federation: Any, *labels: list[int]) -> Any:
    generator = torch.Generator().manual_seed(0)
    shards = [(torch.randn(len(own), 5, generator=generator), torch.tensor(own, dtype=torch.int64)) for own in labels]
    made = federation(FedProto(), model(), shards, SETTINGS)
    made.num_classes = 3
    return made


def test_prototypes_are_the_means_over_all_records_of_a_class(federation: Any) -> None:
    made = simulated(federation, [0, 0, 1], [1, 1, 1, 1, 0], [])
    received = made.server.params
    updates = made.round()
    sums, counts = torch.zeros(3, 2), torch.zeros(3)
    for (inputs, labels), update in zip(made.shards, updates, strict=True):
        weights = {name: received[name] + update.payloads["delta"][name] for name in received}
        features = torch.tanh(inputs @ weights["0.weight"].T + weights["0.bias"])
        for z, label in zip(features, labels, strict=True):
            sums[label] += z
            counts[label] += 1
    found = made.server.broadcast["prototypes"]
    torch.testing.assert_close(found["z"][:2], sums[:2] / counts[:2, None])
    assert found["known"].tolist() == [1, 1, 0]


def test_a_class_that_nobody_had_this_round_keeps_its_prototype(federation: Any) -> None:
    made = simulated(federation, [0, 1, 1], [2, 2])
    made.round()
    before = made.server.broadcast["prototypes"]["z"].clone()
    made.round(1)
    after = made.server.broadcast["prototypes"]
    assert torch.equal(after["z"][:2], before[:2])
    assert not torch.equal(after["z"][2], before[2])
    assert after["known"].tolist() == [1, 1, 1]


def test_the_first_round_pulls_nowhere_and_later_ones_to_the_prototypes(federation: Any) -> None:
    made = simulated(federation, [0, 0, 1])
    task = LocalTask(1, 0, 1, 3, SETTINGS, made.server.params, made.server.broadcast, class_counts=(2, 1, 0))
    assert not made.algorithm.plan(task).pull.present.any()
    made.round()
    task = LocalTask(2, 0, 1, 3, SETTINGS, made.server.params, made.server.broadcast, class_counts=(2, 1, 0))
    assert made.algorithm.plan(task).pull.present.tolist() == [True, True, False]


def test_a_pull_is_the_mean_over_features_and_the_sum_d_times_as_strong(federation: Any) -> None:
    made = simulated(federation, [0, 0, 1])
    made.round()
    task = LocalTask(2, 0, 1, 3, SETTINGS, made.server.params, made.server.broadcast, class_counts=(2, 1, 0))
    weights = [FedProto(strength=0.6, distance=distance).plan(task).pull.weight for distance in ("mean", "sum")]
    assert weights == [0.3, 0.6]  # two features
    batch = made.shards[0]
    z = torch.tanh(batch[0] @ made.server.params["0.weight"].T + made.server.params["0.bias"])
    prototypes = made.server.broadcast["prototypes"]["z"][batch[1]]
    released = 0.6 * nn.functional.mse_loss(z, prototypes)  # the released code's term for classes that are known
    ours = weights[0] * (z - prototypes).pow(2).sum(1).mean()
    torch.testing.assert_close(ours, released)


def test_sums_of_features_have_the_shape_of_the_last_layer() -> None:
    params = dict(model().named_parameters())
    assert payload_template(FedProto(), FedProto().init(params))["features"]["sums"].shape == (3, 2)
    with pytest.raises(UserError, match=r"last linear layer.* no linear layer: use another"):
        FedProto().init({"bias": torch.zeros(3)})
