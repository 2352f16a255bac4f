"""Random forests (Breiman 2001, scikit-learn's) for tables of numbers: as PATE's teachers, and as its student."""

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fl_sim.settings import Settings

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier


class RandomForest(Settings):
    """``trees`` of any depth down to leaves of ``min_leaf`` records, each on a bootstrap sample.

    ``balanced``: every class weighs the same, however few records it has. Where one is rare, a forest otherwise hardly
    ever decides for it, and the noisy majority of many never does; it takes leaves of several records to have an
    effect.
    """

    kind: Literal["random-forest"] = "random-forest"
    trees: int = Field(100, ge=1)
    min_leaf: int = Field(1, ge=1)
    balanced: bool = False

    def fit(
        self, inputs: NDArray[np.float32], labels: NDArray[np.int64], generator: np.random.Generator
    ) -> "RandomForestClassifier":
        """Return a forest grown on ``inputs`` (n, features) and ``labels`` (n,), n at least 1."""
        from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 (a second to import)

        seed = int(generator.integers(2**31))
        weights = "balanced" if self.balanced else None
        forest = RandomForestClassifier(
            self.trees, min_samples_leaf=self.min_leaf, class_weight=weights, random_state=seed, n_jobs=1
        )
        forest.fit(inputs, labels)
        return forest


def as_table(inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return records as rows of numbers, shape (n, features)."""
    return inputs.reshape(len(inputs), -1)
