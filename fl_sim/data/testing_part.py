"""Which records are for testing, where a file does not say: a share of them, or of every client's, by a stated seed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_sim.data.columns import as_number
from fl_sim.data.naming import OwnName
from fl_sim.errors import UserError
from fl_sim.seeding import rng


@dataclass(frozen=True)
class Held:
    """What is said of the test part: a ``share`` of the records drawn by ``seed``, an ``other`` table, or neither."""

    share: float = 0.0
    seed: int = 0
    other: str = ""

    def check(self, *, has_column: bool) -> None:
        """Raise UserError unless exactly one thing says which records are for testing."""
        ways = (self.share > 0) + bool(self.other) + has_column
        if ways == 1:
            return
        options = (
            "data.test=0.2 (a fifth of the records, or of every client's), data.test_file=FILE (another file) or "
            "data.split=COLUMN (a column that says train or test)"
        )
        if ways:
            raise UserError(f"the test part is said {ways} times; take one of {options}")
        raise UserError(f"nothing says which records are for testing; set {options}")

    def drawn(self, count: int, clients: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        """Return which of ``count`` records are for testing: a share of all, or of each client's where they are known.

        Shares are rounded to whole records, at least one and never all; who has a single record trains on it.
        """
        chosen = np.zeros(count, dtype=bool)
        if clients is None:
            chosen[rng(self.seed, "test part").permutation(count)[: self._size(count)]] = True
            return chosen
        order = np.argsort(clients, kind="stable")
        numbers, starts = np.unique(clients[order], return_index=True)
        bounds = np.append(starts, count)
        for place in np.flatnonzero(np.diff(bounds) > 1).tolist():  # of a million clients most may have one record
            of_client = order[bounds[place] : bounds[place + 1]]
            coins = rng(self.seed, "test part", int(numbers[place]))
            chosen[of_client[coins.permutation(len(of_client))[: self._size(len(of_client))]]] = True
        return chosen

    def told(self, column: str, *, by_client: bool = False) -> str:
        """Say it in words."""
        if self.other:
            return f"tested on {self.other}"
        if column:
            return f"train and test by {column}"
        whose = "every client's records" if by_client else "the records"
        return f"{self.share:g} of {whose} are for testing, drawn by test_seed {self.seed}"

    def _size(self, count: int) -> int:
        return min(max(1, round(self.share * count)), count - 1)


def held_by_setting(own: OwnName) -> Held:
    """Return what the name of a data set says of its test part. Raises UserError for what is no share, or no seed."""
    share, seed, file = (own.option(key) for key in ("test", "test_seed", "test_file"))
    if seed and not share:
        raise UserError("data.test_seed draws a share of the records for testing: set data.test, too, or leave it out")
    number = as_number(share) if share else 0.0
    if number is None or (share and not 0 < number < 1):
        raise UserError(f"data.test = {share!r}: it is a share of the records, above 0 and below 1, such as 0.2")
    if seed and not (seed.isascii() and seed.isdigit() and len(seed) < 19):
        raise UserError(f"data.test_seed = {seed!r}: it is a whole number, at least 0")
    return Held(number, int(seed or 0), Path(file).name)
