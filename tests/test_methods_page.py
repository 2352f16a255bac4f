"""The tables of docs/methods.md have every method and every attack."""

import re
from pathlib import Path

from fl_sim.settings import kinds_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "methods.md").read_text() + (DOCS / "partial-training.md").read_text().partition("## Adapters")[2]
NAMED_ALONE = {
    "FedAvg",
    "FedProx",
    "Scaffold",
    "FedNova",
    "FedMix",
    "NaiveMix",
    "FedAvgM",
    "FedAdagrad",
    "FedAdam",
    "FedYogi",
}


def test_the_tables_have_every_method_and_every_attack_once() -> None:
    there = [
        kind
        for setting in ("algorithm", "attack")
        for kind, settings in kinds_of(setting).items()
        if settings.__name__ not in NAMED_ALONE | {"Centralized", "Pate", "Tstr", "NoAttack"}
    ]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)) == sorted(there)


def test_what_is_named_without_a_row_is_named() -> None:
    assert all(name.lower() in PAGE.lower() for name in NAMED_ALONE)
