"""quantity: sizes follow Dir(beta), whatever the labels."""

import numpy as np
import pytest

from partitions import Quantity


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0])
def test_sizes_vary_as_much_as_dirichlet_shares_of_this_beta(beta):
    clients, records, generator = 10, 4000, np.random.default_rng(0)
    labels = np.zeros(records, dtype=np.int64)
    sizes = [[len(part) for part in Quantity(beta=beta).split(labels, clients, generator)] for _ in range(300)]
    # A share of Dir_K(beta) has the variance (1/K) (1 - 1/K) / (K beta + 1).
    expected = (1 / clients) * (1 - 1 / clients) / (clients * beta + 1)
    assert np.var(np.array(sizes) / records) == pytest.approx(expected, rel=0.15)


def test_records_are_dealt_at_random():
    labels = np.zeros(1000, dtype=np.int64)
    parts = Quantity(beta=1.0).split(labels, 3, np.random.default_rng(0))
    largest = max(parts, key=len)
    assert not np.array_equal(largest, np.arange(largest[0], largest[0] + len(largest)))
