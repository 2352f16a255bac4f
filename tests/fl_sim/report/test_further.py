"""What it took to get to an accuracy, where rows, columns and runs all differ."""

from fl_sim.report.further import further, targets
from fl_sim.report.table import SeedResult, Table


def run(row: str, column: str, seed: int, **measures: float) -> SeedResult:
    place = (row, column, seed, "finished", f"cells/{row}{column}{seed}")
    return SeedResult(*place, 0.5, 0.6, measures={name.replace("__", "."): value for name, value in measures.items()})


def table(*results: SeedResult) -> Table:
    rows, columns = (tuple(dict.fromkeys(getattr(one, name) for one in results)) for name in ("row", "column"))
    return Table(rows, columns, frozenset(), results)


def test_each_column_has_its_own_target_whichever_row_got_there_and_none_where_no_row_did() -> None:
    found = targets(
        table(
            run("A", "x", 0), run("B", "x", 0, reached__80__round=4.0), run("C", "x", 0, reached__50__round=1.0),
            run("A", "y", 0, reached__60__round=7.0), run("B", "y", 0), run("C", "y", 0),
            run("A", "z", 0), run("B", "z", 0), run("C", "z", 0),
        )
    )  # fmt: skip
    assert found is not None
    assert list(found.heads) == ["x, 80 %", "y, 60 %"]
    assert list(found.rows) == [("A", ["- (0 of 1)", "7"]), ("B", ["4", "- (0 of 1)"]), ("C", ["- (0 of 1)"] * 2)]


def test_virtual_seconds_and_megabytes_to_a_target_are_means_over_the_runs_that_tell_them() -> None:
    def reaching(row: str, seed: int, rounds: float, **told: float) -> SeedResult:
        return run(row, "x", seed, reached__80__round=rounds, **{f"reached__80__{name}": told[name] for name in told})

    found = targets(
        table(
            reaching("A", 0, 2.0, bytes=1e6, virtual_seconds=10.0),
            reaching("A", 1, 3.0, bytes=5e6, virtual_seconds=40.0),
            reaching("B", 0, 2.0, bytes=0.0), reaching("B", 1, 4.0, bytes=0.0),
            reaching("C", 0, 2.0), reaching("C", 1, 6.0),
        )
    )  # fmt: skip
    assert found is not None
    assert "accuracy, virtual seconds, and MB" in found.title
    assert list(found.rows) == [("A", ["2.5, 25 s, 3 MB"]), ("B", ["3.0, 0 MB"]), ("C", ["4.0"])]


def test_a_further_measure_has_its_own_cell_in_every_column() -> None:
    (found,) = further(table(run("A", "x", 0, auc_percent=70.0), run("A", "y", 0, auc_percent=80.0), run("B", "x", 0)))
    assert list(found.rows) == [("A", ["70.0", "80.0"]), ("B", ["-", "-"])]
