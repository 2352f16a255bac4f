"""The leaderboard in literal text, and what it refuses."""

import json
from pathlib import Path

import pytest

from fl_sim.cli.report import write_gallery
from fl_sim.errors import UserError
from fl_sim.report.gallery import gallery_text, leaderboard_text, read_gallery, read_leaderboard
from fl_sim.report.heat_map import HeatMap
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import write_table

ABOUT = """
title = "A table"
file = "a.toml"
command = "fl-sim table a.toml"
[[published]]
source = "A paper"
confidence = "read"
accuracies = { x = { Two = 50.0 } }
"""
PAGE = """
title = "Leaders"
introduction = "What this is."
[[questions]]
title = "Which?"
folder = "one"
columns = { x = "X" }
best = 2
rows = { Two = "the second" }
published = true
text = "An answer."
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    accuracies = {"One": 0.1, "Two": 0.2, "Three": 0.3, "Four": 0.4}
    results = tuple(
        SeedResult(row, "x", seed, "finished", f"{row}/{seed}", accuracy + seed / 1000, accuracy)
        for row, accuracy in accuracies.items()
        for seed in range(3)
    )
    (tmp_path / "one").mkdir()
    write_table(tmp_path / "one", Table(tuple(accuracies), ("x",), frozenset(), results))
    (tmp_path / "one" / "about.toml").write_text(ABOUT)
    (tmp_path / "leaderboard.toml").write_text(PAGE)
    return tmp_path


def refuses(folder: Path, page: str, message: str) -> None:
    """Check that a leaderboard with the content ``page`` is refused with an error that matches ``message``."""
    (folder / "leaderboard.toml").write_text(page)
    with pytest.raises(UserError, match=message):
        leaderboard_text(read_leaderboard(folder) or pytest.fail("no file"), read_gallery(folder))


def test_the_best_rows_come_first_then_the_named_ones_with_their_published_figures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gallery([folder], None, json_output=True)
    assert json.loads(capsys.readouterr().out)["tables"] == 1
    assert (folder / "README.md").read_text() == (
        "# Leaders\n\nWhat this is.\n\n## Which?\n\n"
        "| | X |\n|---|---|\n| Four | **40.1 ± 0.1** |\n| Three | 30.1 ± 0.1 |\n| the second | 20.1 ± 0.1 |\n"
        "| *A paper (read)* | *50* |\n\nAn answer. [Whole table](one/table.json).\n\n"
        "## All tables, and their numbers of runs\n\n- [A table](one/table.json): 12\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('folder = "one"', 'folder = "oen"', r"the folder 'oen', which does not exist .*'one'"),
        ('x = "X"', 'y = "X"', r"the column 'y', which does not exist"),
        ("Two =", "Tow =", r"the row 'Tow', which does not exist .*'Two'"),
        ("best = 2", "best = -1", r"leaderboard.toml: questions.0.best: .*greater than or equal to 0"),
        ("best = 2", "best = ", r"leaderboard.toml: Invalid value"),
        ("published = true", "publish = true", r"leaderboard.toml: questions.0.publish: Extra inputs"),
    ],
)
def test_what_is_damaged_is_named(folder: Path, old: str, new: str, message: str) -> None:
    refuses(folder, PAGE.replace(old, new), message)


MAPPED = """
title = "Leaders"
introduction = "What this is."
[[questions]]
title = "Which rule?"
folder = "one"
heat_map = "x"
columns = { alie = "ALIE", none = "no attack" }
rows = { Krum = "Krum, 2020" }
text = "An answer."
"""


@pytest.fixture
def mapped(tmp_path: Path) -> Path:
    """A gallery whose table has a heat map of two rules by two attacks; one of the four cells has no run."""
    places = {("mean", "none"): "mean, none", ("Krum", "none"): "Krum, none", ("Krum", "alie"): "Krum, alie"}
    results = tuple(
        SeedResult(row, "x", 0, "finished", row, accuracy, accuracy)
        for row, accuracy in zip(places.values(), (0.3, 0.2, 0.1), strict=True)
    )
    shown = HeatMap("x", "x", "algorithm", "attack", ("mean", "Krum"), ("none", "alie"), places)
    (tmp_path / "one").mkdir()
    write_table(tmp_path / "one", Table(tuple(places.values()), ("x",), frozenset(), results, heat_maps=(shown,)))
    (tmp_path / "one" / "about.toml").write_text(ABOUT.partition("[[published]]")[0])
    (tmp_path / "leaderboard.toml").write_text(MAPPED)
    return tmp_path


def test_a_table_with_a_heat_map_is_shown_as_rows_by_columns(mapped: Path) -> None:
    page, entries = read_leaderboard(mapped), read_gallery(mapped)
    assert page is not None
    assert (
        "## Which rule?\n\n| | ALIE | no attack |\n|---|---|---|\n| Krum, 2020 | 10.0 | 20.0 |\n\nAn answer. [Whole"
        in leaderboard_text(page, entries)
    )
    assert (
        "in percent, x:\n\n| algorithm / attack | none | alie |\n|---|---|---|\n"
        "| mean | 30.0 | - |\n| Krum | 20.0 | 10.0 |\n" in gallery_text(entries, "..")
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('heat_map = "x"', 'heat_map = "y"', r"the heat map 'y', which does not exist.* give one of x"),
        ("alie =", "ailie =", r"the column 'ailie', which does not exist.*'alie'"),
        ("Krum =", "Krumm =", r"the row 'Krumm', which does not exist.*'Krum'"),
        ('rows = { Krum = "Krum, 2020" }', "", r"a question with heat_map needs rows"),
        ('heat_map = "x"', 'heat_map = "x"\nbest = 1', r"must not have best or published"),
    ],
)
def test_a_wrong_part_of_a_heat_map_is_named(mapped: Path, old: str, new: str, message: str) -> None:
    refuses(mapped, MAPPED.replace(old, new), message)
