"""Data files for the tables in this folder, made from public data sets in a data root.

    python benchmarks/personal/data.py adult ROOT adult.csv
    python benchmarks/personal/data.py sentences ROOT sentences.npz
    python benchmarks/personal/data.py rotated-mnist ROOT rotated-mnist.npz

* ``adult``: the Adult census, with the occupation as the client. The official test records stay test records, of the
  client with the same occupation. A record without an occupation belongs to the client "unknown".
* ``sentences``: rated sentences (Hutto and Gilbert 2014), with their source as the client. Class 1 has a mean rating
  above 0.5, class 0 below -0.5; sentences between are left out. The inputs are 2,048 hashed counts of words and pairs
  of words, scaled to length 1. A fifth of each source is for testing.
* ``rotated-mnist``: Ghosh et al. 2020, section 6: each image of MNIST four times, turned by 0, 90, 180 and 270 degrees.
  1,200 clients have 200 of the 240,000 training images each, and 33 or 34 test images. Client i has turn i mod 4.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from fl_sim.data import load

CLIENTS: Final = 1_200
TURNS: Final = 4
SEED: Final = 42
"""Seed of the order of images, and of the draw of test sentences."""

ADULT: Final = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital", "occupation", "relationship", "race", "sex",
    "gain", "loss", "hours", "country", "income",
)  # fmt: skip


def adult(root: Path, out: Path) -> None:
    """Write the census as a csv file with the columns ``client`` and ``split``; the column ``fnlwgt`` is left out."""
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(name for name in ADULT if name != "fnlwgt"), "client", "split"])
        for split, name in (("train", "adult.data"), ("test", "adult.test")):
            for row in csv.reader((root / "uci" / name).open(), skipinitialspace=True):
                if len(row) == len(ADULT):
                    writer.writerow(_adult_row(dict(zip(ADULT, row, strict=True)), split))


def _adult_row(cells: Mapping[str, str], split: str) -> Iterable[str]:
    known = {name: "unknown" if value == "?" else value.rstrip(".") for name, value in cells.items()}
    return [*(value for name, value in known.items() if name != "fnlwgt"), known["occupation"], split]


def sentences(root: Path, out: Path) -> None:
    """Write hashed words of the rated sentences. A hash depends on no other sentence."""
    from sklearn.feature_extraction.text import HashingVectorizer

    with (root / "sentences" / "sentences.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if abs(float(row["rating"])) > 0.5]
    words = HashingVectorizer(n_features=2_048, ngram_range=(1, 2), alternate_sign=False)
    inputs = words.transform([row["text"] for row in rows]).toarray().astype(np.float32)
    labels = np.array([float(row["rating"]) > 0 for row in rows], dtype=np.int64)
    sources = np.array([row["source"] for row in rows])
    tests = np.zeros(len(rows), dtype=np.bool_)
    rng = np.random.default_rng(SEED)
    for source in np.unique(sources):
        held = np.flatnonzero(sources == source)
        tests[rng.permutation(held)[: len(held) // 5]] = True
    np.savez(
        out, x_train=inputs[~tests], y_train=labels[~tests], client_train=sources[~tests],
        x_test=inputs[tests], y_test=labels[tests], client_test=sources[tests],
    )  # fmt: skip


def rotated_mnist(root: Path, out: Path) -> None:
    """Write MNIST at four turns, divided among 1,200 clients."""
    dataset, rng, arrays = load("mnist", root), np.random.default_rng(SEED), {}
    for name, part in (("train", dataset.train), ("test", dataset.test)):
        images, labels, clients = [], [], []
        for turn in range(TURNS):
            order = rng.permutation(len(part))
            images.append(np.rot90(np.asarray(part.inputs)[order], turn, axes=(2, 3)))
            labels.append(part.labels[order])
            clients.append(turn + TURNS * (np.arange(len(part)) % (CLIENTS // TURNS)))
        arrays |= {f"x_{name}": np.concatenate(images)[:, 0], f"y_{name}": np.concatenate(labels)}
        arrays |= {f"client_{name}": np.concatenate(clients)}
    np.savez(out, **arrays)


WRITERS: Final[Mapping[str, Callable[[Path, Path], None]]] = {
    "adult": adult, "sentences": sentences, "rotated-mnist": rotated_mnist,
}  # fmt: skip


def main() -> None:
    """Write the file that the command line names."""
    match sys.argv[1:]:
        case [name, root, out] if name in WRITERS:
            WRITERS[name](Path(root), Path(out))
        case _:
            sys.exit(f"usage: python benchmarks/personal/data.py {{{','.join(WRITERS)}}} DATA_ROOT OUT")


if __name__ == "__main__":
    main()
