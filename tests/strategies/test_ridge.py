"""The settings and the formula of a head in closed form."""

import math
from typing import Any

import numpy as np
import pytest

from clients.gram import CONSTANT, SENSITIVITY, STEP, scale_of, unpacked, vectors_of
from clients.private_gram import private_products
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.privacy.mechanisms import Noise
from strategies.afl import AFL
from strategies.ridge import Ridge

CLASSES, SIZE = 3, 6
DP_SGD = {"privacy": {"kind": "dp-sgd", "epsilon": 8}}


def test_the_head_is_that_of_central_ridge_regression() -> None:
    draw = np.random.default_rng(0)
    features, labels = draw.normal(size=(200, SIZE)), draw.integers(0, CLASSES, 200)
    longest = scale_of(SIZE)
    vectors = vectors_of(features, math.sqrt(SIZE)) * STEP
    # Least squares with rows for the ridge, instead of the normal equations.
    rows = np.concatenate([vectors, math.sqrt(0.1) * np.eye(SIZE + 1)])
    targets = np.concatenate([np.eye(CLASSES)[labels], np.zeros((SIZE + 1, CLASSES))])
    central = np.linalg.lstsq(rows, targets, rcond=None)[0]
    parts = np.array_split(draw.permutation(200), 7)
    total = np.sum([AFL().summed(features[one], labels[one], CLASSES, None) for one in parts], axis=0)
    weights, intercepts = AFL().head(*unpacked(total, SIZE, CLASSES), 7)
    scale = longest * math.sqrt(1 - CONSTANT**2) / math.sqrt(SIZE)
    assert np.allclose(weights, scale * central[:-1].T, rtol=0, atol=1e-10)
    assert np.allclose(intercepts, longest * CONSTANT * central[-1], rtol=0, atol=1e-10)
    inside = features[np.linalg.norm(features, axis=1) <= math.sqrt(SIZE)]
    placed = vectors_of(inside, math.sqrt(SIZE)) * STEP
    assert np.allclose(inside @ weights.T + intercepts, placed @ central, atol=1e-3)  # the head takes whole features


def test_with_noise_lambda_is_half_of_the_noises_largest_eigenvalue() -> None:
    settings, clients, size = AFL(epsilon=1.0, noise="seeded"), 9, 120
    assert settings.protection is not None
    none = np.zeros((0, size - 1)), np.zeros(0, np.int64)
    noises = [
        private_products(*none, CLASSES, 1.0, settings.protection, Noise.seeded(client)) for client in range(clients)
    ]
    gram, _ = unpacked(np.sum(noises, axis=0), size - 1, CLASSES)
    assert settings.strength(clients, size) == pytest.approx(np.linalg.eigvalsh(gram)[-1] / 2, rel=0.1)
    assert AFL(ridge=1e9, epsilon=1.0).strength(clients, size) == 1e9
    assert AFL().strength(clients, size) == 0.1


def test_negative_eigenvalues_count_as_zero() -> None:
    settings = AFL(epsilon=1.0)
    weights, _ = settings.head(np.diag([4.0, -50.0, 1.0]), np.eye(3), 1)
    found, strength = np.abs(weights).sum(axis=0), settings.strength(1, 3)
    assert found[0] / found[1] == pytest.approx(strength / (4 + strength))


def test_sums_move_by_the_sensitivity_that_is_charged() -> None:
    protection = AFL(epsilon=2.0).protection
    assert protection is not None
    assert protection.std == pytest.approx(SENSITIVITY * protection.noise_multiplier)
    assert pytest.approx(math.sqrt(2)) == SENSITIVITY


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"algorithm": {"kind": "afl", "ridge": 0}}, "ridge"),
        ({"algorithm": {"kind": "afl", "noise": "seeded"}}, "changes nothing without epsilon"),
        ({"algorithm": "afl", "aggregator": "median"}, "has no rounds"),
        ({"algorithm": "afl", "attack": {"kind": "sign-flip", "clients": 1}}, "has no rounds"),
        ({"algorithm": "afl", "compress": "top-k"}, "send no updates"),
        ({"algorithm": "afl", "preprocess": "ridge-start"}, "has no rounds"),
        ({"algorithm": "afl", "aggregator": {"kind": "global-dp", "epsilon": 8}}, "has no rounds"),
        ({"algorithm": "afl", "local": DP_SGD}, "no rounds of local training"),
        ({"algorithm": "afl", "local": {"batch_norm": "average"}}, "trains no model"),
        (
            {"preprocess": "ridge-start", "aggregator": {"kind": "global-dp", "noise_multiplier": 1}},
            "protects all records of a client together",
        ),
        ({"preprocess": "ridge-start", "attack": {"kind": "sign-flip", "clients": 1}}, "one hostile client"),
        (
            {
                "preprocess": {"kind": "ridge-start", "epsilon": 4},
                "local": {"privacy": {"kind": "dp-sgd", "epsilon": 8}},
            },
            "no privacy statement covers both",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_words(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        experiment_from(settings)


def test_too_many_features_are_refused() -> None:
    with pytest.raises(UserError, match="more than 256: take a model with fewer units"):
        AFL().check_head(9000, 10)
    with pytest.raises(UserError, match=r"epsilon=1e-09 is too small to send sums"):
        AFL(epsilon=1e-9).check_head(500, 10)
    assert isinstance(AFL(), Ridge)
