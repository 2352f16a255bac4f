"""label-k, dirichlet: exactly k classes a client; the least size is kept or refused, never waited for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import Dirichlet, ImpossibleSplit, LabelK, Quantity, label_counts
from partitions.assign import cut


def counts_of(k, labels, num_clients, seed=0):
    labels = np.asarray(labels)
    parts = LabelK(k=k).split(labels, num_clients, np.random.default_rng(seed))
    return label_counts(labels, parts, int(labels.max()) + 1)


@settings(max_examples=50, deadline=None)
@given(num_classes=st.integers(1, 8), k=st.integers(1, 8), num_clients=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_each_client_holds_exactly_k_classes_its_own_first_in_equal_shares(num_classes, k, num_clients, seed):
    k = min(k, num_classes)
    counts = counts_of(k, np.arange(num_classes * 37) % num_classes, num_clients, seed)
    assert (np.count_nonzero(counts, axis=1) == k).all()
    clients = np.arange(num_clients)
    assert (counts[clients, clients % num_classes] > 0).all()
    for column in counts.T:
        shares = column[column > 0]
        assert len(shares) == 0 or (shares.sum() == 37 and np.ptp(shares) <= 1)
    if num_clients >= num_classes:
        assert counts.sum() == num_classes * 37


def test_one_label_with_as_many_clients_as_classes_makes_client_i_own_class_i():
    parts = LabelK(k=1).split(np.array([2, 0, 1, 0, 2, 2]), 3, np.random.default_rng(5))
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 4, 5]]


def test_one_label_with_twice_as_many_clients_halves_each_class():
    np.testing.assert_array_equal(counts_of(1, [0, 0, 0, 0, 1, 1, 1], 4), [[2, 0], [0, 2], [2, 0], [0, 1]])


def test_holders_of_a_class_get_random_records_of_it():
    labels = np.zeros(1000, dtype=np.int64)
    first, second = LabelK(k=1).split(labels, 2, np.random.default_rng(0))
    # Of records that are dealt in their order, all of one client's would stand before all of the other's.
    assert abs(np.median(first) - np.median(second)) < 100
    assert not np.array_equal(first, LabelK(k=1).split(labels, 2, np.random.default_rng(1))[0])


def test_the_further_classes_are_drawn_uniformly():
    held = counts_of(2, np.arange(40_000) % 4, 4000, seed=3) > 0
    others = held[::4, 1:].sum(axis=0)  # clients 0, 4, 8, ... hold class 0 and one of 1, 2, 3
    assert others.sum() == 1000
    assert (abs(others - 1000 / 3) < 60).all()  # 4 standard deviations


def test_with_fewer_clients_than_classes_records_nobody_holds_are_left_out():
    np.testing.assert_array_equal(counts_of(1, [0, 1, 2, 2, 1, 0], 2), [[2, 0, 0], [0, 2, 0]])


def test_more_classes_a_client_than_there_are_is_refused():
    with pytest.raises(ImpossibleSplit, match=r"k=3 classes a client.*only 2 classes"):
        counts_of(3, [0, 1, 0, 1], 2)


def test_a_class_with_fewer_records_than_holders_is_refused():
    with pytest.raises(
        ImpossibleSplit, match="label-1 over 4 clients: class 1 has 1 records for 2 clients that share it"
    ):
        counts_of(1, [0, 0, 0, 0, 1], 4)


def test_negative_labels_are_refused():
    with pytest.raises(ImpossibleSplit, match="label -1 is negative"):
        counts_of(1, [-1, 0, 1], 2)


LABELS = np.arange(6000) % 10


def sizes_of(scheme, num_clients, seed=0, labels=LABELS):
    return np.array([len(part) for part in scheme.split(labels, num_clients, np.random.default_rng(seed))])


@settings(max_examples=30, deadline=None)
@given(num_clients=st.integers(2, 12), min_size=st.integers(0, 20), balanced=st.booleans(), seed=st.integers(0, 2**32))
def test_an_explicit_min_size_is_honoured(num_clients, min_size, balanced, seed):
    sizes = sizes_of(Dirichlet(beta=0.5, min_size=min_size, balanced=balanced), num_clients, seed)
    assert sizes.min() >= min_size
    assert sizes.sum() == 6000


@pytest.mark.parametrize("seed", range(20))
def test_the_default_redraws_until_ten_where_that_is_likely(seed):
    assert sizes_of(Dirichlet(beta=0.05), 10, seed).min() >= 10


def test_the_default_leaves_small_clients_where_ten_is_out_of_reach():
    sizes = sizes_of(Dirichlet(beta=0.05), 100)
    assert sizes.sum() == 6000
    assert sizes.min() < 10


def test_a_min_size_that_draws_do_not_reach_is_refused_with_the_best_they_did():
    with pytest.raises(
        ImpossibleSplit, match=r"100 clients with min_size=10: in 1000 draws .* held \d+ records at best"
    ):
        sizes_of(Dirichlet(beta=0.05, min_size=10), 100)


def test_a_min_size_beyond_the_records_is_refused_with_the_sum():
    with pytest.raises(ImpossibleSplit, match="min_size=61 needs 6100 records, but there are 6000"):
        sizes_of(Dirichlet(min_size=61), 100)


def test_a_large_beta_is_nearly_iid_and_a_small_one_nearly_one_hot():
    def mean_top_share(beta):
        parts = Dirichlet(beta=beta, min_size=0).split(LABELS, 10, np.random.default_rng(1))
        counts = label_counts(LABELS, parts, 10)
        return (counts.max(axis=0) / counts.sum(axis=0)).mean()

    assert mean_top_share(1e4) < 0.11
    assert mean_top_share(0.01) > 0.9


def test_shares_of_a_class_average_one_over_clients():
    counts = np.mean(
        [
            label_counts(LABELS, Dirichlet(beta=0.5, min_size=0).split(LABELS, 4, np.random.default_rng(seed)), 10)
            for seed in range(200)
        ],
        axis=(0, 2),
    )
    # A share has standard deviation 0.25; the mean of 2000 of them, times 600 records, 3.4.
    np.testing.assert_allclose(counts, 150, atol=14)


def test_balanced_gives_a_full_client_no_further_class():
    labels = np.repeat([0, 1, 2, 3], 100)
    for seed in range(50):
        parts = Dirichlet(beta=0.1, min_size=0, balanced=True).split(labels, 2, np.random.default_rng(seed))
        counts = label_counts(labels, parts, 4)
        before = np.cumsum(counts, axis=1) - counts
        assert (counts[before >= 200] == 0).all()


def test_balanced_with_a_vanishing_beta_still_deals_every_record():
    assert sizes_of(Dirichlet(beta=1e-300, min_size=0, balanced=True), 20).sum() == 6000


def test_a_class_without_records_is_no_obstacle():
    labels = np.array([0, 0, 2, 2, 2, 0])
    assert sizes_of(Dirichlet(balanced=True, min_size=0), 3, labels=labels).sum() == 6


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=50), st.integers(0, 100_000))
def test_whole_records_stay_within_one_of_their_share_and_sum_up(weights, total):
    shares = np.array(weights) / sum(weights)
    counts = cut(shares, total)
    assert counts.sum() == total
    assert counts.min() >= 0
    assert (abs(counts - shares * total) <= 1 + 1e-6).all()


def test_cut_by_hand():
    assert cut(np.array([0.5, 0.0, 0.25, 0.25]), 10).tolist() == [5, 0, 3, 2]


def test_quantity_sizes_vary_while_labels_stay_iid():
    parts = Quantity(beta=0.5).split(LABELS, 5, np.random.default_rng(0))
    counts = label_counts(LABELS, parts, 10)
    sizes = counts.sum(axis=1)
    assert sizes.max() > 3 * sizes.min()
    expected = sizes[:, np.newaxis] / 10
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 61.6  # 36 degrees of freedom: exceeded with probability 0.005
