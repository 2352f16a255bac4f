"""Tables of runs with own models: measures and titles come from the stage, and stay in the table's own files."""

import csv
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fl_sim
from clients.evaluate import OwnAnswer
from fl_sim.cli.report import write_report
from fl_sim.report.measures import measures
from fl_sim.stages.own_measures import TITLES, OwnMeasures, worse_than_alone
from fl_sim.tables.filling import TableState
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.tables.workers import Finished

PLAN: dict[str, Any] = {
    "measure": "personal.own_mean_macro_f1", "centralized": False,
    "base": {
        "data": "digits", "model": "mlp", "clients": 4, "rounds": 2, "partition": "label-2",
        "local": {"learning_rate": 0.1}, "evaluate": {"clients": "class-shares"}, "engine": "inprocess",
    },
    "grid": {"algorithm": ["local-only", "fedavg", "fedper"]},
}  # fmt: skip
BY_SOURCE = "personal.by_source.*.own_accuracy_percent"
WORSE = TITLES["personal.own_worse_than_alone_percent"]


def test_clients_that_are_worse_off_than_alone_are_counted_where_both_runs_tested_them() -> None:
    alone = {"personal": {"by_client": {"own": [0.5, 0.6, None, 0.8], "received": [0.1] * 4}}}
    other = {"personal": {"by_client": {"own": [0.4, 0.6, 0.1, 0.9], "received": [None, 0.5, 0.5, 0.5]}}}
    assert worse_than_alone(alone, other) == {
        "personal.own_worse_than_alone_percent": pytest.approx(100 / 3),
        "personal.received_worse_than_alone_percent": 100.0,
    }
    assert worse_than_alone({}, other) == worse_than_alone(alone, {}) == {}


def test_the_accuracy_of_a_source_is_the_mean_of_its_clients() -> None:
    counts = [np.array([[10], [10], [right]]) for right in (5, 7, 9, 1)]
    answers = [*(OwnAnswer({"own/test": one}) for one in counts), OwnAnswer({}), OwnAnswer({})]
    found = OwnMeasures(answers, np.arange(6)).by_source(["south", "north", "south", "", "south", "east"])
    assert found == {"south": {"own_accuracy": pytest.approx(0.7)}, "north": {"own_accuracy": 0.7}}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("table")
    fl_sim.table(PLAN, out=out, jobs=1, progress=False)
    return out


def test_a_table_shows_a_measure_by_its_name_and_the_others_of_the_stage_by_their_titles(table: Path) -> None:
    shown, content = (table / "table.md").read_text(), json.loads((table / "table.json").read_text())
    assert f"Measure: {TITLES['personal.own_mean_macro_f1_percent']}" in shown
    assert f"{TITLES['personal.own_balanced_accuracy_percent']}:" in shown
    assert f"{WORSE}:" in shown
    _, _, of_classes = shown.partition(f"{TITLES['personal.by_class.*.own_recall_percent']}:")
    assert of_classes.strip().startswith("| Method | 0 | 1 |")
    assert WORSE in (table / "table-further.tex").read_text()
    assert content["titles"] == TITLES
    assert [one.startswith("Local") for one in content["alone"]] == [True]
    cells = {cell["row"]: cell for cell in content["cells"]}
    result = json.loads((table / cells["FedPer"]["dir"][0] / "result.json").read_text())
    assert cells["FedPer"]["values"] == pytest.approx([100 * result["personal"]["own_mean_macro_f1"]])
    assert cells["FedPer"]["best_values"] == pytest.approx([100 * result["personal"]["best_own_mean_macro_f1"]])
    assert "personal.own_worse_than_alone_percent" not in cells[content["alone"][0]]["measures"]


def test_the_page_of_a_table_has_the_same_further_tables_and_that_of_an_older_one_too(
    table: Path, tmp_path: Path
) -> None:
    write_report([table], tmp_path / "new", paper=False, pictures=False, target=None, json_output=False)
    page = (tmp_path / "new" / "report.html").read_text()
    assert f"<summary>{WORSE}</summary>" in page
    assert (
        f"<summary>{TITLES['personal.own_mean_macro_f1_percent']}</summary>" not in page
    )  # it is the table's own measure
    assert "Clients, compared with training alone" in page
    assert (tmp_path / "new" / "clients-digits-2-label.png").exists()
    content = (table / "table.json").read_text()
    older = {name: value for name, value in json.loads(content).items() if name not in {"titles", "alone"}}
    (table / "table.json").write_text(json.dumps(older))
    write_report([table], tmp_path / "old", paper=False, pictures=False, target=None, json_output=False)
    (table / "table.json").write_text(content)
    assert f"<summary>{WORSE}</summary>" in (tmp_path / "old" / "report.html").read_text()


def test_a_table_has_a_column_for_each_source_with_a_name(tmp_path: Path) -> None:
    coins, names = np.random.default_rng(0), np.array(["west", "east | coast", "north"])
    parts = {"train": 60, "test": 30}
    arrays = {f"x_{part}": coins.normal(size=(count, 4)).astype(np.float32) for part, count in parts.items()}
    arrays |= {f"y_{part}": np.arange(count) % 2 for part, count in parts.items()}
    arrays |= {f"client_{part}": names[np.arange(count) % 3] for part, count in parts.items()}
    np.savez(tmp_path / "domains.npz", **arrays)
    base = PLAN["base"] | {
        "data": f"npz:{tmp_path / 'domains.npz'}", "partition": "natural", "clients": 3,
        "evaluate": {"clients": "own"},
    }  # fmt: skip
    grid = {"algorithm": ["local-only", "fedavg"], "seed": [0, 1]}
    fl_sim.table({**PLAN, "base": base, "grid": grid}, out=tmp_path / "t", jobs=1, progress=False)
    _, _, below = (tmp_path / "t" / "table.md").read_text().partition(f"{TITLES[BY_SOURCE]}:")
    head, _, first, second, *_ = below.strip().splitlines()
    assert head == r"| Method | east \| coast | north | west |"
    runs = [path.parent for path in sorted((tmp_path / "t" / "cells").glob("fedavg*/result.json"))]
    rows = [list(csv.DictReader((run / "clients.csv").read_text().splitlines())) for run in runs]
    means = [100 * sum(float(row[client]["own_accuracy"]) for row in rows) / 2 for client in range(3)]
    assert [float(cell.split("±")[0]) for cell in second.split("|")[2:5]] == pytest.approx(means, abs=0.05)
    assert first.startswith("| Local")
    write_report([tmp_path / "t"], tmp_path / "r", paper=False, pictures=False, target=None, json_output=False)
    assert f"<summary>{escape(TITLES[BY_SOURCE])}</summary>" in (tmp_path / "r" / "report.html").read_text()


def test_a_metric_of_ones_own_that_is_named_as_a_share_is_one() -> None:
    found = measures({"personal": {"own_top3_accuracy": 0.5, "own_margin": 0.5}})
    assert found == {"personal.own_top3_accuracy_percent": 50.0, "personal.own_margin": 0.5}


def test_a_table_says_which_runs_have_no_share_of_the_name(table: Path) -> None:
    settings = TableSettings.model_validate({**PLAN, "measure": "personal.own_acuracy", "centralized": True})
    state = TableState(settings, plan_table(settings))
    for name, experiment in state.plan.runs.items():
        if (path := table / "cells" / name / "result.json").exists():
            state.outcomes[name] = Finished(name, json.loads(path.read_text()))
        else:
            assert experiment.is_central
    assert len(state.outcomes) == 3
    warned = [one.row for one in state.table().results if "the run has no measure personal.own_acuracy" in one.warnings]
    assert len(warned) == 3
