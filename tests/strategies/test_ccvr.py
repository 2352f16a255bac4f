"""CCVR's arithmetic on the server: pooled Gaussians are those of all records, and nothing but the head is trained."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clients.moments import moments_of
from fl_sim.errors import Diverged, UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.params import detached
from fl_sim.training.features import num_features
from strategies.ccvr import CCVR
from strategies.class_gaussians import ClassGaussian, class_gaussians, draw_features
from strategies.head_training import with_trained_head


def _records(seed, sizes, num_features=4, num_classes=3):
    draw = np.random.default_rng(seed)
    return [
        (draw.normal(size=(size, num_features)) + 5 * draw.normal(), draw.integers(0, num_classes, size))
        for size in sizes
    ]


def _pooled(clients, num_classes=3):
    return sum(moments_of(*client, num_classes) for client in clients)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 15), min_size=1, max_size=5))
def test_pooled_mean_and_covariance_are_those_of_all_records_together(seed: int, sizes: list[int]) -> None:
    clients = _records(seed, sizes)
    features, labels = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    found = class_gaussians(_pooled(clients), 4)
    assert [one.label for one in found] == [label for label in range(3) if (labels == label).sum() > 1]
    for one in found:
        rows = features[labels == one.label]
        assert one.count == len(rows)
        np.testing.assert_allclose(one.mean, rows.mean(axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(one.covariance, np.cov(rows.T), rtol=1e-10, atol=1e-10)


def test_the_papers_formula_from_means_and_covariances_of_clients_gives_the_same() -> None:
    # Luo et al. 2021, eq. 3 and 4, as FL-bench's src/server/ccvr.py writes it out; client 1 has one record of class 0.
    clients = [(rows, np.zeros(len(rows), np.int64)) for rows, _ in _records(1, [6, 1, 9])]
    counts = [len(rows) for rows, _ in clients]
    means = [rows.mean(axis=0) for rows, _ in clients]
    total = sum(counts)
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / total
    covariance = np.zeros((4, 4))
    for (rows, _), n, m in zip(clients, counts, means, strict=True):
        if n > 1:
            covariance += (n - 1) / (total - 1) * np.cov(rows.T)
        covariance += n / (total - 1) * np.outer(m, m)
    covariance -= total / (total - 1) * np.outer(mean, mean)
    [found] = class_gaussians(_pooled(clients), 4)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.covariance, covariance, rtol=1e-10)


def test_classes_of_no_record_or_one_have_no_distribution() -> None:
    labels = np.array([0, 1, 1])
    assert [one.label for one in class_gaussians(moments_of(np.ones((3, 2)), labels, 4), 2)] == [1]
    assert class_gaussians(moments_of(np.ones((3, 2)), np.arange(3), 3), 2) == []
    assert class_gaussians(moments_of(np.ones((0, 2)), np.zeros(0, np.int64), 3), 2) == []


def test_draws_have_the_mean_and_the_covariance_they_are_drawn_from() -> None:
    mean, covariance = np.array([1.0, -2.0]), np.array([[2.0, 0.6], [0.6, 0.5]])
    classes = [ClassGaussian(3, 9.0, mean, covariance), ClassGaussian(7, 9.0, -mean, covariance)]
    features, labels = draw_features(classes, 50_000, np.random.default_rng(0))
    assert (features.dtype, labels.tolist()) == (np.float32, [3] * 50_000 + [7] * 50_000)
    for sign, label in ((1, 3), (-1, 7)):
        rows = features[labels == label]
        np.testing.assert_allclose(rows.mean(axis=0), sign * mean, atol=0.03)
        np.testing.assert_allclose(np.cov(rows.T), covariance, atol=0.04)


def test_under_noise_a_class_needs_more_records_than_noise_may_feign_and_covariances_stay_of_their_size() -> None:
    draw, std, size = np.random.default_rng(0), 2.0, 30
    root = draw.normal(size=(size, size)) / 6
    features = np.concatenate([draw.normal(size=(3000, size)) @ root.T, draw.normal(size=(5, size))])
    moments = moments_of(features, np.repeat([0, 1], [3000, 5]), 3)
    moments[:, 1:] += draw.normal(scale=std, size=moments[:, 1:].shape)
    [found] = class_gaussians(moments, size, std)
    assert found.label == 0
    true = root @ root.T
    [unshrunk] = class_gaussians(moments, size)[:1]
    assert np.linalg.norm(found.covariance - true) <= np.linalg.norm(unshrunk.covariance - true)
    assert np.trace(found.covariance) == pytest.approx(np.trace(true), rel=0.05)
    [drowned] = class_gaussians(moments[:1], size, std=7e2)
    assert drowned.covariance == pytest.approx(np.eye(size) * np.trace(drowned.covariance) / size)


def test_features_in_other_units_have_a_mean_and_a_covariance_in_those() -> None:
    clients = _records(2, [9, 8])
    [found, *_] = class_gaussians(_pooled([(rows / 7, labels) for rows, labels in clients]), 4)
    [plain, *_] = class_gaussians(_pooled(clients), 4)
    np.testing.assert_allclose(found.scaled(7).mean, plain.mean, rtol=1e-10)
    np.testing.assert_allclose(found.scaled(7).covariance, plain.covariance, rtol=1e-8, atol=1e-12)


def test_a_covariance_that_is_none_is_drawn_from_as_the_nearest_one() -> None:
    broken = ClassGaussian(0, 9.0, np.zeros(2), np.array([[1.0, 2.0], [2.0, 1.0]]))  # eigenvalues 3 and -1
    rows, _ = draw_features([broken], 50_000, np.random.default_rng(0))
    np.testing.assert_allclose(np.cov(rows.T), np.full((2, 2), 1.5), atol=0.05)


def test_a_step_on_the_head_is_that_of_sgd_on_cross_entropy_and_the_rest_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    params = detached(model.named_parameters())
    features, labels = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32), np.array([0, 1, 1, 0, 1])
    settings = CCVR(learning_rate=0.5, epochs=1, batch_size=5)
    after = with_trained_head(settings.training, model, params, features, labels, np.random.default_rng(2))
    logits = torch.from_numpy(features) @ params["2.weight"].T + params["2.bias"]
    error = (logits.softmax(dim=1) - nn.functional.one_hot(torch.from_numpy(labels))) / 5
    torch.testing.assert_close(after["2.weight"], params["2.weight"] - 0.5 * error.T @ torch.from_numpy(features))
    torch.testing.assert_close(after["2.bias"], params["2.bias"] - 0.5 * error.sum(dim=0))
    assert list(after) == list(params)
    assert all(after[name] is params[name] for name in ("0.weight", "0.bias"))


def test_a_head_that_diverges_names_the_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    features = np.full((4, 3), 1e30, np.float32)
    with pytest.raises(Diverged, match=r"calibrate\.learning_rate"):
        with_trained_head(
            CCVR(learning_rate=1e30, epochs=2).training,
            model, detached(model.named_parameters()), features, np.array([0, 1, 0, 1]), np.random.default_rng(0),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"aggregator": "global-dp"}, "global-dp, which protects all records of a client"),
        ({"algorithm": "centralized"}, "clients train together, but algorithm centralized has no such"),
        ({"algorithm": "pate"}, "pate cannot run with calibrate ccvr"),
        ({"attack": "label-flip:2"}, "one hostile client could change the sum"),
        ({"preprocess": {"kind": "da-fl", "train_on": "synthetic"}}, "only synthetic records leave the clients"),
        ({"calibrate": "ccvr:0"}, "samples_per_class"),
        ({"calibrate": {"kind": "ccvr", "clipping_norm": 3}}, r"clipping_norm = 3.0 changes nothing without"),
        ({"calibrate": {"kind": "ccvr", "epsilon": 0}}, "epsilon"),
        ({"calibrate": {"kind": "ccvr", "epsilon": "inf"}}, "epsilon"),
        ({"calibrate": {"kind": "ccvr", "learning_rate": 0}}, "learning_rate"),
        ({"calibrate": "ccr"}, "did you mean 'ccvr'"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(more: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        experiment_from({"calibrate": "ccvr", **more})
    assert "\n" not in str(caught.value)


class _TwiceCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.head(self.head(inputs))


class _MoreBehind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, inputs):
        return 2 * self.head(self.body(inputs))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Flatten()), "has none"),
        (_TwiceCalled(), "2 times in a forward pass"),
        (_MoreBehind(), "needs a head that computes the logits"),
    ],
)
def test_a_model_without_a_head_to_train_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(UserError, match=said):
        num_features(model, (3,))


def test_moments_too_long_for_a_message_are_refused() -> None:
    CCVR().check_head(512, 100)
    with pytest.raises(UserError, match="fewer units before its last layer"):
        CCVR().check_head(3072, 10)
