"""The card of a data set: what it counts is counted of whom it says."""

import numpy as np

from fl_sim.data.card import card_of
from fl_sim.types import Dataset, Examples


def test_clients_with_test_records_of_their_own_are_those_that_train_and_no_strangers():
    groups, tested = np.array([1, 1, 1, 2, 4, 4, 4, 4, 4]), np.array([4, 4, 7, 8, 9, 1])
    train = Examples(np.zeros((9, 2), np.float32), np.arange(9) % 2, groups)
    test = Examples(np.zeros((6, 2), np.float32), np.arange(6) % 2, tested)
    clients = card_of(Dataset("d", train, test, 2, (0.0,), (1.0,)), with_records=False)["clients"]
    assert (clients["count"], clients["with_test_records"], clients["with_one_record"]) == (3, 2, 1)
    assert (clients["smallest"], clients["median"], clients["largest"]) == (1, 3.0, 5)
