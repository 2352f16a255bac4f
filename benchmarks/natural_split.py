"""How long partition=natural takes: 800,000 records of 3,500 writers over 3,500 clients, and over 350, made-up sizes.

python benchmarks/natural_split.py
"""

import time

import numpy as np

from partitions import Natural

WRITERS, RECORDS = 3_500, 800_000
MOST_SECONDS = 2.0


def made_up() -> tuple[np.ndarray, np.ndarray]:
    """Return (labels, writers), in any order: sizes as skewed as FEMNIST's are, lognormal."""
    rng = np.random.default_rng(0)
    shares = rng.lognormal(0, 0.5, WRITERS)
    sizes = 1 + rng.multinomial(RECORDS - WRITERS, shares / shares.sum())
    writers = rng.permutation(np.repeat(rng.permutation(10 * WRITERS)[:WRITERS], sizes))
    return rng.integers(0, 62, RECORDS), writers


def main() -> None:
    """Split, check that it is a split by writer, and print how long it took."""
    labels, writers = made_up()
    for clients in (WRITERS, WRITERS // 10):
        begin = time.perf_counter()
        parts = Natural().split_groups(labels, writers, clients, np.random.default_rng(0))
        seconds = time.perf_counter() - begin
        owner = np.empty(RECORDS, dtype=np.int64)
        for client, part in enumerate(parts):
            owner[part] = client
        assert sum(map(len, parts)) == RECORDS
        assert len(np.unique(writers * len(parts) + owner)) == WRITERS, "a writer is spread over clients"
        sizes = [len(part) for part in parts]
        print(
            f"{RECORDS:,} records of {WRITERS:,} writers over {clients:,} clients, {min(sizes):,} to {max(sizes):,} "
            f"records each: {seconds:.2f} s (at most {MOST_SECONDS:g} s wanted)"
        )
        assert seconds < MOST_SECONDS


if __name__ == "__main__":
    main()
