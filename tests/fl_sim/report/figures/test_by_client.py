"""Figures of clients: which clients are paired, who is below the line, and that many rows stay legible."""

import json
from dataclasses import replace

import pytest

from fl_sim.report.figures.by_client import ClientFigure, ClientPanel, client_figures, draw_clients
from fl_sim.report.picture import PAPER, for_papers
from fl_sim.report.runs import find
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import write_table

LIST = "mine.by_client.own"
SHARE = "accuracy of the client's own model"


@pytest.fixture
def tabled(write_experiment, tmp_path):
    """Write a table whose runs have these lists of shares, {(row, seed): shares}, and read it back."""

    def write(lists, *, is_private=False, alone=("Alone",), columns=("digits 1-Label",), titles=None):
        results = []
        for column in columns:
            for (row, seed), shares in lists.items():
                name = f"cells/{column}-{row}-{seed}".replace(" ", "-")
                path = write_experiment(f"t/{name}", seed=seed, clients=len(lists) + len(row), note="scans")
                result = json.loads((path / "result.json").read_text())
                own = {"mine": {"by_client": {"own": shares}}, "is_private": is_private}
                (path / "result.json").write_text(json.dumps(result | own))
                results.append(SeedResult(row, column, seed, "finished", name, 0.5, 0.5))
        rows = tuple(dict.fromkeys(row for row, _ in lists))
        table = Table(rows, columns, frozenset(), tuple(results), alone=frozenset(alone),
                      titles={LIST: SHARE} if titles is None else titles)  # fmt: skip
        write_table(tmp_path / "t", table)
        return find([tmp_path / "t"])

    return write


def test_each_client_is_paired_with_itself_alone_on_the_same_seed(tabled) -> None:
    found = tabled({
        ("Alone", 0): [0.5, 0.6, None], ("Alone", 1): [0.25, 0.75, 1.0], ("A", 0): [0.4, 0.6, 0.9],
        ("A", 1): [0.5, None, 0.5], ("B", 1): [1, 1, 1], ("C", 2): [0.1, 0.1, 0.1],
    })  # fmt: skip
    (figure,) = client_figures(found)
    assert (figure.where, figure.share, figure.notes) == ("digits 1-Label", SHARE, ("digits: scans",))
    first, second = figure.panels  # C has no seed together with training alone
    assert (first.label, first.pairs) == ("A", ((50, 40), (60, 60), (25, 50), (100, 50)))
    assert first.below == 50
    assert (second.label, second.below) == ("B", 0)


def test_a_column_has_a_figure_of_its_own_and_many_rows_have_several(tabled) -> None:
    rows = {(f"M{number}", 0): [0.5, 0.1] for number in range(21)}
    found = tabled({("Alone", 0): [0.2, 0.3], **rows}, columns=("digits 1-Label", "digits Dir(0.1)"))
    figures = client_figures(found)
    assert [(one.where, len(one.panels)) for one in figures] == [
        ("digits 1-Label", 20), ("digits 1-Label", 1), ("digits Dir(0.1)", 20), ("digits Dir(0.1)", 1),
    ]  # fmt: skip
    names = [picture.name for picture in draw_clients(figures[1::2])]
    assert names == ["clients-digits-1-label.png", "clients-digits-dir-0.1.png"]


@pytest.mark.parametrize(
    ("lists", "changes"),
    [
        ({("Alone", 0): [0.5], ("A", 0): [0.5]}, {"is_private": True}),
        ({("Alone", 0): [0.5], ("A", 0): [0.5]}, {"alone": ()}),
        ({("Alone", 0): [0.5], ("A", 0): [0.5]}, {"titles": {"mine.other_percent": "Other"}}),
        ({("Alone", 0): [0.5], ("A", 0): [1.5]}, {}),
        ({("Alone", 0): [0.5], ("A", 0): ["half"]}, {}),
        ({("Alone", 0): [0.5], ("A", 0): [True]}, {}),
        ({("Alone", 0): "half", ("A", 0): {"0": 0.5}}, {}),
    ],
)
def test_there_is_no_figure_without_a_row_alone_a_title_and_shares_that_may_be_shown(tabled, lists, changes) -> None:
    assert client_figures(tabled(lists, **changes)) == []


def test_sixteen_rows_with_many_clients_stay_legible_on_paper(readable) -> None:
    pairs = tuple((float(number % 101), float(37 * number % 101)) for number in range(900))
    panels = tuple(ClientPanel(f"Method {number} (with a setting)", pairs) for number in range(16))
    (picture,) = draw_clients([ClientFigure(SHARE, "digits Dir(0.1)", panels)])
    readable(picture)
    assert len(for_papers(picture)) == 2 * len(PAPER)
    assert "worse than the model without federation" in picture.caption[0]


def test_a_panel_has_the_share_below_the_line_and_both_axes_have_the_same_range() -> None:
    figure = ClientFigure(SHARE, "digits IID", (ClientPanel("A", ((80.0, 90.0), (82.0, 81.0), (99.0, 99.0))),))
    (picture,) = draw_clients([figure])
    assert picture.draw is not None
    drawn = picture.draw(PAPER[1])
    (axes,) = drawn.axes
    assert axes.get_xlim() == axes.get_ylim() == (80, 100)
    assert [text.get_text() for text in axes.texts] == ["33 % below"]
    assert drawn.get_supxlabel() == f"{SHARE}, trained without federation (%)"
    assert drawn.get_supylabel() == f"{SHARE} (%)"
    narrow = picture.draw(replace(PAPER[0], width=1.2))
    assert [text.get_text() for text in narrow.axes[0].texts] == ["33 %"]
