"""kNN-Per's predictions against sums written down by hand, and FedAvg as its limit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fl_sim
from clients.client_task import OnClient
from clients.evaluate import OwnPredictions
from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.native.kernel import load_kernel
from fl_sim.params import detached
from fl_sim.settings import kinds_of
from fl_sim.training.features import features_of
from fl_sim.training.records import Records
from fl_sim.training.trainer import Trainer
from fl_sim.types import LocalTask
from strategies.fedavg import FedAvg
from strategies.knn_per import KNNPer

CLASSES = 10


def drawn(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return torch.randn(count, 1, 8, 8, generator=generator) + labels[:, None, None, None] / 10, labels


def model() -> torch.nn.Module:
    return models.build("mlp", (1, 8, 8), CLASSES, seed=0).requires_grad_(requires_grad=False)


def scores_of(algorithm: KNNPer, settings: Any, own: Any, inputs: torch.Tensor, validation: Any = None) -> torch.Tensor:
    network = model()
    task = LocalTask(1, 0, 1, len(own[1]), settings(), detached(network.named_parameters()))
    valid = None if validation is None else Records.of(*validation)
    scores: torch.Tensor = algorithm.own_scores(task, OnClient(Records.of(*own), Trainer(network, None), 0, valid))(
        inputs
    )
    return scores


@pytest.mark.parametrize("distance", ["mean", "norm"])
@pytest.mark.parametrize(("weight", "scale", "neighbours"), [(0.3, 1.0, 4), (1.0, 0.2, 7), (0.6, 3.0, 100)])
def test_probabilities_are_those_of_the_formula(
    settings: Any, weight: float, scale: float, neighbours: int, distance: Any
) -> None:
    own, (inputs, _) = drawn(30, 1), drawn(12, 2)
    algorithm = KNNPer(weight=weight, scale=scale, neighbours=neighbours, distance=distance)
    found = scores_of(algorithm, settings, own, inputs).exp()
    network = model()
    params = detached(network.named_parameters())
    records, queries = (features_of(network, params, one).double() for one in (own[0], inputs))
    softmax = network(inputs).softmax(1)
    for row, query in enumerate(queries):
        square = [float((query - one).square().sum()) for one in records]
        far = [one / len(query) if distance == "mean" else math.sqrt(one) for one in square]
        nearest = sorted(range(len(far)), key=lambda place: far[place])[:neighbours]
        total = sum(math.exp(-far[place] / scale) for place in nearest)
        for label in range(CLASSES):
            votes = sum(math.exp(-far[place] / scale) for place in nearest if int(own[1][place]) == label)
            expected = weight * votes / total + (1 - weight) * float(softmax[row, label])
            assert float(found[row, label]) == pytest.approx(expected, abs=1e-6)


def test_the_nearest_record_alone_decides_with_weight_1(settings: Any) -> None:
    own = drawn(40, 3)
    scores = scores_of(KNNPer(weight=1, neighbours=1), settings, own, own[0])
    assert torch.equal(scores.argmax(1), own[1])
    assert torch.isfinite(scores).all()


def test_weight_0_and_a_client_without_records_leave_the_model_alone(settings: Any) -> None:
    own, (inputs, _) = drawn(20, 4), drawn(9, 5)
    logits = model()(inputs)
    nobody = (own[0][:0], own[1][:0])
    assert torch.equal(scores_of(KNNPer(weight=0), settings, own, inputs), logits)
    assert torch.equal(scores_of(KNNPer(), settings, nobody, inputs), logits)


def test_validation_records_choose_the_weight(settings: Any) -> None:
    """The model is untrained and the neighbours know: a weight above 0 is better; true model labels choose 0."""
    own, (inputs, _) = drawn(40, 6), drawn(9, 7)
    found = scores_of(KNNPer(weight="validation", neighbours=1), settings, own, inputs, own)
    expected = [scores_of(KNNPer(weight=one, neighbours=1), settings, own, inputs) for one in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert any(torch.equal(found, one) for one in expected)
    as_model = (own[0], model()(own[0]).argmax(1))
    alone = scores_of(KNNPer(weight="validation", neighbours=1), settings, own, inputs, as_model)
    torch.testing.assert_close(alone.exp(), model()(inputs).softmax(1))
    without = scores_of(KNNPer(weight="validation"), settings, own, inputs)
    torch.testing.assert_close(without.exp(), model()(inputs).softmax(1))


@pytest.mark.parametrize("name", ["mlp", "niid-cnn", "logistic", "resnet"])
def test_the_trainers_give_the_same_features(name: str) -> None:
    kernel, _ = load_kernel()
    shape = (1, 28, 28)
    network = models.build(name, shape, CLASSES, seed=0).eval()
    params = detached(network.named_parameters())
    inputs = torch.randn(20, *shape, generator=torch.Generator().manual_seed(1))
    for trainer in (Trainer(network, kernel), Trainer(network, None)):
        logits, features = trainer.outputs(params, inputs)
        torch.testing.assert_close(features, features_of(network, params, inputs), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, network(inputs).detach(), rtol=1e-4, atol=1e-5)


SMALL = {
    "data": "digits", "partition": "label-2", "clients": 4, "model": "mlp", "rounds": 3,
    "local": {"learning_rate": 0.1, "batch_size": 32}, "evaluate": {"clients": "class-shares", "validation": 0.2},
}  # fmt: skip


def test_a_run_trains_fedavgs_model_and_clients_predict_better(tmp_path: Path) -> None:
    ends, measured = [], []
    for number, algorithm in enumerate(
        ("fedavg", {"kind": "knn-per", "weight": 0}, "knn-per", {"kind": "knn-per", "weight": "validation"})
    ):
        out = tmp_path / str(number)
        fl_sim.run({**SMALL, "algorithm": algorithm}, out=out, progress=False)
        ends.append(load_file(out / "model.safetensors"))
        measured.append(json.loads((out / "result.json").read_text())["personal"])
    for other in ends[1:]:
        assert all(torch.equal(value, other[name]) for name, value in ends[0].items())
    assert len({one["received_accuracy"] for one in measured}) == 1
    assert measured[0]["own_accuracy"] == measured[1]["own_accuracy"] < measured[2]["own_accuracy"]
    assert measured[3]["own_accuracy"] > measured[0]["own_accuracy"]


def test_a_weight_by_validation_needs_the_clients_validation_records() -> None:
    without = {"algorithm": {"kind": "knn-per", "weight": "validation"}}
    with pytest.raises(UserError, match=r"clients have none: set evaluate\.validation"):
        experiment_from(without)
    assert experiment_from({**without, "evaluate": {"validation": 0.2}}).algorithm == KNNPer(weight="validation")


def test_only_it_predicts_in_its_own_way() -> None:
    assert isinstance(KNNPer(), OwnPredictions)
    assert not isinstance(FedAvg(), OwnPredictions)
    assert "knn-per" in kinds_of("algorithm")
