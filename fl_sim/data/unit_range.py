"""Records whose numbers lie between 0 and 1, as what draws records wants them."""

import numpy as np

from fl_sim.errors import UserError
from fl_sim.types import Dataset


def check_unit_range(dataset: Dataset, preprocess: str) -> None:
    """Raise UserError where numbers of ``dataset`` that ``preprocess`` learns from lie outside of 0 to 1."""
    inputs = dataset.train.inputs
    if inputs.dtype == np.float32 and len(inputs) and not 0 <= inputs.min() <= inputs.max() <= 1:
        raise UserError(
            f"preprocess {preprocess} takes numbers from 0 to 1, and {dataset.name} has others: scale every column by "
            "public bounds (data.range.COLUMN=LOW..HIGH of a table), not by what the records hold"
        )
