"""What a table prints, in literal numbers."""

import json
from dataclasses import replace
from pathlib import Path

from fl_sim.report.captions import notes
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.table import SeedResult, Status, Table, best_rows, further, targets, texts
from fl_sim.report.table_files import as_json, latex, latex_further, markdown, run_lines, write_table


def result(row: str, column: str, seed: int, last: float | None, status: Status = "finished") -> SeedResult:
    error = "client 3 in round 2 diverged" if status == "failed" else ""
    best = None if last is None else last + 0.01
    return SeedResult(row, column, seed, status, f"cells/{row}-{column}-{seed}", last, best, error)


def table(*results: SeedResult, bounds: frozenset[str] = frozenset()) -> Table:
    rows, columns = (tuple(dict.fromkeys(getattr(one, name) for one in results)) for name in ("row", "column"))
    return Table(rows, columns, bounds, results, ("A caption.",))


def seeds(row: str, column: str, *accuracies: float) -> list[SeedResult]:
    return [result(row, column, seed, last) for seed, last in enumerate(accuracies)]


def test_seeds_are_averaged_with_the_sample_deviation() -> None:
    assert "| FedAvg | 92.0 ± 2.0 | 93.0 ± 2.0 |" in markdown(table(*seeds("FedAvg", "IID", 0.90, 0.92, 0.94)))


def test_a_row_without_runs_in_a_column_has_no_cell_there_and_is_no_rival() -> None:
    results = [result(row, "x", seed, {"A": 0.9, "B": 0.5}[row]) for row in "AB" for seed in (0, 1, 2)]
    results += [result("C", "y", seed, 0.7) for seed in (0, 1, 2)]
    found = table(*results)
    assert best_rows(found, "x", "last") == {"A"}
    assert best_rows(found, "y", "last") == set()
    assert [text for text, _ in dict(texts(found))["C"]] == ["-", "-", "70.0 ± 0.0", "71.0 ± 0.0"]
    assert [(cell["row"], cell["column"]) for cell in as_json(found)["cells"]] == [("A", "x"), ("B", "x"), ("C", "y")]


def test_one_seed_shows_the_plain_value() -> None:
    assert "| FedAvg | 98.8 | 99.8 |" in markdown(table(result("FedAvg", "IID", 0, 0.98765)))


def test_the_best_of_a_column_is_bold_where_every_other_row_is_significantly_worse_on_the_same_seeds() -> None:
    shown = markdown(
        table(
            # Paired by seed B is behind by 5.0, 5.1 and 4.9 points; unpaired 10 points of scatter would hide that.
            *seeds("A", "x", 0.80, 0.70, 0.90), *seeds("B", "x", 0.750, 0.649, 0.851),
            *seeds("A", "y", 0.80, 0.81, 0.82), *seeds("B", "y", 0.79, 0.84, 0.70),
        )
    )  # fmt: skip
    assert "| A | **80.0 ± 10.0** | **81.0 ± 10.0** | 81.0 ± 1.0 | 82.0 ± 1.0 |" in shown
    assert "| B | 75.0 ± 10.1 |" in shown
    # Student's t of -5.0, -5.1, -4.9: 4.303 * 0.1 / sqrt(3) = 0.248
    assert "| B | -5.0 [-5.2, -4.8] | -3.3 [-22.6, +16.0] |" in shown
    assert "| A | highest mean | highest mean |" in shown
    assert "Bold: the highest mean, if the 95 % confidence interval of its difference to every" in shown


def test_one_noisy_row_behind_the_runner_up_is_enough_for_no_bold() -> None:
    rows = [*seeds("A", "x", 0.90, 0.91, 0.92), *seeds("B", "x", 0.85, 0.86, 0.87), *seeds("C", "x", 0.99, 0.5, 0.9)]
    assert "**" in markdown(table(*rows[:6]))
    assert "**" not in markdown(table(*rows))


def test_fewer_than_three_seeds_have_the_highest_mean_in_bold_and_no_interval_and_say_so() -> None:
    for number, shown in ((1, "90.0"), (2, "90.5 ± 0.7")):
        few = table(*seeds("A", "x", 0.90, 0.91)[:number], *seeds("B", "x", 0.5, 0.51)[:number])
        assert f"| A | **{shown}** | **" in markdown(few)
        assert r"\textbf{90." in latex(few, "t")
        for text in (markdown(few), latex(few, "t")):
            assert (
                "Bold: the highest mean, without a test, because a confidence interval needs at least 3 seeds." in text
            )
            assert "Difference to" not in text
            assert text.count("**") in {0, 4}
        assert best_rows(few, "x", "last") == set()
        assert [cell["difference"] for cell in as_json(few)["cells"]] == [None, None]


def test_rows_that_print_the_same_highest_mean_are_all_bold_and_bounds_and_lone_rows_are_not() -> None:
    tied = table(result("A", "x", 0, 0.90001), result("B", "x", 0, 0.9), result("C", "x", 0, 0.8))
    assert markdown(tied).count("| **90.0** |") == 2
    bound = table(result("A", "x", 0, 0.5), result("Centralized", "x", 0, 0.9), bounds=frozenset({"Centralized"}))
    assert "**" not in markdown(bound)
    assert "Bold" not in markdown(bound)


def test_upper_bound_does_not_compete() -> None:
    bound = seeds("Centralized", "x", 0.99, 0.99, 0.99)
    filled = table(
        *seeds("A", "x", 0.5, 0.51, 0.52), *seeds("B", "x", 0.4, 0.41, 0.42), *bound, bounds=frozenset({"Centralized"})
    )
    assert "| A | **51.0 ± 1.0** |" in markdown(filled)
    assert "| Centralized | 99.0 ± 0.0 |" in markdown(filled)
    assert "\\midrule\nCentralized & 99.0" in latex(filled, "t")
    assert not [line for line in markdown(filled).splitlines() if "Centralized" in line and "[" in line]


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
    assert "| B | 50.0 ± 0.0 |" in shown
    assert "| C | failed | failed |" in shown
    assert "| D | - | - |" in shown
    assert "Failed: C, x, seed 1: client 3 in round 2 diverged" in shown


def test_a_row_that_failed_hinders_no_other_and_one_that_is_not_done_does() -> None:
    done = [*seeds("A", "x", 0.90, 0.91, 0.92), *seeds("B", "x", 0.5, 0.51, 0.52)]
    failed = table(*done, *seeds("C", "x", 0.95, 0.96), result("C", "x", 2, None, "failed"))
    waiting = table(*done, result("C", "x", 0, 0.1), *(result("C", "x", seed, None, "missing") for seed in (1, 2)))
    assert "| A | **91.0 ± 1.0** |" in markdown(failed)
    assert "**" not in markdown(waiting)


def test_what_runs_warned_of_is_told_once_with_the_run_and_not_where_the_caption_says_it() -> None:
    few, stopped = "2 of 10 clients released no synthetic records", "privacy budget spent after 3 rounds (epsilon 8)"
    runs = [replace(one, warnings=(few, "A caption")) for one in seeds("DA-FL", "x", 0.5, 0.6, 0.7)]
    failed = replace(result("C", "x", 0, None, "failed"), warnings=("it has an error to tell",))
    told = notes(table(*runs, replace(result("B", "x", 0, 0.5), warnings=(stopped, few)), failed))
    assert told[-3:-1] == [
        f"Warnings: DA-FL, x, seed 0 and 3 other runs: {few}.", f"B, x, seed 0: {stopped}.",
    ]  # fmt: skip
    assert told[-1].startswith("Failed: C, x, seed 0")
    assert told.count("A caption.") == 1
    assert not [line for line in told if (line.endswith("A caption.") and line != "A caption.") or "to tell" in line]


def test_of_many_different_remarks_the_commonest_are_told_and_the_others_counted() -> None:
    runs = [
        replace(one, warnings=(f"stopped after {one.seed}", *(["common"] * (one.seed > 3))))
        for one in seeds("A", "x", *[0.5] * 12)
    ]
    told = [line for line in notes(table(*runs)) if "A, x" in line or "more" in line]
    assert told[0] == "Warnings: A, x, seed 4 and 7 other runs: common."
    assert len(told) == 9
    assert told[-1] == "5 more warnings: see warnings and stopped in result.json of the runs."


POOL = PrivacyStatement(
    unit="record", epsilon=9.5, delta=1e-5, covers="the pool alone", does_not_cover="The main task is NOT private."
)


def with_releases(row: str, seed: int, *statements: PrivacyStatement) -> SeedResult:
    return SeedResult(row, "x", seed, "finished", f"cells/{row}", 0.5, 0.5, statements=statements)


def test_methods_without_a_guarantee_are_named() -> None:
    private = with_releases("DP", 0, POOL)
    assert "No privacy guarantee: FedAvg." in markdown(table(result("FedAvg", "x", 0, 0.5), private))
    assert "No privacy guarantee: all methods." in markdown(table(result("FedAvg", "x", 0, 0.5)))
    assert "No privacy guarantee" not in markdown(table(private))


def test_a_guarantee_is_told_with_unit_delta_the_largest_epsilon_of_the_row_and_its_limits() -> None:
    larger, other = POOL.model_copy(update={"epsilon": 9.87654}), POOL.model_copy(update={"epsilon": 1.0})
    client = PrivacyStatement(
        unit="client", epsilon=3.0, delta=1e-4, covers="all updates", does_not_cover="The server."
    )
    told = notes(
        table(with_releases("A", 0, POOL), with_releases("A", 1, larger), with_releases("B", 0, other, client))
    )
    change = "(adding or removing one)"
    record, client = f"of a record {change}, delta 1e-05", f"of a client {change}, delta 0.0001"
    each = "Privacy of each single run (terms: docs/privacy.md)"
    assert told[2:] == [
        f"{each}, {record}: A epsilon 9.88, B epsilon 1; {client}: B epsilon 3.",
        "Covered: [A (record), B (record)] the pool alone. [B (client)] all updates.",
        "Not covered: [A (record), B (record)] The main task is NOT private. [B (client)] The server.",
        "The privacy cost of all runs together is stated once the table is complete.",
    ]


def test_a_sentence_that_several_rows_share_is_said_once_and_others_with_their_rows() -> None:
    noisy = POOL.model_copy(update={"does_not_cover": "The main task is NOT private. Steps are public."})
    told = notes(table(with_releases("A", 0, POOL), with_releases("B", 0, noisy), with_releases("C", 0, POOL)))
    assert "Covered: the pool alone." in told
    assert "Not covered: The main task is NOT private. [B (record)] Steps are public." in told


def test_the_adjacency_of_a_guarantee_is_told() -> None:
    other = POOL.model_copy(update={"adjacency": "replace-one"})
    line = notes(table(with_releases("A", 0, POOL), with_releases("B", 0, other)))[2]
    assert "of a record (adding or removing one), delta 1e-05: A epsilon 9.5" in line
    assert "of a record (replacing one), delta 1e-05: B epsilon 9.5" in line


def test_many_rows_without_a_guarantee_are_all_others_once_every_row_is_done() -> None:
    rows = [with_releases(str(number), 0) for number in range(5)]
    assert notes(table(with_releases("A", 0, POOL), *rows))[-2] == "No privacy guarantee: all other methods."
    waiting = table(with_releases("A", 0, POOL), *rows, result("W", "x", 0, None, "missing"))
    assert notes(waiting)[-2] == "No privacy guarantee: 0, 1, 2, 3, 4."


def test_the_bill_of_all_runs_is_told_and_kept_for_programs() -> None:
    bill = {"unit": "record", "epsilon": 19.0, "in_words": "Privacy of all 2 runs together: epsilon 19."}
    done = replace(table(with_releases("A", 0, POOL), with_releases("A", 1, POOL)), bill=(bill,))
    assert notes(done)[-1] == bill["in_words"]
    assert "Privacy of all 2 runs together: epsilon 19." in markdown(done)
    assert r"Privacy of all 2 runs together: $\varepsilon=19$." in latex(done, "t")
    assert as_json(done)["bill"] == [bill]
    assert as_json(table(with_releases("A", 0, POOL)))["bill"] is None


def test_a_figure_is_never_rounded_down_and_zero_is_zero() -> None:
    for epsilon, shown in ((0.0, "0"), (3.121, "3.13"), (0.0001234, "0.000124"), (1e-300, "1e-300")):
        release = POOL.model_copy(update={"epsilon": epsilon})
        assert release.in_short == f"epsilon {shown} per record"
        assert f"A epsilon {shown}." in notes(table(with_releases("A", 0, release)))[1]
    assert POOL.model_copy(update={"epsilon": 0.0}).promise.startswith("Per record: (0, 1e-05)-differential privacy")


def test_noise_free_releases_are_no_guarantee() -> None:
    noiseless, nothing = (POOL.model_copy(update={"epsilon": epsilon}) for epsilon in (None, None))
    rows = (with_releases("A", 0, noiseless), with_releases("B", 0, nothing), with_releases("B", 1, POOL))
    told = notes(replace(table(*rows, with_releases("C", 0, POOL)), bill=()))
    assert told[-1] == "No privacy guarantee: A, B (in some runs)."
    cells = as_json(table(*rows))["cells"]
    assert [cell["guarantee"] for cell in cells] == [False, False]
    assert notes(table(*rows[:2]))[2:] == ["No privacy guarantee: all methods."]


def test_markdown_escapes_the_bar() -> None:
    assert "| a\\|b |" in markdown(table(result("a|b", "x", 0, 0.5)))


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


def test_json_tells_its_version_differences_and_measures_but_no_times_so_that_a_rerun_gives_the_same_file() -> None:
    rows = [*seeds("A", "x", 0.80, 0.70, 0.90), *seeds("B", "x", 0.750, 0.649, 0.851)]
    timed = [replace(one, measures={"macro_f1_percent": 50.0, "seconds.total": 1.25}) for one in rows]
    content = as_json(table(*timed))
    assert (content["version"], content["unit"]) == (2, "percent")
    first, second = content["cells"]
    assert first["difference"] is None
    found = {name: round(value, 3) if name in {"mean", "low", "high"} else value
             for name, value in second["difference"].items()}  # fmt: skip
    assert found == {"to": "A", "seeds": 3, "mean": -5.0, "low": -5.248, "high": -4.752, "method": "t"}
    assert first["measures"] == {"macro_f1_percent": [50.0, 50.0, 50.0]}


def test_all_four_files_are_written(tmp_path: Path) -> None:
    filled = table(result("A", "x", 0, 0.5))
    write_table(tmp_path, filled)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "table.json", "table.md", "table.tex"]
    assert json.loads((tmp_path / "table.json").read_text()) == as_json(filled)
    assert (tmp_path / "table.md").read_text() == markdown(filled) + "\n"


def reaching(row: str, seed: int, **reached: tuple[int, int]) -> SeedResult:
    taken = {
        f"reached.{accuracy.removeprefix('at_')}.{what}": value
        for accuracy, both in reached.items()
        for what, value in zip(("round", "bytes"), both, strict=True)
    }
    return replace(result(row, "x", seed, 0.9), measures=taken)


def test_what_a_target_took_is_told_for_the_highest_that_all_runs_of_a_row_reached() -> None:
    fast = [reaching("A", 0, at_80=(3, 10**6), at_90=(5, 2 * 10**6)), reaching("A", 1, at_80=(4, 10**6))]
    half = [reaching("B", 0, at_80=(10, 1_234_567)), reaching("B", 1)]
    bound = [reaching("C", seed, at_80=(1, 1), at_90=(1, 1), at_95=(2, 1)) for seed in (0, 1)]
    filled = table(*fast, *half, *[replace(one, row="None") for one in (half[1], half[1])], *bound,
                   bounds=frozenset({"C"}))  # fmt: skip
    for text in (markdown(filled), latex_further(filled, "t").replace(" & ", " | ").replace(" \\\\", " |")):
        assert "Rounds to a test accuracy, and MB from and to all clients until then" in text
        assert "x, 80 " in text
        assert "A | 3.5, 1 MB |" in text
        assert "B | 10, 1.23 MB (1 of 2) |" in text
        assert "None | - (0 of 2) |" in text
    assert "Rounds to a test accuracy" not in markdown(table(result("A", "x", 0, 0.5)))


def test_the_target_of_a_column_is_the_highest_of_several_that_a_row_reached() -> None:
    both = [reaching("A", seed, at_50=(1, 10**6), at_60=(2, 2 * 10**6), at_90=(4, 4 * 10**6)) for seed in (0, 1)]
    some = [reaching("B", 0, at_50=(1, 10**6)), reaching("B", 1, at_50=(1, 10**6))]
    shown = markdown(table(*both, *some))
    assert "| A | 4.0, 4 MB |" in shown
    assert "| B | - (0 of 2) |" in shown


def test_further_measures_have_a_table_each_with_mean_and_deviation_and_a_dash_where_a_run_has_none() -> None:
    scores = [replace(result("A", "x", seed, 0.9), measures={"macro_f1_percent": 80.0 + seed}) for seed in (0, 2)]
    private = [result("B", "x", seed, 0.9) for seed in (0, 2)]
    shown = markdown(table(*scores, *private))
    _, _, below = shown.partition("Macro-F1 after the last round, in percent:")
    assert "| A | 81.0 ± 1.4 |" in below
    assert "| B | - |" in below
    assert "Balanced accuracy" not in shown


def test_fewer_than_ten_rounds_have_no_last_ten() -> None:
    name = "accuracy_of_last_ten_percent"
    five, twenty = (
        replace(result(row, "x", 0, 0.9), measures={name: 80.0, "rounds_done": rounds})
        for row, rounds in (("A", 5), ("B", 20))
    )
    assert further(table(five)) == []
    (grid,) = further(table(five, twenty))
    assert list(grid.rows) == [("A", ["-"]), ("B", ["80.0"])]


def test_rows_are_shown_by_their_labels_and_keep_their_names_for_programs() -> None:
    rows = [*seeds("A (b=1)", "x", 0.80, 0.70, 0.90), *seeds("B", "x", 0.750, 0.649, 0.851)]
    failed = replace(result("A (b=1)", "x", 3, None, "failed"), warnings=())
    named = replace(table(*rows, failed), labels={"A (b=1)": "A"})
    assert "(b=1)" not in markdown(named) + latex(named, "t") + latex_further(named, "t")
    assert "Failed: A, x, seed 3" in markdown(named)
    content = as_json(named)
    assert (content["rows"], content["labels"]) == (["A (b=1)", "B"], {"A (b=1)": "A", "B": "B"})
    assert {cell["row"] for cell in content["cells"]} == {"A (b=1)", "B"}
    assert {(line["row"], line["label"]) for line in run_lines(named)} == {("A (b=1)", "A"), ("B", "B")}


def test_differences_are_to_the_reference_where_the_user_gave_one() -> None:
    rows = [*seeds("A", "x", 0.80, 0.70, 0.90), *seeds("B", "x", 0.750, 0.649, 0.851)]
    chosen = replace(table(*rows), reference="B", labels={"B": "Base"})
    shown = markdown(chosen)
    assert "Difference to Base after the last round, in points, and its 95 % interval:" in shown
    assert "| A | +5.0 [+4.8, +5.2] |" in shown
    assert "| Base | reference |" in shown
    assert "| A | **80.0 ± 10.0** |" in shown  # bold is still the highest mean
    assert [(cell["difference"] or {}).get("to") for cell in as_json(chosen)["cells"]] == ["B", None]


def run(row: str, column: str, seed: int, **measures: float) -> SeedResult:
    place = (row, column, seed, "finished", f"cells/{row}{column}{seed}")
    return SeedResult(*place, 0.5, 0.6, measures={name.replace("__", "."): value for name, value in measures.items()})


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
