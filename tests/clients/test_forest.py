"""Random forests as teachers and students."""

import numpy as np

from clients.forest import RandomForest


def test_a_balanced_forest_decides_for_a_rare_class_where_it_is_the_likelier_one_by_its_own_records() -> None:
    generator = np.random.default_rng(0)
    labels = (np.arange(1500) % 15 == 0).astype(np.int64)
    inputs = generator.standard_normal((1500, 3)).astype(np.float32)
    inputs[:, 0] += 1.5 * labels
    plain, balanced = (
        RandomForest(trees=30, min_leaf=20, balanced=chosen).fit(inputs, labels, np.random.default_rng(1))
        for chosen in (False, True)
    )
    found, right = (forest.predict(inputs)[labels == 1].mean() for forest in (plain, balanced))
    assert found < 0.2
    assert right > 0.6
    assert balanced.predict(inputs)[labels == 0].mean() < 0.35
