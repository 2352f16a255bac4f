"""FedPFT: mixtures keep a class's moments, the head learns from samples, what does not fit is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clients.mixtures import ClassMixture, Covariance, MixtureForm
from fl_sim.errors import Malformed, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.params import detached
from fl_sim.simulation.run import run
from strategies.fedpft import FedPFT
from strategies.head_training import HeadTraining, with_trained_head

RUN = {"model": "logistic", "engine": "inprocess", "clients": 4, "partition": "dirichlet:0.1"}
ADDED = 1e-6


def _features() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    draw = np.random.default_rng(0)
    labels = np.repeat([0, 2], [40, 30])
    return draw.normal(size=(70, 3)) * [1, 2, 3] + 4 * draw.integers(0, 2, (70, 1)) + labels[:, None], labels


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("covariance", ["full", "diag", "spherical"])
def test_a_mixture_has_the_mean_and_the_variance_of_its_class(components: int, covariance: Covariance) -> None:
    features, labels = _features()
    form = MixtureForm(components, covariance, ADDED)
    rows = form.rows(features, labels, 4, seed=0)
    form.check(rows)
    assert rows[:, 0].tolist() == [40, 0, 30, 0]
    for label in (0, 2):
        own = features[labels == label]
        count, found = form.mixture(rows[label], 3)
        mean = found.weights @ found.means
        np.testing.assert_allclose(mean, own.mean(axis=0), rtol=1e-10)
        square = np.einsum("k,kd,ke->de", found.weights, found.means, found.means) - np.outer(mean, mean)
        within = np.tensordot(found.weights, found.covariances, 1)
        wanted = np.cov(own.T, bias=True) + ADDED * np.eye(3)
        if covariance == "full":
            np.testing.assert_allclose(within + square, wanted, atol=1e-8)
        elif covariance == "diag":
            np.testing.assert_allclose(within + np.diag(square), np.diag(wanted), atol=1e-8)
        else:
            np.testing.assert_allclose(within + np.trace(square) / 3, np.trace(wanted) / 3, atol=1e-8)
        assert count == len(own)
        drawn = found.draw(200_000, np.random.default_rng(1))
        np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.05)
        if covariance == "full":
            np.testing.assert_allclose(np.cov(drawn.T), wanted, rtol=0.05, atol=0.05)


def test_a_class_of_one_or_two_records_has_as_many_components() -> None:
    features = np.array([[1.0, 2.0], [5.0, 5.0], [9.0, 9.0]])
    form = MixtureForm(4, "full", ADDED)
    rows = form.rows(features, np.array([0, 1, 1]), 2, seed=0)
    count, alone = form.mixture(rows[0], 2)
    assert count == len(alone.weights) == 1
    np.testing.assert_allclose(alone.means, [[1, 2]])
    count, pair = form.mixture(rows[1], 2)
    assert sorted(pair.means[:, 0].round(6).tolist()) == [5, 9]
    assert not form.rows(features[:0], np.zeros(0, np.int64), 2, seed=0).any()


def test_weights_of_a_hostile_client_are_refused_and_negative_variances_are_none() -> None:
    form = MixtureForm(2, "diag", ADDED)
    for weights in ([2.0, -1.0], [0.3, 0.3]):
        rows = np.zeros((1, form.width(3)))
        rows[0, :3] = [5, *weights]
        with pytest.raises(Malformed, match="negative or do not add up"):
            form.check(rows)
    for covariances in (np.full((1, 2), -1.0), np.array([[[-1.0, 0], [0, -2.0]]])):
        drawn = ClassMixture(np.ones(1), np.ones((1, 2)), covariances).draw(4, np.random.default_rng(0))
        np.testing.assert_allclose(drawn, 1.0)


def test_a_step_on_the_head_is_that_of_adamw() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    params = {name: value.clone() for name, value in detached(model.named_parameters()).items()}
    features, labels = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    training = HeadTraining("algorithm", 0.1, 2, 5, "adamw")
    draw = np.random.default_rng(0)
    after = with_trained_head(training, torch.nn.Sequential(torch.nn.Linear(3, 2)), params, features.numpy(),
                              labels.numpy(), draw)  # fmt: skip
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        adamw.zero_grad()
        torch.nn.functional.cross_entropy(model(features), labels).backward()
        adamw.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(after[name], value)


def test_runs_learn_repeat_and_have_the_planned_bytes(tmp_path: Path) -> None:
    algorithm = {"kind": "fedpft", "components": 2, "covariance": "diag", "learning_rate": 0.01, "epochs": 10}
    settings = experiment_from(RUN | {"algorithm": algorithm})
    first, _ = run(settings, tmp_path / "a"), run(settings, tmp_path / "b")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert first["final_accuracy"] > 0.85
    assert first["rounds"] == 1
    assert first["fedpft"]["features"] > 1000
    up = first["bytes"]["before"]["mixtures"]["up"]
    assert 4 * 8 * 10 * (1 + 2 * (1 + 64 + 64)) < up < 1.1 * 4 * 8 * 10 * (1 + 2 * (1 + 64 + 64))


def test_too_small_an_added_variance_is_said(tmp_path: Path) -> None:
    algorithm = {"kind": "fedpft", "covariance": "full", "added_variance": 1e-30}
    with pytest.raises(Exception, match=r"added_variance=1e-30 is too small"):
        run(experiment_from(RUN | {"algorithm": algorithm}), tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"aggregator": {"kind": "global-dp", "noise_multiplier": 1}}, "has no rounds|promises privacy"),
        ({"local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}}}, "no rounds of local training|promises privacy"),
        ({"preprocess": "da-fl"}, "has no rounds|promises? privacy"),
        ({"attack": {"kind": "sign-flip", "clients": 1}}, "has no rounds"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        experiment_from({"algorithm": "fedpft", **settings})


def test_mixtures_too_large_for_a_message_are_refused() -> None:
    with pytest.raises(UserError, match="take fewer components"):
        FedPFT(covariance="full", components=50).check_head(2048, 10)
