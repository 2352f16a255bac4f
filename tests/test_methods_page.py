"""What docs/methods.md tells is true: which methods there are, what their parameters are called, and their defaults."""

import re
from pathlib import Path

from fl_sim.kinds import field_defaults
from fl_sim.settings import kinds_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "methods.md").read_text() + (DOCS / "partial-training.md").read_text().partition("## Adapters")[2]
ROWS = {
    kind: dict(re.findall(r"`(\w+)` (\([^)]*\)|[\w.-]+)", cells))
    for kind, cells in re.findall(r"^\| `([\w-]+)` \|([^|]*)\|", PAGE, re.MULTILINE)
}
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


def test_the_tables_have_every_method_and_every_attack_with_its_defaults() -> None:
    there = {
        kind: {name: str(value).lower() for name, value in field_defaults(settings).items() if name != "kind"}
        for kind, settings in {**kinds_of("algorithm"), **kinds_of("attack")}.items()
        if settings.__name__ not in NAMED_ALONE | {"Centralized", "Pate", "Tstr", "NoAttack"}
    }
    found = {kind: {name: _as_written(value) for name, value in values.items()} for kind, values in ROWS.items()}
    assert found == {
        kind: {name: _as_written(value) for name, value in values.items()} for kind, values in there.items()
    }


def test_what_is_named_without_a_row_is_named() -> None:
    assert all(name.lower() in PAGE.lower() for name in NAMED_ALONE)


def _as_written(value: str) -> float | str:
    return float(value) if value[0].isdigit() else value
