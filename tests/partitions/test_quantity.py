"""iid, shards, feature-noise: parts of equal size; quantity: sizes follow Dir(beta), whatever the labels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import FeatureNoise, Iid, ImpossibleSplit, Quantity, Shards


@settings(max_examples=50, deadline=None)
@given(num_records=st.integers(1, 300), num_clients=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_iid_sizes_differ_by_at_most_one(num_records, num_clients, seed):
    num_clients = min(num_clients, num_records)
    parts = Iid().split(np.zeros(num_records, dtype=np.int64), num_clients, np.random.default_rng(seed))
    assert np.ptp([len(part) for part in parts]) <= 1


def test_feature_noise_splits_as_iid_does_and_its_variance_rises_to_sigma():
    labels = np.arange(50) % 5
    noisy, plain = (s.split(labels, 4, np.random.default_rng(7)) for s in (FeatureNoise(sigma=0.4), Iid()))
    assert all(np.array_equal(a, b) for a, b in zip(noisy, plain, strict=True))
    assert [FeatureNoise(sigma=0.4).noise_variance(i, 4) for i in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_feature_noise_is_in_units_of_raw_inputs_and_leaves_the_records_as_they_are():
    inputs, std = np.ones((50, 2, 8, 8), dtype=np.float32), np.array([0.5, 2.0], dtype=np.float32).reshape(1, 2, 1, 1)
    seen = FeatureNoise(sigma=0.4).seen_by(3, 4, inputs, std, np.random.default_rng(0))
    assert (seen.shape, seen.dtype, inputs.max()) == (inputs.shape, np.float32, 1.0)
    assert ((seen - 1) * std).var(axis=(0, 2, 3)) == pytest.approx([0.4, 0.4], rel=0.1)


def test_the_published_programs_feature_noise_is_a_standard_deviation_and_reaches_the_test_records():
    scheme, std = FeatureNoise(sigma=0.5, variant="niid-bench"), np.array([0.25], dtype=np.float32).reshape(1, 1, 1, 1)
    assert [scheme.noise_variance(i, 3) for i in range(3)] == pytest.approx([0.0, 0.25**2, 0.5**2])
    inputs = np.ones((900, 1, 8, 8), dtype=np.float32)
    tested = (scheme.evaluated_on(3, inputs, std, np.random.default_rng(0)) - 1) * 0.25
    assert [tested[client::3].std() for client in range(3)] == pytest.approx([0.0, 0.25, 0.5], rel=0.02)
    assert FeatureNoise(sigma=0.5).evaluated_on(3, inputs, std, np.random.default_rng(0)) is inputs
    assert inputs.max() == 1.0


@settings(max_examples=50, deadline=None)
@given(
    num_clients=st.integers(1, 20), shards_per_client=st.integers(1, 4), extra=st.integers(0, 200),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_client_holds_s_runs_of_the_label_sorted_records(num_clients, shards_per_client, extra, seed):
    num_records = num_clients * shards_per_client + extra
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, num_records)
    parts = Shards(shards_per_client=shards_per_client).split(labels, num_clients, rng)
    rank = np.empty(num_records, dtype=np.int64)
    rank[np.argsort(labels, kind="stable")] = np.arange(num_records)
    for part in parts:
        runs = 1 + np.count_nonzero(np.diff(np.sort(rank[part])) > 1)
        assert runs <= shards_per_client
    assert np.ptp([len(part) for part in parts]) <= shards_per_client


def test_two_shards_by_hand_are_pieces_of_the_label_sorted_order():
    labels = np.array([1, 0, 1, 0, 2, 2, 3, 3])
    first, second = Shards(shards_per_client=2).split(labels, 2, np.random.default_rng(0))
    pieces = [{1, 3}, {0, 2}, {4, 5}, {6, 7}]
    assert len(first) == len(second) == 4
    assert all(piece <= set(first.tolist()) or piece <= set(second.tolist()) for piece in pieces)


def test_mnist_like_shards_of_one_class_give_at_most_two_classes_a_client():
    labels = np.repeat(np.arange(10), 600)
    parts = Shards(shards_per_client=2).split(labels, 100, np.random.default_rng(0))
    assert all(len(np.unique(labels[part])) <= 2 and len(part) == 60 for part in parts)


def test_more_shards_than_records_are_refused():
    with pytest.raises(ImpossibleSplit, match="4 clients x 3 shards = 12 shards, but only 11 records"):
        Shards(shards_per_client=3).split(np.zeros(11, dtype=np.int64), 4, np.random.default_rng(0))


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0])
def test_sizes_vary_as_much_as_dirichlet_shares_of_this_beta(beta):
    clients, records, generator = 10, 4000, np.random.default_rng(0)
    labels = np.zeros(records, dtype=np.int64)
    scheme = Quantity(beta=beta, min_size=0)
    sizes = [[len(part) for part in scheme.split(labels, clients, generator)] for _ in range(300)]
    # A share of Dir_K(beta) has the variance (1/K) (1 - 1/K) / (K beta + 1).
    expected = (1 / clients) * (1 - 1 / clients) / (clients * beta + 1)
    assert np.var(np.array(sizes) / records) == pytest.approx(expected, rel=0.15)


def test_records_are_dealt_at_random():
    labels = np.zeros(1000, dtype=np.int64)
    parts = Quantity(beta=1.0).split(labels, 3, np.random.default_rng(0))
    largest = max(parts, key=len)
    assert not np.array_equal(largest, np.arange(largest[0], largest[0] + len(largest)))


def test_every_client_holds_ten_records_where_draws_reach_that_and_what_was_promised_always():
    labels = np.zeros(2000, dtype=np.int64)
    for seed in range(20):
        assert min(map(len, Quantity(beta=0.5).split(labels, 10, np.random.default_rng(seed)))) >= 10
        assert min(map(len, Quantity(beta=2.0, min_size=60).split(labels, 10, np.random.default_rng(seed)))) >= 60
    smallest = [min(map(len, Quantity(0.1, min_size=0).split(labels, 10, np.random.default_rng(s)))) for s in range(20)]
    assert min(smallest) == 0
    out_of_reach = Quantity(beta=0.01).split(labels, 100, np.random.default_rng(0))
    assert sum(map(len, out_of_reach)) == 2000


@pytest.mark.parametrize(
    ("min_size", "why"), [(-1, "min_size=-1 must"), (150, "held [0-9]+ records at best"), (201, "in 1 draws")]
)
def test_a_promise_that_cannot_be_kept_is_refused(min_size, why):
    with pytest.raises(ImpossibleSplit, match=why):
        Quantity(beta=0.1, min_size=min_size).split(np.zeros(2000, dtype=np.int64), 10, np.random.default_rng(0))
