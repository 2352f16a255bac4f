"""DENSE and Co-Boosting: without epochs they are FedAvg; a student learns its teacher; weights follow the paper."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.params import detached, statistics_of
from fl_sim.seeding import torch_kept
from fl_sim.simulation.run import run
from fl_sim.training.features import Network
from fl_sim.types import Dataset, Params
from strategies.co_boosting import CoBoosting
from strategies.dense import Dense
from strategies.ensemble import Lesson, OnEnsemble
from strategies.generated_images import Album, ImageStudent, Making, divergence

RUN = {
    "model": "logistic", "engine": "inprocess", "clients": 3, "partition": "dirichlet:0.1", "rounds": 1,
    "local": {"learning_rate": 0.1},
}  # fmt: skip
KINDS = ("dense", "co-boosting")
SMALL = {"epochs": 3, "generator_steps": 3, "images": 16, "channels": 2}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def _logits(params: Params, records: torch.Tensor) -> torch.Tensor:
    return records.flatten(1) @ params["weight"].T + params["bias"]


def _model(seed: int) -> Params:
    draw = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(10, 64, generator=draw) / 8, "bias": torch.randn(10, generator=draw) / 8}


def _lesson(dataset: Dataset) -> Lesson:
    return Lesson(_logits, dataset, None, torch.device("cpu"), np.random.default_rng(0))


@pytest.mark.parametrize("kind", KINDS)
def test_without_epochs_it_is_fedavg_bit_for_bit(kind: str, tmp_path: Path) -> None:
    run(experiment_from(RUN | {"algorithm": "fedavg"}), tmp_path / "a")
    result = run(experiment_from(RUN | {"algorithm": {"kind": kind, "epochs": 0}}), tmp_path / "b")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "upper bound" in result["ensemble"]["in_words"]
    assert any("this is fedavg" in one for one in result["warnings"])


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_change_the_model_the_same_way_each_time(kind: str, tmp_path: Path) -> None:
    settings = experiment_from(RUN | {"algorithm": {"kind": kind, **SMALL}})
    first, second = run(settings, tmp_path / "a"), run(settings, tmp_path / "b")
    run(experiment_from(RUN | {"algorithm": "fedavg"}), tmp_path / "plain")
    one, other, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b", "plain"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["1.weight"], plain["1.weight"])
    assert first["ensemble"] == second["ensemble"]
    assert ("weights" in first["ensemble"]) == (kind == "co-boosting")


def test_the_student_of_one_teacher_ends_in_agreement(digits: Dataset) -> None:
    lesson, teacher = _lesson(digits), _model(1)
    learner, album = ImageStudent(_model(0), lesson, 0.2), Album.empty(lesson)
    album.add(torch.from_numpy(digits.train.inputs), torch.from_numpy(digits.train.labels))
    for _ in range(30):
        for _, images, _ in album.batches(64):
            learner.step(images, _logits(teacher, images), 4.0, 0.2)
    images = album.shown(torch.from_numpy(digits.test.inputs))
    agreed = _logits(learner.trained(), images).argmax(1) == _logits(teacher, images).argmax(1)
    assert float(agreed.float().mean()) > 0.99


@pytest.mark.parametrize("settings", [Dense(**SMALL), CoBoosting(**SMALL)])
def test_equal_models_stay_as_they_are(settings: OnEnsemble, digits: Dataset) -> None:
    model = _model(1)
    taught = settings.taught(model, [model] * 3, _lesson(digits)).params
    assert all(torch.allclose(taught[name], model[name], atol=1e-3) for name in model)
    taught = settings.taught(_model(0), [model] * 3, _lesson(digits)).params
    assert _distance(taught, model) < _distance(_model(0), model)


def _distance(one: Params, other: Params) -> float:
    return sum(float((one[name] - other[name]).square().sum()) for name in one)


def test_images_are_those_that_the_ensemble_recognises(digits: Dataset) -> None:
    lesson, teacher = _lesson(digits), _model(1)

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(_logits(teacher, images), labels)

    album = Album.empty(lesson)
    images, labels = album.made(Making(40, 1e-2, 64, 8), loss_of)
    assert images.shape == (64, 1, 8, 8)
    assert images.dtype == torch.uint8
    right = _logits(teacher, album.shown(images)).argmax(1) == labels
    assert float(right.float().mean()) > 0.8


def test_the_divergence_is_that_of_torch() -> None:
    one, other = torch.randn(5, 4), torch.randn(5, 4)
    wanted = torch.nn.functional.kl_div((one / 3).log_softmax(1), (other / 3).softmax(1), reduction="none").sum(1) * 9
    assert torch.allclose(divergence(one, other, 3.0), wanted, atol=1e-6)


def test_weights_follow_the_clients_that_are_right() -> None:
    labels = torch.tensor([0, 1])
    right, wrong = 3 * torch.eye(2), 3 * torch.eye(2).flip(0)
    logits = torch.stack([right, wrong])
    moved = CoBoosting(mu=0.1).weighed((0.5, 0.5), logits, labels, epoch=2)
    assert moved == pytest.approx((0.5 + 0.1 * 0.99**2, 0.5 - 0.1 * 0.99**2))
    assert CoBoosting(mu=0).weighed((0.5, 0.5), logits, labels, epoch=0) == (0.5, 0.5)
    assert CoBoosting(mu=1).weighed((0.5, 0.5), logits, labels, epoch=0) == (1, 0)
    assert CoBoosting(mu=1).weighed((1.0,), right[None], labels, epoch=0) == (1,)


def test_without_mu_weights_stay_equal(digits: Dataset) -> None:
    settings = CoBoosting(mu=0, **SMALL)
    assert settings.taught(_model(0), [_model(1), _model(2)], _lesson(digits)).weights == (0.5, 0.5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"aggregator": {"kind": "global-dp", "noise_multiplier": 1}}, "hides these models"),
        ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}}}, "no privacy statement covers both"),
        ({"local": {"batch_norm": "personal"}}, "running statistics"),
    ],
)
@pytest.mark.parametrize("kind", [*KINDS, "feddf"])
def test_what_does_not_fit_is_refused_in_words(kind: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        experiment_from({"algorithm": kind, **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_records_that_are_no_images_and_sums_that_hide_models_are_refused(kind: str, tmp_path: Path) -> None:
    inputs, labels = np.random.default_rng(0).random((60, 12)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "x.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    with pytest.raises(UserError, match=r"makes images, and records of .* have shape"):
        job_of(experiment_from({"data": f"npz:{tmp_path / 'x.npz'}", "algorithm": kind}), None)
    with pytest.raises(UserError, match="reads single updates"):
        run(experiment_from(RUN | {"algorithm": kind, "aggregator": "secure-sum"}), tmp_path / "run")


MODEL = """
from torch import nn


def normed(shape, classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, classes),
    )
"""


def _normed() -> tuple[torch.nn.Module, Network]:
    with torch_kept():
        torch.manual_seed(0)
        made: dict[str, Any] = {}
        exec(MODEL, made)
        model = made["normed"]((1, 8, 8), 10)
    return model, Network(model.eval())


def test_images_with_the_running_statistics_have_distance_0_and_others_are_pulled_there() -> None:
    model, network = _normed()
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # one layer after the other, because a layer's inputs depend on the statistics before it
        values = images
        for layer in model:
            if isinstance(layer, torch.nn.BatchNorm2d | torch.nn.BatchNorm1d):
                rows = values.transpose(0, 1).flatten(1)
                layer.running_mean.copy_(rows.mean(1))
                layer.running_var.copy_(rows.var(1, unbiased=False))
            values = layer(values)
    params = {**detached(model.named_parameters()), **statistics_of(model)}
    logits, distance = network.distances_of(params, images)
    assert torch.equal(logits, network.logits_of(params, images))
    assert float(distance) < 1e-5
    other = {**params, "1.running_mean": params["1.running_mean"] + torch.tensor([3.0, 0, 0, 4.0])}
    assert float(network.distances_of(other, images)[1]) > 5 - 1e-4  # |(3, 0, 0, 4)|, and what it changes in layer 5
    moved = (images + 0.5).requires_grad_()
    before = network.distances_of(params, moved)[1]
    (slope,) = torch.autograd.grad(before, moved)
    assert float((slope * 0.5).sum()) > 0  # downhill is towards the images with the running statistics
    lower = moved.detach() - 0.05 * slope / slope.norm()
    assert float(network.distances_of(params, lower)[1]) < float(before.detach())
    plain = Network(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    assert float(plain.distances_of({**detached(plain.model.named_parameters())}, images)[1]) == 0
    assert not plain.statistics


def test_a_students_statistics_move_and_its_teachers_stay(digits: Dataset) -> None:
    model, network = _normed()
    params = {**detached(model.named_parameters()), **statistics_of(model)}
    lesson = Lesson(network.logits_of, digits, None, torch.device("cpu"), np.random.default_rng(0), network)
    held = {name: value.clone() for name, value in params.items()}
    taught = Dense(**SMALL).taught(params, [params, params], lesson).params
    assert taught.keys() == params.keys()
    assert all(torch.equal(params[name], held[name]) for name in params)
    assert not torch.equal(taught["1.running_var"], params["1.running_var"])
    assert not any(module.training for module in model.modules())
    with_term, without = (
        Dense(statistics=weight, **SMALL).taught(params, [params], replace(lesson, generator=np.random.default_rng(0)))
        for weight in (1.0, 0.0)
    )
    assert not torch.equal(with_term.params["0.weight"], without.params["0.weight"])


def test_a_run_of_models_with_batch_norm_ends_with_the_students_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dense_models.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    local = {"learning_rate": 0.1, "batch_norm": "average"}
    settings = RUN | {"model": "dense_models:normed", "partition": "iid", "clients": 1, "local": local}
    found = run(experiment_from(settings | {"algorithm": {"kind": "dense", **SMALL}}), tmp_path / "dense")
    plain = run(experiment_from(settings | {"algorithm": {"kind": "dense", "epochs": 0}}), tmp_path / "plain")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("dense", "plain"))
    assert one.keys() == other.keys() >= {"1.running_mean", "5.running_var"}
    assert not torch.equal(one["1.running_mean"], other["1.running_mean"])
    assert found["ensemble"] == plain["ensemble"]
    assert found["ensemble"]["accuracy"] == plain["final_accuracy"] > 0.5  # the one teacher has its own statistics
    with pytest.raises(UserError, match="no running statistics"):
        experiment_from(settings | {"algorithm": {"kind": "co-boosting", **SMALL}})
