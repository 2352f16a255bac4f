"""Tidy CSV: a line a run, a line a run and round, a column a number, units in the names."""

import csv
import io
import json
from dataclasses import replace

from fl_sim.report.measures import flat_settings, measures, of_round
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_json import as_json
from fl_sim.report.tidy import csv_text, rounds_text
from fl_sim.store.run_directory import RoundRecord

RESULT = {
    "status": "finished", "final_accuracy": 0.5, "best_accuracy": 0.75, "seed": 3, "clients": 10, "rounds": 2,
    "is_private": False, "privacy": [
        {"unit": "record", "epsilon": 2.0, "delta": 1e-5, "epsilon_whole_run": 2.5, "delta_whole_run": 2e-5},
        {"unit": "client", "epsilon": None},
        {"unit": "record", "epsilon": 1.0, "delta": 0.0, "epsilon_whole_run": 2.5, "delta_whole_run": 2e-5},
    ],
    "preprocess": {"kind": "da-fl", "clients": [{"counts": [1]}]}, "seconds": {"train": 1.5, "total": 2.0},
    "measures": {"macro_f1": 0.25, "bytes_up": 1000, "recall": [0.5, 1.0], "per_client": {"accuracy": 0.125}},
}  # fmt: skip
SETTINGS = {"data": "digits", "partition": {"kind": "label-k", "k": 1}, "seed": 3, "rounds": 2, "gammas": [0.1, 0.2]}


def finished(column: str = "x") -> SeedResult:
    place = ("A", column, 3, "finished", "cells/a")
    return SeedResult(*place, 0.5, 0.75, settings=flat_settings(SETTINGS), measures=measures(RESULT))


def table(*results: SeedResult) -> Table:
    rows, columns = (tuple(dict.fromkeys(getattr(one, name) for one in results)) for name in ("row", "column"))
    return Table(rows, columns, frozenset(), results)


def test_every_number_of_a_result_has_a_dotted_name_and_a_share_is_in_percent_by_its_name() -> None:
    assert measures(RESULT) == {
        "rounds_done": 2, "final_accuracy_percent": 50.0, "best_accuracy_percent": 75.0, "seconds.train": 1.5,
        "seconds.total": 2.0, "macro_f1_percent": 25.0, "bytes_up": 1000, "per_client.accuracy_percent": 12.5,
        "epsilon.record": 2.5, "delta.record": 2e-5, "epsilon.record.1": 2.0, "delta.record.1": 1e-5,
        "epsilon.record.2": 1.0, "delta.record.2": 0.0,
    }  # fmt: skip


def test_where_nobody_says_what_several_releases_cost_a_record_together_none_of_them_is_told_as_that() -> None:
    earlier = {"privacy": [{"unit": "record", "epsilon": epsilon, "delta": 1e-5} for epsilon in (1.0, 2.0)]}
    assert measures(earlier) == {
        "epsilon.record.1": 1.0, "delta.record.1": 1e-5, "epsilon.record.2": 2.0, "delta.record.2": 1e-5,
    }  # fmt: skip
    assert measures({"privacy": earlier["privacy"][:1]}) == {"epsilon.record": 1.0, "delta.record": 1e-5}


def test_a_centralized_run_of_an_earlier_version_tells_nothing_of_clients() -> None:
    beside = {"client_accuracy": 0.5, "client_worst_tenth": 0.5, "macro_f1": 0.25}
    found = measures({"partition": "centralized", "final_accuracy": 0.5, "measures": beside})
    assert found == {"final_accuracy_percent": 50.0, "macro_f1_percent": 25.0}
    assert "client_worst_tenth_percent" in measures({"partition": "label-2", "measures": beside})


def test_a_line_a_run_with_a_column_for_every_setting_and_measure() -> None:
    failed = SeedResult("B", "x", 3, "failed", "cells/b", error="it diverged", settings={"data": "mnist"})
    lines = list(csv.DictReader(io.StringIO(csv_text(table(finished(), failed)))))
    first, second = lines
    assert list(first)[:8] == ["row", "column", "seed", "status", "data", "partition.kind", "partition.k", "rounds"]
    assert (first["partition.kind"], first["partition.k"], first["gammas"]) == ("label-k", "1", "[0.1, 0.2]")
    assert (first["final_accuracy_percent"], first["bytes_up"], first["epsilon.record"]) == ("50.0", "1000", "2.5")
    assert (second["status"], second["error"], second["data"]) == ("failed", "it diverged", "mnist")
    assert second["final_accuracy_percent"] == ""


def test_csv_and_json_have_the_same_numbers_under_the_same_names() -> None:
    (line,) = csv.DictReader(io.StringIO(csv_text(table(finished()))))
    (cell,) = as_json(table(finished()))["cells"]
    assert cell["values"] == [float(line["final_accuracy_percent"])]
    assert cell["best_values"] == [float(line["best_accuracy_percent"])]
    for name, (value,) in cell["measures"].items():
        assert float(line[name]) == value
    assert {name for name in line if name.startswith("seconds")} == {"seconds.train", "seconds.total"}
    assert json.loads(json.dumps(cell)) == cell


def test_a_run_in_several_columns_is_one_line() -> None:
    (line,) = csv.DictReader(io.StringIO(csv_text(table(finished(), finished("y")))))
    assert line["column"] == "x; y"


def test_rounds_have_a_line_each_and_what_is_not_measured_is_empty() -> None:
    record = RoundRecord(1, 0.5, 1.25, None, None, 10, 0.1, 0.5)
    rounds = {"cells/a": [record, replace(record, round=2, test_accuracy=None, test_loss=None, train_loss=0.75)]}
    first, second = csv.DictReader(io.StringIO(rounds_text(table(finished()), rounds)))
    assert (first["row"], first["column"], first["seed"], first["round"], first["dir"]) == (
        "A",
        "x",
        "3",
        "1",
        "cells/a",
    )
    assert (first["test_accuracy_percent"], first["test_loss"], first["train_loss"]) == ("50.0", "1.25", "")
    assert (second["round"], second["test_accuracy_percent"], second["train_loss"]) == ("2", "", "0.75")
    assert of_round(record)["test_accuracy_percent"] == 50.0


def test_texts_of_users_are_no_formulas_and_numbers_stay_numbers() -> None:
    settings = {**flat_settings(SETTINGS), "=name": "@x", "low": -0.5}
    one = SeedResult("=HYPERLINK(1)", "+x", 3, "failed", "-dir", None, None, error="@error", settings=settings)
    head, line = csv.reader(io.StringIO(csv_text(table(one))))
    cells = dict(zip(head, line, strict=True))
    assert (cells["row"], cells["column"], cells["dir"], cells["error"]) == (
        "'=HYPERLINK(1)",
        "'+x",
        "'-dir",
        "'@error",
    )
    assert (cells["'=name"], cells["low"]) == ("'@x", "-0.5")
    record = RoundRecord(1, None, None, None, cohort=None, epsilon=None, learning_rate=0.1, seconds=None)
    head, line = csv.reader(io.StringIO(rounds_text(table(one), {"-dir": [record]})))
    assert dict(zip(head, line, strict=True))["row"] == "'=HYPERLINK(1)"
