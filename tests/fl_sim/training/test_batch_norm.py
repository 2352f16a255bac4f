"""BatchNorm in local training: plain training's statistics, from the received ones on, moved by nothing but batches."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_sim.local_plan import Ascent, Contrast, Distillation, LocalPlan
from fl_sim.params import detached, load_statistics, running_in, statistics_of
from fl_sim.seeding import rng, torch_kept
from fl_sim.training.evaluation import evaluate
from fl_sim.training.features import features_of
from fl_sim.training.loop import train
from fl_sim.training.trainer import Trainer
from fl_sim.types import LocalSettings, LocalTask, Params, Trained

SETTINGS = LocalSettings(0.05, 0.9, 1e-3, batch_size=5, epochs=2)


def model(momentum: float | None = 0.1) -> nn.Module:
    with torch_kept():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=momentum), nn.ReLU(), nn.Flatten(),
            nn.Linear(12, 6), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Linear(6, 3),
        )  # fmt: skip


def records(count: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(1)) + 1, torch.arange(count) % 3


def trained(
    network: nn.Module,
    settings: LocalSettings = SETTINGS,
    plan: LocalPlan | None = None,
    count: int = 17,
    **others: Params,
) -> Trained:
    task = LocalTask(1, 0, 1, count, settings, detached(model().named_parameters()), **others)  # type: ignore[arg-type]
    return train(network, task, plan or LocalPlan(), *records(count), rng(0, "batches"))


def assert_equal(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_client_trains_as_plain_torch_does_bit_for_bit(momentum: float | None) -> None:
    network, shuffle, (inputs, labels) = model(momentum), rng(0, "batches"), records()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    for _ in range(2):
        for batch in torch.from_numpy(shuffle.permutation(17)).split(5):
            optimizer.zero_grad()
            functional.cross_entropy(network(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    found = trained(model(momentum))
    assert_equal(found.params, detached(network.named_parameters()))
    assert_equal(found.statistics, {name: value.float() for name, value in network.named_buffers()})
    assert float(found.statistics["1.num_batches_tracked"]) == 8


def test_training_starts_from_the_received_statistics_and_anew_without_any() -> None:
    network = model()
    first = trained(network)
    assert_equal(trained(network).statistics, first.statistics)  # no trace of the client before
    received = {name: value + 1 for name, value in first.statistics.items()}
    still = trained(network, statistics=received, count=0)
    assert_equal(still.statistics, received)
    step = replace(SETTINGS, epochs=0, steps=1)
    on, anew = trained(network, step, statistics=received).statistics, trained(network, step).statistics
    torch.testing.assert_close(on["1.running_mean"] - anew["1.running_mean"], 0.9 * received["1.running_mean"])
    with pytest.raises(ValueError, match=r"running statistics .*1\.running_var is missing"):
        trained(network, statistics={"1.running_mean": received["1.running_mean"]})


def test_one_record_alone_is_normalised_by_the_running_statistics_and_leaves_them() -> None:
    first = trained(model(), replace(SETTINGS, epochs=1), count=5).statistics
    then = trained(model(), replace(SETTINGS, epochs=1, batch_size=1), count=5, statistics=first)
    assert_equal(then.statistics, first)
    assert then.loss is not None
    network = model()
    load_statistics(network, first)
    network.eval()
    inputs, labels = records(1)
    expected = functional.cross_entropy(network(inputs), labels).item()
    assert trained(model(), replace(SETTINGS, epochs=1), count=1, statistics=first).loss == pytest.approx(expected)


@pytest.mark.parametrize(
    "plan",
    [
        LocalPlan(ascent=Ascent(0.5)),
        LocalPlan(distillation=Distillation(1.0)),
        LocalPlan(contrast=Contrast(1.0, 0.5, detached(model().named_parameters()))),
    ],
    ids=["uphill", "received", "previous"],
)
def test_a_second_look_at_a_batch_leaves_the_statistics_alone(plan: LocalPlan) -> None:
    still = replace(SETTINGS, learning_rate=0.0)  # the model does not move, so that batches alone count
    assert_equal(trained(model(), still, plan).statistics, trained(model(), still).statistics)


def test_a_model_is_evaluated_with_the_statistics_that_come_with_it() -> None:
    found, (inputs, labels) = trained(model()), records()
    reference = model()
    reference.load_state_dict({**found.params, **found.statistics})
    expected = functional.cross_entropy(reference.eval()(inputs), labels)
    assert evaluate(model(), {**found.params, **found.statistics}, inputs, labels).loss == pytest.approx(
        expected.item()
    )
    anew = evaluate(reference, found.params, inputs, labels).loss
    assert anew != pytest.approx(expected.item(), rel=1e-3)
    assert set(running_in(reference)) == set(statistics_of(reference)) == set(found.statistics)


def test_features_are_those_under_the_statistics_that_come_with_the_parameters() -> None:
    found, (inputs, _) = trained(model()), records()
    reference = model()
    reference.load_state_dict({**found.params, **found.statistics})
    with torch.no_grad():
        expected = reference.eval()[:-1](inputs)
    torch.testing.assert_close(features_of(model(), {**found.params, **found.statistics}, inputs), expected)


def test_threads_train_such_models_side_by_side_but_no_stack_does() -> None:
    trainer = Trainer(model(), None)
    assert trainer.is_parallel((1, 4, 4))
    assert not trainer.is_stackable()
