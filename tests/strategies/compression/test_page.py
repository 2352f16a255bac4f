"""What docs/compression.md tells is true: which kinds there are, what is refused, and the bytes of its table."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fl_sim import models
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.kinds import title_of
from fl_sim.packed import Compressor, Size
from fl_sim.params import detached, layout_of, num_in
from fl_sim.settings import kinds_of
from fl_sim.types import Params

PROJECT = Path(__file__).parents[3]
PAGE = (PROJECT / "docs" / "compression.md").read_text()
TABLE = tomllib.loads((PROJECT / "benchmarks" / "compression.toml").read_text())


def rows_below(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    below = PAGE.partition(heading)[2]
    table = re.search(r"^\|.*?(?=\n\n)", below, re.MULTILINE | re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_every_kind_has_a_row() -> None:
    named = [re.sub(r"[`:].*", "", cells[0].strip("`")) for cells in rows_below("# Compressed updates")]
    assert sorted(named) == sorted(kinds_of("compress"))


def test_a_method_is_refused_where_the_page_says_so_and_nowhere_else() -> None:
    told: dict[str, list[str]] = {}
    for names, *cells in rows_below("## What travels compressed"):
        told |= {name.strip().strip("`").lower(): cells for name in names.split(",")}
    others = told.pop("all others")
    assert set(told) <= {title_of(made()).lower() for made in kinds_of("algorithm").values()}
    for kind, made in kinds_of("algorithm").items():
        refused = told.get(title_of(made()).lower(), others)[2]
        for compress in set(kinds_of("compress")) - {"none"}:
            if refused.startswith("all:") or (refused and compress in {"qsgd", "rand-k"}):
                with pytest.raises(UserError, match="compress"):
                    experiment_from({"algorithm": kind, "compress": compress})
            else:
                experiment_from({"algorithm": kind, "compress": compress})


def test_the_table_has_the_rows_of_its_file_and_their_bytes() -> None:
    base, grid = TABLE["base"], TABLE["grid"]
    model = models.build(base["model"], (1, 28, 28), 10, seed=0)
    params = detached(model.named_parameters())
    assert f"{num_in(layout_of(params)):,} parameters" in PAGE
    rows = rows_below("## What it costs in accuracy")
    assert len(rows) == len(grid["compress"])
    for cells, compress in zip(rows, grid["compress"], strict=True):
        experiment = experiment_from({"compress": compress})
        sent = base["rounds"] * experiment.clients * _bytes(experiment.compress, params)
        assert cells[2] == f"{sent / 1e6:.1f}"
        assert cells[0].startswith(f"`{compress}`" if isinstance(compress, str) else "`rand-k:0.1`")


def _bytes(compress: Any, params: Params) -> int:
    way: Compressor = compress
    whole = Size(num_in(layout_of(params)))
    size = whole if compress.kind == "none" else way.size(layout_of(params))
    return 128 * (bool(size.numbers) + bool(size.bits)) + 4 * size.numbers + size.bits
