"""Heat maps: a table of four small runs draws one for each column, and a map says what its numbers leave out."""

import re
from dataclasses import replace

import pytest

from fl_sim.errors import UserError
from fl_sim.report.captions import notes
from fl_sim.report.figures.heat_map import draw, draw_heat_maps
from fl_sim.report.files import PrivacyStatement
from fl_sim.report.heat_map import HeatMap
from fl_sim.report.page_sections import table_section
from fl_sim.report.picture import PAGE, WIDE_PAGE
from fl_sim.report.runs import read_json_table
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import markdown, write_table
from fl_sim.tables.filling import TableState, fill
from fl_sim.tables.plan import plan_table, table_settings

GIVEN = {
    "centralized": False,
    "base": {"model": "logistic", "rounds": 1, "clients": 5, "partition": "iid"},
    "grid": {
        "algorithm": [{"label": "Mean", "aggregator": "mean"}, {"label": "Median", "aggregator": "median"}],
        "attack": ["none", "sign-flip:1"],
    },
    "heat_map": {"rows": "algorithm", "columns": "attack"},
}


def texts(figure):
    return [one.get_text() for one in figure.axes[0].texts]


def test_a_table_of_four_runs_draws_its_means_at_the_places_of_its_axes(tmp_path):
    settings = table_settings(GIVEN, ["seed=0"], "it")
    state = TableState(settings, plan_table(settings))
    fill(state, tmp_path, 1, None, progress=False)
    (picture,) = draw_heat_maps([read_json_table(tmp_path)])
    assert picture.png.startswith(b"\x89PNG")
    assert picture.name == "heat-map-digits-iid.png"
    figure = picture.draw(PAGE)
    axes = figure.axes[0]
    assert [one.get_text() for one in axes.get_yticklabels()] == ["Mean", "Median"]
    assert [one.get_text() for one in axes.get_xticklabels()] == ["none", "sign-flip:1"]
    table = state.table()
    assert texts(figure) == [f"{table.at(row, 'digits iid')[0].accuracy('last'):.1f}" for row in table.rows]
    assert table.rows[1] == "Mean, attack=sign-flip:1"
    numbers = texts(figure)
    shown = (tmp_path / "table.md").read_text()
    assert shown.startswith(
        "Test accuracy after the last round, in percent, digits iid:\n\n| algorithm / attack | none |"
    )
    assert f"| Mean | {numbers[0]} | {numbers[1]} |\n| Median | {numbers[2]} | {numbers[3]} |" in shown
    assert "attack=sign-flip:1 |" not in shown
    assert f"Median & {numbers[2]} & {numbers[3]}" in (tmp_path / "table.tex").read_text()
    assert f"<td>Median</td>{''.join(f'<td class=n>{one}</td>' for one in numbers[2:])}" in re.sub(
        '"', "", table_section(tmp_path, table)
    )


def test_a_caption_names_a_line_of_the_map_in_place_of_all_its_rows():
    caption = plan_table(table_settings(GIVEN, ["seed=0", "partition=iid,label-2"], "it")).caption
    assert "aggregator mean (median for Median), attack none (sign-flip:1 by 1 of them for sign-flip:1)" in caption[2]
    assert "Methods: Mean: FedAvg, aggregator=mean; Median: FedAvg, aggregator=median." in caption
    private, bare = (PrivacyStatement(unit="client", epsilon=one, delta=1e-5) for one in (1.0, None))
    places = {("A", "x"): "A, attack=x", ("A", "y"): "A, attack=y", ("B", "x"): "B, attack=x"}
    one = HeatMap("c", "c", "algorithm", "attack", ("A", "B"), ("x", "y"), places)
    results = [
        SeedResult(row, "c", 0, "finished", "d", 0.5, 0.5, statements=(bare if row[0] == "B" else private,))
        for row in places.values()
    ]
    lines = notes(Table(tuple(places.values()), ("c",), frozenset(), tuple(results), heat_maps=(one,)))
    failed = Table(
        tuple(places.values()), ("c",), frozenset(), (replace(results[0], status="failed"),), heat_maps=(one,)
    )
    assert "| A | failed | - |\n| B | - | - |" in markdown(failed)
    assert any("delta 1e-05: A epsilon 1." in line for line in lines)
    assert "No privacy guarantee: B." in lines


def test_other_axes_of_the_grid_have_maps_of_their_own_and_unknown_ones_are_refused():
    grid = {**GIVEN["grid"], "local.epochs": [1, 2]}
    plan = plan_table(table_settings({**GIVEN, "grid": grid}, ["partition=iid,label-2"], "it"))
    assert [one.title for one in plan.heat_maps] == [
        f"digits {split}, local.epochs={epochs}" for split in ("iid", "2-Label") for epochs in (1, 2)
    ]
    with pytest.raises(UserError, match=r"heat_map.columns = 'atack': .*attack.*settings are algorithm, attack"):
        plan_table(table_settings({**GIVEN, "heat_map": {"rows": "algorithm", "columns": "atack"}}, [], "it"))
    with pytest.raises(UserError, match="rows and columns are both attack"):
        table_settings({**GIVEN, "heat_map": {"rows": "attack", "columns": "attack"}}, [], "it")


def test_missing_seeds_are_marked_and_narrow_maps_have_colours_alone(tmp_path):
    names = [[f"r{row}, attack={column}" for column in range(13)] for row in range(18)]
    results = [
        SeedResult(name, "c", seed, "failed" if seed and not row else "finished", "d", 0.5, 0.5)
        for row, line in enumerate(names) for name in line[1:] for seed in (0, 1)
    ]  # fmt: skip
    labels = tuple(f"a long name of row {row}" for row in range(18)), tuple(f"attack {one}" for one in range(13))
    places = {(labels[0][row], labels[1][at]): name for row, line in enumerate(names) for at, name in enumerate(line)}
    one = HeatMap("data", "c", "rows", "columns", *labels, places)
    table = Table(tuple(places.values()), ("c",), frozenset(), tuple(results), heat_maps=(one,))
    (picture,) = draw_heat_maps([table])
    assert texts(draw(table, one, WIDE_PAGE))[:13] == ["-", *["50.0*"] * 12]
    assert any("part of these seeds" in line for line in picture.caption)
    assert texts(draw(table, one, replace(PAGE, width=3.3))) == []
    write_table(tmp_path, table)
    assert read_json_table(tmp_path).heat_maps == (one,)
