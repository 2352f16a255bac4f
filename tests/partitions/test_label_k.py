"""label-k: exactly k classes a client, equal shares of a class, class i mod L first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import ImpossibleSplit, LabelK, label_counts


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
    with pytest.raises(ImpossibleSplit, match="label-1 over 4 clients: class 1 has 1 records for 2 holders"):
        counts_of(1, [0, 0, 0, 0, 1], 4)


def test_negative_labels_are_refused():
    with pytest.raises(ImpossibleSplit, match="label -1 is negative"):
        counts_of(1, [-1, 0, 1], 2)
