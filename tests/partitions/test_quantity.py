"""quantity: sizes follow Dir(beta), whatever the labels."""

import numpy as np
import pytest

from partitions import ImpossibleSplit, Quantity


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
