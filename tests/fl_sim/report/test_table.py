"""What a table prints, in literal numbers."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

from fl_sim.report.release import Release, in_short, promise
from fl_sim.report.table import SeedResult, Status, Table, as_json, csv_text, latex, markdown, notes, write_table


def result(row: str, column: str, seed: int, last: float | None, status: Status = "finished") -> SeedResult:
    error = "client 3 in round 2 diverged" if status == "failed" else ""
    best = None if last is None else last + 0.01
    return SeedResult(row, column, seed, status, f"cells/{row}-{column}-{seed}", last, best, error)


def table(*results: SeedResult, bounds: frozenset[str] = frozenset()) -> Table:
    rows, columns = (tuple(dict.fromkeys(getattr(one, name) for one in results)) for name in ("row", "column"))
    return Table(rows, columns, bounds, results, ("A caption.",))


def test_seeds_are_averaged_with_the_sample_deviation() -> None:
    three = table(*(result("FedAvg", "IID", seed, last) for seed, last in enumerate((0.90, 0.92, 0.94))))
    assert "| FedAvg | **92.0 ± 2.0** | **93.0 ± 2.0** |" in markdown(three)


def test_one_seed_shows_the_plain_value() -> None:
    assert "| FedAvg | **98.8** | **99.8** |" in markdown(table(result("FedAvg", "IID", 0, 0.98765)))


def test_best_of_each_column_is_bold_and_ties_as_printed_are_all_bold() -> None:
    shown = markdown(
        table(
            result("A", "x", 0, 0.90004), result("B", "x", 0, 0.90001), result("C", "x", 0, 0.8),
            result("A", "y", 0, 0.1), result("B", "y", 0, 0.2), result("C", "y", 0, 0.3),
        )
    )  # fmt: skip
    assert "| A | **90.0** | **91.0** | 10.0 | 11.0 |" in shown
    assert "| B | **90.0** | **91.0** | 20.0 | 21.0 |" in shown
    assert "| C | 80.0 | 81.0 | **30.0** | **31.0** |" in shown


def test_upper_bound_does_not_compete() -> None:
    filled = table(result("FedAvg", "x", 0, 0.5), result("Centralized", "x", 0, 0.9), bounds=frozenset({"Centralized"}))
    assert "| FedAvg | **50.0** |" in markdown(filled)
    assert "| Centralized | 90.0 |" in markdown(filled)
    assert "\\midrule\nCentralized & 90.0" in latex(filled)


def test_a_cell_without_all_its_seeds_says_so_and_does_not_compete() -> None:
    shown = markdown(
        table(
            result("A", "x", 0, 0.9), result("A", "x", 1, None, "missing"),
            result("B", "x", 0, 0.5), result("B", "x", 1, 0.5),
            result("C", "x", 0, 0.7), result("C", "x", 1, None, "failed"),
            result("D", "x", 0, None, "missing"), result("D", "x", 1, None, "missing"),
        )
    )  # fmt: skip
    assert "| A | 90.0 (1 of 2) |" in shown
    assert "| B | **50.0 ± 0.0** |" in shown
    assert "| C | failed | failed |" in shown
    assert "| D | - | - |" in shown
    assert "failed: C, x, seed 1: client 3 in round 2 diverged" in shown


POOL = Release(
    unit="record", epsilon=9.5, delta=1e-5, covers="the pool alone", does_not_cover="The main task is NOT private."
)


def with_releases(row: str, seed: int, *releases: Release) -> SeedResult:
    return SeedResult(row, "x", seed, "finished", f"cells/{row}", 0.5, 0.5, releases=releases)


def test_methods_without_a_guarantee_are_named() -> None:
    private = with_releases("DP", 0, POOL)
    assert "No privacy guarantee: FedAvg." in markdown(table(result("FedAvg", "x", 0, 0.5), private))
    assert "No privacy guarantee: any method here." in markdown(table(result("FedAvg", "x", 0, 0.5)))
    assert "No privacy guarantee" not in markdown(table(private))


def test_a_guarantee_is_told_with_unit_delta_the_largest_epsilon_of_the_row_and_its_limits() -> None:
    larger, other = POOL.model_copy(update={"epsilon": 9.87654}), POOL.model_copy(update={"epsilon": 1.0})
    client = Release(unit="client", epsilon=3.0, delta=1e-4, covers="all updates", does_not_cover="The server.")
    told = notes(
        table(with_releases("A", 0, POOL), with_releases("A", 1, larger), with_releases("B", 0, other, client))
    )
    limits = "It covers: the pool alone. It does not cover: The main task is NOT private."
    of_client = "It covers: all updates. It does not cover: The server."
    assert told[1:] == [
        f"Privacy of each run by itself, of a record, delta 1e-05: A epsilon 9.88, B epsilon 1. {limits}",
        f"Privacy of each run by itself, of a client, delta 0.0001: B epsilon 3. {of_client}",
        "What all runs together cost the records they are about is told once the table is done.",
    ]


def test_the_bill_of_all_runs_is_told_and_kept_for_programs() -> None:
    bill = {"unit": "record", "epsilon": 19.0, "in_words": "Privacy of all 2 runs together: epsilon 19."}
    done = replace(table(with_releases("A", 0, POOL), with_releases("A", 1, POOL)), bill=(bill,))
    assert notes(done)[-1] == bill["in_words"]
    for text in (markdown(done), latex(done)):
        assert "Privacy of all 2 runs together: epsilon 19." in text
    assert as_json(done)["bill"] == [bill]
    assert as_json(table(with_releases("A", 0, POOL)))["bill"] is None


def test_a_figure_is_never_rounded_down_and_zero_is_zero() -> None:
    for epsilon, shown in ((0.0, "0"), (3.121, "3.13"), (0.0001234, "0.000124"), (1e-300, "1e-300")):
        release = POOL.model_copy(update={"epsilon": epsilon})
        assert in_short(release) == f"epsilon {shown} per record"
        assert f"A epsilon {shown}." in notes(table(with_releases("A", 0, release)))[1]
    assert promise(POOL.model_copy(update={"epsilon": 0.0})).startswith("Per record: (0, 1e-05)-differential privacy")


def test_noise_free_releases_are_no_guarantee() -> None:
    noiseless, nothing = (POOL.model_copy(update={"epsilon": epsilon}) for epsilon in (None, None))
    rows = (with_releases("A", 0, noiseless), with_releases("B", 0, nothing), with_releases("B", 1, POOL))
    told = notes(replace(table(*rows, with_releases("C", 0, POOL)), bill=()))
    assert told[-1] == "No privacy guarantee: A, B (in some runs)."
    cells = as_json(table(*rows))["cells"]
    assert [cell["guarantee"] for cell in cells] == [False, False]
    assert notes(table(*rows[:2]))[1:] == ["No privacy guarantee: any method here."]


def test_markdown_escapes_the_bar() -> None:
    assert "| a\\|b |" in markdown(table(result("a|b", "x", 0, 0.5)))


def test_latex_is_a_booktabs_tabular_with_special_characters_escaped() -> None:
    results = (result("FedProx (mu_1=5%)", "Dir(0.5)", seed, last) for seed, last in enumerate((0.9, 0.8)))
    assert latex(table(*results)).splitlines()[-9:] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"& \multicolumn{2}{c}{Dir(0.5)} \\",
        r"\cmidrule(lr){2-3}",
        r"Method & last & best \\",
        r"\midrule",
        r"FedProx (mu\_1=5\%) & \textbf{85.0 $\pm$ 7.1} & \textbf{86.0 $\pm$ 7.1} \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_csv_has_a_line_per_cell_and_seed() -> None:
    text = csv_text(table(result("A", "x", 0, 0.5), result("A", "x", 1, None, "failed")))
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [(line["row"], line["seed"], line["status"], line["final_accuracy"]) for line in lines] == [
        ("A", "0", "finished", "0.5"),
        ("A", "1", "failed", ""),
    ]


def test_json_holds_percentages_in_the_order_of_the_seeds() -> None:
    (cell,) = as_json(table(result("A", "x", 3, 0.5), result("A", "x", 1, 0.75)))["cells"]
    assert (cell["mean"], round(cell["std"], 4), cell["best_mean"]) == (62.5, 17.6777, 63.5)
    assert (cell["seeds"], cell["values"], cell["best_values"]) == ([3, 1], [50.0, 75.0], [51.0, 76.0])
    assert (cell["status"], cell["dir"]) == ("finished", ["cells/A-x-3", "cells/A-x-1"])
    (single,) = as_json(table(result("A", "x", 3, 0.5)))["cells"]
    assert (single["mean"], single["std"]) == (50.0, None)


def test_one_seed_that_failed_makes_the_cell_failed_and_one_missing_makes_it_missing() -> None:
    states = {
        status: as_json(table(result("A", "x", 0, 0.5), result("A", "x", 1, None, status)))["cells"][0]["status"]
        for status in ("failed", "missing")
    }
    assert states == {"failed": "failed", "missing": "missing"}


def test_all_four_files_are_written(tmp_path: Path) -> None:
    filled = table(result("A", "x", 0, 0.5))
    write_table(tmp_path, filled)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.json", "table.md", "table.tex"]
    assert json.loads((tmp_path / "table.json").read_text()) == as_json(filled)
    assert (tmp_path / "table.md").read_text() == markdown(filled) + "\n"
