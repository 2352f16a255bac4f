"""A data set of your own: a function of the data folder that returns the same records in every process.

    fl-sim run data=rings:rings partition=iid model=mlp

Your own files need no code: see ``data=npz:PATH`` and ``data=folder:PATH``.
"""

from pathlib import Path

import numpy as np

from fl_sim.types import Dataset, Examples


def rings(data_root: Path | None) -> Dataset:
    """Return points on three rings in the plane: 600 training and 300 test records. The ring is the class."""
    del data_root
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 900)
    radius, angle = labels + 1 + 0.1 * rng.standard_normal(900), rng.uniform(0, 2 * np.pi, 900)
    inputs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
    train, test = Examples(inputs[:600], labels[:600]), Examples(inputs[600:], labels[600:])
    return Dataset("rings", train, test, num_classes=3, mean=(0.0,), std=(1.0,), note="made up")
