"""How often three kinds of 95 % interval of a mean paired difference hold the truth, by the number of seeds.

    PYTHONPATH=. python benchmarks/interval_coverage.py

"given" is what tables print (fl_sim.report.measures): Student's t below ``ENOUGH`` seeds, the BCa bootstrap from there.
"""

import numpy as np
from scipy.special import stdtrit

from fl_sim.report.measures import LEVEL, difference

TRIES = 4000
DRAWS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "skewed (exponential)": lambda rng, n: rng.exponential(size=n) - 1,
}


def student(values: np.ndarray) -> tuple[float, float]:
    """Return Student's interval."""
    reach = stdtrit(len(values) - 1, (1 + LEVEL) / 2) * values.std(ddof=1) / len(values) ** 0.5
    return values.mean() - reach, values.mean() + reach


def percentile(values: np.ndarray) -> tuple[float, float]:
    """Return the percentile bootstrap's interval."""
    means = values[np.random.default_rng(1).integers(len(values), size=(2000, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return low, high


def given(values: np.ndarray) -> tuple[float, float]:
    """Return the interval that tables print."""
    found = difference([(value, 0.0) for value in values.tolist()])
    assert found is not None
    return found.low, found.high


for name, draw in DRAWS.items():
    for seeds in (3, 5, 10, 20):
        rng = np.random.default_rng(0)
        held = np.zeros(3)
        for _ in range(TRIES):
            sample = draw(rng, seeds)
            held += [low <= 0 <= high for low, high in (student(sample), percentile(sample), given(sample))]
        t, bootstrap, ours = 100 * held / TRIES
        print(f"{name}, {seeds} seeds: t {t:.1f} %, percentile bootstrap {bootstrap:.1f} %, given {ours:.1f} %")
