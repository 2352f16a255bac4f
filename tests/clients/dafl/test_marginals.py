"""Marginals of a table: what a record can move, what is paid, what the model makes of it."""

import math
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import torch
from dp_accounting import dp_event, rdp
from scipy.optimize import minimize

import clients.dafl.marginals as module
from clients.dafl.generator import GeneratorBill, PrivateRecords
from clients.dafl.marginals import (
    CellTable,
    ForestMarginals,
    Marginals,
    _systematic_sample,
    cells_of,
    chosen_pairs,
    exponential_mechanism,
    fitted,
    records_of,
    released,
    score,
    unnamed,
)
from fl_sim.errors import UserError
from fl_sim.privacy.accounting import epsilon
from fl_sim.privacy.mechanisms import Noise
from fl_sim.types import Column

COLUMNS = (Column("age", (0.0, 0.5, 1.0)), Column("job", categories=2), Column("smokes", categories=1))
SIZES = (3, 3, 2)


def people(number: int = 600, seed: int = 0) -> PrivateRecords:
    """The job follows the age, and whether somebody smokes follows the class."""
    generator = np.random.default_rng(seed)
    labels = np.arange(number) % 2
    age = generator.integers(0, 3, number)
    job = np.where(generator.random(number) < 0.9, age, generator.integers(0, 3, number))
    smokes = (generator.random(number) < 0.2 + 0.6 * labels).astype(np.int64)
    rows = records_of(np.stack([age, job, smokes], axis=1), COLUMNS)
    return PrivateRecords(torch.from_numpy(2 * rows - 1), torch.from_numpy(labels), 2, COLUMNS)


def table_of(records: PrivateRecords) -> CellTable:
    return CellTable(cells_of((records.inputs.numpy() + 1) / 2, COLUMNS), records.labels.numpy(), 2, SIZES)


def without(table: CellTable, record: int) -> CellTable:
    kept = np.arange(len(table.labels)) != record
    return CellTable(table.rows[kept], table.labels[kept], table.num_classes, table.sizes)


def made(records: PrivateRecords, counts: list[int], target: float, seed: int = 0) -> torch.Tensor:
    settings = Marginals()
    bill = settings.bill(10_000, 2, target, 1e-5)
    return settings.generate(records, np.array(counts), bill, Noise.seeded(seed), np.random.default_rng(seed))


def test_cells_and_records_are_each_other_s_inverse() -> None:
    cells = np.array([[0, 2, 0], [1, 0, 1], [2, 1, 0]])
    rows = records_of(cells, COLUMNS)
    assert rows.tolist() == [[0.0, 0, 0, 1], [0.5, 1, 0, 0], [1.0, 0, 1, 1]]
    assert cells_of(rows, COLUMNS).tolist() == cells.tolist()
    assert cells_of(np.array([[0.26, 0, 0, 0.2], [9.0, 1, 1, 3], [-9, 0, 0, 0]], np.float32), COLUMNS).tolist() == [
        [1, 2, 1], [2, 0, 0], [0, 2, 1],
    ]  # fmt: skip


def test_a_record_is_in_one_cell_of_every_table_so_the_counts_move_by_the_root_of_their_number() -> None:
    records = people(50)
    records.inputs[0], records.inputs[1], records.inputs[2] = math.nan, math.inf, -math.inf
    table = table_of(records)
    for record in range(10):
        less = without(table, record)
        for tables, fewer in (
            (table.ones(), less.ones()),
            ([table.counts(0, 1), table.counts(0, 2)], [less.counts(0, 1), less.counts(0, 2)]),
        ):
            moved = [there - here for here, there in zip(fewer, tables, strict=True)]
            assert math.sqrt(sum((one**2).sum() for one in moved)) == math.sqrt(len(tables))
            assert all(one.sum() == 1 for one in moved)


def test_a_score_moves_by_at_most_one_and_one_is_reached() -> None:
    table = table_of(people(200))
    ones, _ = released(table.ones(), 3.0, Noise.seeded(1), "columns")
    moves = [
        abs(score(table, ones, pair) - score(without(table, record), ones, pair))
        for record in range(60)
        for pair in ((0, 1), (0, 2), (1, 2))
    ]
    assert max(moves) <= 1 + 1e-9
    assert max(moves) == pytest.approx(1)


def test_the_exponential_mechanism_has_its_probabilities() -> None:
    scores, price = np.array([0.0, 1.0, 3.0]), 0.8
    drawn = Counter(exponential_mechanism(scores, price, Noise.seeded(7), turn) for turn in range(6000))
    expected = np.exp(price * scores / 2) / np.exp(price * scores / 2).sum()
    found = np.array([drawn[place] for place in range(3)]) / 6000
    assert np.abs(found - expected).max() < 4 * math.sqrt(0.25 / 6000)
    assert exponential_mechanism(scores, math.inf, Noise.seeded(7), 0) == 2


def test_the_noise_has_the_standard_deviation_that_was_billed() -> None:
    tables = [np.zeros((2, 1000)), np.zeros((2, 30, 40)), np.zeros((2, 700))]
    noisy, std = released(tables, 5.0, Noise.seeded(3), "columns")
    drawn = np.concatenate([one.ravel() for one in noisy])
    assert std == pytest.approx(5 * math.sqrt(3))
    assert drawn.std() == pytest.approx(std, rel=0.05)
    assert (noisy[0][0] != noisy[0][1]).all()
    assert released(tables, 0.0, Noise.seeded(3), "columns")[0] == tables


def test_what_is_released_is_what_was_billed() -> None:
    """The noise of both counts, and the choices, add up in zCDP to the bill's rho, however many columns there are."""
    records, asked = people(), []
    settings = Marginals(columns_share=0.2, pairs_share=0.3)
    bill = settings.bill(600, 2, 2.0, 1e-5)
    choices: list[float] = []

    def listen(tables: list[np.ndarray], noise_multiplier: float, noise: Noise, purpose: str):  # type: ignore[no-untyped-def]
        noisy, std = released(tables, noise_multiplier, noise, purpose)
        asked.append(std / math.sqrt(len(tables)))  # relative to what one record moves
        return noisy, std

    def choose(scores: np.ndarray, price: float, noise: Noise, turn: int) -> int:
        choices.append(price)
        return exponential_mechanism(scores, price, noise, turn)

    def pairs(table: CellTable, ones: list[np.ndarray], *rest: object) -> list[tuple[int, int]]:
        assert not np.array_equal(ones[0], table.ones()[0]), "scores are computed from what is released"
        return chosen_pairs(table, ones, *rest)  # type: ignore[arg-type]

    watched = {"released": listen, "exponential_mechanism": choose, "chosen_pairs": pairs}
    with patch.multiple(module, **watched):
        settings.generate(records, np.array([3, 3]), bill, Noise.seeded(0), np.random.default_rng(0))
    assert len(asked) == 2
    assert len(choices) <= len(COLUMNS) - 1
    spent = sum(0.5 / noise**2 for noise in asked) + sum(price**2 / 8 for price in choices)
    assert isinstance(bill.event, dp_event.ZCDpEvent)
    assert spent <= bill.event.rho * (1 + 1e-12)
    assert sum(0.5 / noise**2 for noise in asked) == pytest.approx(0.7 * bill.event.rho)
    assert choices[0] ** 2 / 8 * (len(COLUMNS) - 1) == pytest.approx(0.3 * bill.event.rho)


@pytest.mark.parametrize("target", [0.5, 1.0, 8.0])
def test_the_bill_is_within_the_budget_by_our_accountant_and_by_googles(target: float) -> None:
    bill = Marginals().bill(30_000, 2, target, 1e-5)
    assert bill.steps == 1
    assert 0.999 * target < epsilon([bill.event], 1e-5) <= target
    theirs = rdp.RdpAccountant()
    theirs.compose(dp_event.GaussianDpEvent(bill.noise_multiplier))
    assert theirs.get_epsilon(1e-5) == pytest.approx(target, rel=0.02)


def test_no_bill_where_there_is_nothing_to_release() -> None:
    assert "too few" in Marginals().bill(3, 2, 0.1, 1e-5).refused
    assert Marginals().bill(0, 2, math.inf, 1e-5).refused
    with pytest.raises(UserError, match="leave nothing"):
        Marginals(columns_share=0.5, pairs_share=0.5).bill(10, 2, 1.0, 1e-5)


def test_images_are_refused() -> None:
    with pytest.raises(UserError, match="for tables"):
        Marginals().check_shape((1, 28, 28))


def test_pairs_that_belong_together_are_found_and_no_others() -> None:
    table = table_of(people(3000))
    noise = Noise.seeded(0)
    ones, _ = released(table.ones(), 2.0, noise, "columns")
    assert chosen_pairs(table, ones, 10.0, 1.0, noise) == [(0, 1)]
    assert chosen_pairs(table, ones, 1e4, 1.0, noise) == []  # counts of pairs would be noise


def test_without_noise_records_have_the_marginals_of_the_data() -> None:
    records = people()
    cells = table_of(PrivateRecords(made(records, [3000, 3000], math.inf), torch.arange(6000) // 3000, 2))
    table = table_of(records)
    np.testing.assert_allclose(cells.counts(0, 1) / 10, table.counts(0, 1), atol=1)
    np.testing.assert_allclose(cells.ones()[2] / 10, table.ones()[2], atol=0.2)


def test_at_a_loose_budget_classes_keep_their_own_marginals() -> None:
    records = people(4000)
    cells = table_of(PrivateRecords(made(records, [2000, 2000], 5.0), torch.arange(4000) // 2000, 2))
    table = table_of(records)
    assert np.abs(cells.counts(0, 1) - table.counts(0, 1)).sum() / 4000 < 0.1
    assert np.abs(cells.ones()[2] - table.ones()[2]).max() < 60


def test_a_class_that_was_not_picked_is_counted_nowhere() -> None:
    records = people()
    of_one = PrivateRecords(records.inputs[records.labels == 1], records.labels[records.labels == 1], 2, COLUMNS)
    assert torch.equal(made(records, [0, 40], 1.0), made(of_one, [0, 40], 1.0))
    assert made(records, [0, 0], 1.0).shape == (0, 4)


@pytest.mark.parametrize("target", [0.3, 1.0, math.inf])
def test_one_class_records_are_records_of_the_table_and_repeat(target: float) -> None:
    records = people(30)
    one_class = PrivateRecords(records.inputs[::2], records.labels[::2], 2, COLUMNS)
    found = made(one_class, [25, 0], target)
    assert found.shape == (25, 4)
    assert found.dtype == torch.float32
    rows = (found.numpy() + 1) / 2
    assert np.array_equal(records_of(cells_of(rows, COLUMNS), COLUMNS), rows)
    assert torch.equal(found, made(one_class, [25, 0], target))
    if math.isfinite(target):
        assert not torch.equal(found, made(one_class, [25, 0], target, seed=1))


def test_a_table_of_unnamed_numbers() -> None:
    assert unnamed(2, 2) == (Column("feature 0", (0.25, 0.75)), Column("feature 1", (0.25, 0.75)))
    inputs = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    settings = Marginals(cells=4)
    bill = GeneratorBill(dp_event.NonPrivateDpEvent(), 1, 0.0, 1.0)
    records = PrivateRecords(inputs, torch.zeros(300, dtype=torch.int64), 1)
    found = settings.generate(records, np.array([300]), bill, Noise.seeded(0), np.random.default_rng(0))
    assert set(found.unique().tolist()) == {-0.75, -0.25, 0.25, 0.75}
    assert found.mean(0).tolist() == pytest.approx(inputs.mean(0).tolist(), abs=0.05)


FOREST_SIZES = (2, 3, 2)
EDGES = ((0, 1), (1, 2))


def noisy(seed: int, std_of_ones: float, std_of_twos: float, classes: int = 2) -> ForestMarginals:
    generator = np.random.default_rng(seed)
    joint = generator.dirichlet(np.full(12, 0.4), classes).reshape(classes, *FOREST_SIZES) * 100
    ones = [joint.sum(axis=tuple({1, 2, 3} - {column + 1})) for column in range(3)]
    twos = {(0, 1): joint.sum(axis=3), (1, 2): joint.sum(axis=1)}
    return ForestMarginals(
        [table + std_of_ones * generator.standard_normal(table.shape) for table in ones],
        {edge: table + std_of_twos * generator.standard_normal(table.shape) for edge, table in twos.items()},
    )


def _distance(joint: np.ndarray, given: ForestMarginals, label: int, std_of_ones: float, std_of_twos: float) -> float:
    joint = joint.reshape(FOREST_SIZES)
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
        joint = theirs.x.reshape(FOREST_SIZES)
        np.testing.assert_allclose(found.twos[0, 1][label], joint.sum(axis=2), atol=0.15)
        np.testing.assert_allclose(found.twos[1, 2][label], joint.sum(axis=0), atol=0.15)


def test_the_marginals_of_a_fit_agree_with_each_other() -> None:
    found = fitted(noisy(0, 10.0, 10.0), 10.0, 10.0)
    for (parent, child), table in found.twos.items():
        assert (table >= 0).all()
        np.testing.assert_allclose(table.sum(axis=2), found.ones[parent], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(table.sum(axis=1), found.ones[child], rtol=1e-6, atol=1e-9)


def test_columns_without_edges_are_fitted_by_themselves() -> None:
    given = ForestMarginals([np.array([[30.0, -5.0, 10.0]]), np.array([[20.0, 15.0]])], {})
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
    counts = np.array([np.bincount(_systematic_sample(shares, 10, generator), minlength=3) for _ in range(400)])
    assert set(counts[:, 0]) == {5}
    assert counts.sum(axis=1).tolist() == [10] * 400
    assert counts.mean(axis=0).tolist() == pytest.approx([5, 2.5, 2.5], abs=0.1)
    assert len(_systematic_sample(np.zeros(4), 8, generator)) == 8
