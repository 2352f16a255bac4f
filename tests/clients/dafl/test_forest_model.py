"""The model of noisy marginals: against a solver that knows nothing of forests, and against what must hold."""

import numpy as np
import pytest
from scipy.optimize import minimize

from clients.dafl.forest_model import Marginals, _dealt, fitted

SIZES = (2, 3, 2)
EDGES = ((0, 1), (1, 2))


def noisy(seed: int, std_of_ones: float, std_of_twos: float, classes: int = 2) -> Marginals:
    generator = np.random.default_rng(seed)
    joint = generator.dirichlet(np.full(12, 0.4), classes).reshape(classes, *SIZES) * 100
    ones = [joint.sum(axis=tuple({1, 2, 3} - {column + 1})) for column in range(3)]
    twos = {(0, 1): joint.sum(axis=3), (1, 2): joint.sum(axis=1)}
    return Marginals(
        [table + std_of_ones * generator.standard_normal(table.shape) for table in ones],
        {edge: table + std_of_twos * generator.standard_normal(table.shape) for edge, table in twos.items()},
    )


def _distance(joint: np.ndarray, given: Marginals, label: int, std_of_ones: float, std_of_twos: float) -> float:
    joint = joint.reshape(SIZES)
    ones = [joint.sum(axis=tuple({0, 1, 2} - {column})) for column in range(3)]
    twos = {(0, 1): joint.sum(axis=2), (1, 2): joint.sum(axis=0)}
    of_ones = sum(((one - given.ones[column][label]) ** 2).sum() for column, one in enumerate(ones))
    of_twos = sum(((two - given.twos[edge][label]) ** 2).sum() for edge, two in twos.items())
    return float(of_ones / std_of_ones**2 + of_twos / std_of_twos**2)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_fit_is_the_nearest_table_s_marginals(seed: int) -> None:
    """A general solver over all tables of the same total finds nothing nearer, and the same marginals."""
    std_of_ones, std_of_twos = 4.0, 7.0
    given = noisy(seed, std_of_ones, std_of_twos)
    found = fitted(given, std_of_ones, std_of_twos)
    for label in range(2):
        total = found.ones[0][label].sum()
        theirs = minimize(
            lambda joint, label=label: _distance(joint, given, label, std_of_ones, std_of_twos),
            np.full(12, total / 12),
            bounds=[(0, None)] * 12,
            constraints={"type": "eq", "fun": lambda joint, total=total: joint.sum() - total},
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-12},
        )
        joint = theirs.x.reshape(SIZES)
        np.testing.assert_allclose(found.twos[0, 1][label], joint.sum(axis=2), atol=0.15)
        np.testing.assert_allclose(found.twos[1, 2][label], joint.sum(axis=0), atol=0.15)


def test_the_marginals_of_a_fit_agree_with_each_other() -> None:
    found = fitted(noisy(0, 10.0, 10.0), 10.0, 10.0)
    for (parent, child), table in found.twos.items():
        assert (table >= 0).all()
        np.testing.assert_allclose(table.sum(axis=2), found.ones[parent], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(table.sum(axis=1), found.ones[child], rtol=1e-6, atol=1e-9)


def test_columns_without_edges_are_fitted_by_themselves() -> None:
    given = Marginals([np.array([[30.0, -5.0, 10.0]]), np.array([[20.0, 15.0]])], {})
    found = fitted(given, 3.0, 0.0)
    # The total is the mean of both sums by precision, 35; the nearest such counts, none below 0.
    np.testing.assert_allclose(found.ones[0], [[27.5, 0.0, 7.5]], atol=0.1)
    np.testing.assert_allclose(found.ones[1], [[20.0, 15.0]], atol=0.1)


def test_what_has_no_noise_is_left_as_it_is() -> None:
    given = noisy(0, 0.0, 0.0)
    assert fitted(given, 0.0, 0.0) is given


def test_samples_have_the_model_s_shares_to_one_record_a_group() -> None:
    model = noisy(3, 0.0, 0.0)
    cells = model.sample(np.array([1000, 0]), np.random.default_rng(0))
    assert cells.shape == (1000, 3)
    drawn = np.zeros((2, 3))
    np.add.at(drawn, (cells[:, 0], cells[:, 1]), 1)
    assert np.abs(drawn / 10 - model.twos[0, 1][0]).max() < 0.4
    drawn = np.zeros((3, 2))
    np.add.at(drawn, (cells[:, 1], cells[:, 2]), 1)
    assert np.abs(drawn / 10 - model.twos[1, 2][0]).max() < 0.6


def test_cells_are_dealt_as_often_as_their_shares_say() -> None:
    generator = np.random.default_rng(0)
    shares = np.array([0.5, 0.25, 0.25])
    counts = np.array([np.bincount(_dealt(shares, 10, generator), minlength=3) for _ in range(400)])
    assert set(counts[:, 0]) == {5}
    assert counts.sum(axis=1).tolist() == [10] * 400
    assert counts.mean(axis=0).tolist() == pytest.approx([5, 2.5, 2.5], abs=0.1)
    assert len(_dealt(np.zeros(4), 8, generator)) == 8
