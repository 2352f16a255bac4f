"""The gallery's page in literal text, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_sim.cli.gallery import write_gallery
from fl_sim.errors import UserError
from fl_sim.report.gallery import gallery_text, read_gallery
from fl_sim.report.table import SeedResult, Table
from fl_sim.report.table_files import write_table

ABOUT = """title = "MNIST"
file = "benchmarks/a.toml"
command = "fl-sim table benchmarks/a.toml"
hardware = "two cores"
differs = "Other random numbers."

[[published]]
source = "Li et al. 2022, table 3"
confidence = "recalled"
note = "mean of three seeds."
[published.accuracies."x"]
A = 91.5
B = 60.0
"""


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    results = [
        SeedResult(row, column, seed, "finished", f"cells/{row}{column}{seed}", last + seed / 100, 1.0,
                   measures={"seconds.total": 900.0 if seed else 200.0, "seconds.train": 600.0 if seed else 900.0})
        for row, column, last in (("A", "x", 0.9), ("B", "x", 0.5), ("A", "y", 0.2), ("B", "y", 0.2))
        for seed in range(3)
    ]  # fmt: skip
    table = Table(("A", "B"), ("x", "y"), frozenset(), tuple(results), ("What it is.",))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "about.toml").write_text(ABOUT)
    write_table(tmp_path / "mnist", table)
    return tmp_path


def test_ours_stand_above_what_was_published_and_who_misses_by_more_than_three_deviations_is_told(
    gallery: Path,
) -> None:
    text = gallery_text(read_gallery(gallery), "..")
    section = text[text.index("## MNIST") :].splitlines()
    assert section[:15] == [
        "## MNIST",
        "",
        "[benchmarks/a.toml](../benchmarks/a.toml): `fl-sim table benchmarks/a.toml`",
        "",
        "Machine: two cores. Hours: 3.0, all runs one after another.",
        "",
        "| | x | y |",
        "|---|---|---|",
        "| A | **91.0 ± 1.0** | 21.0 ± 1.0 |",
        "| *Li et al. 2022, table 3, recalled* | *91.5* |  |",
        "| B | 51.0 ± 1.0 | 21.0 ± 1.0 |",
        "| *Li et al. 2022, table 3, recalled* | *60* |  |",
        "",
        "Further than 3 of our deviations from Li et al. 2022, table 3: B, x: 51.0 and 60.",
        "",
    ]
    assert "Other random numbers." in section
    assert "- What it is." in section
    assert "| MNIST | `benchmarks/a.toml` | `mnist` | 12 of 12 |" in text


def test_hours_of_private_runs_are_told_as_what_they_are_at_most(gallery: Path) -> None:
    csv = gallery / "mnist" / "table.csv"
    head, *lines = csv.read_text().splitlines()
    csv.write_text("\n".join([f"{head},epsilon.record", *(f"{line}," for line in lines)]) + "\n")
    assert "Hours: 3.0, all runs" in gallery_text(read_gallery(gallery), "..")
    csv.write_text("\n".join([f"{head},epsilon.record", f"{lines[0]},9.9", *(f"{line}," for line in lines[1:])]) + "\n")
    assert "Hours: at most 3.0, all runs" in gallery_text(read_gallery(gallery), "..")


def test_a_published_best_round_stands_below_our_best_round(gallery: Path) -> None:
    about = gallery / "mnist" / "about.toml"
    about.write_text(ABOUT.replace('note = "', 'measure = "best"\nnote = "'))
    text = gallery_text(read_gallery(gallery), "..")
    rows = [line for line in text.splitlines() if line.startswith(("| A", "| *Li"))]
    assert rows[:3] == [
        "| A | **91.0 ± 1.0** | 21.0 ± 1.0 |",
        "| A, best round | 100.0 ± 0.0 | 100.0 ± 0.0 |",
        "| *Li et al. 2022, table 3, recalled* | *91.5* |  |",
    ]


def test_a_table_that_was_not_run_says_so_and_is_named_on_the_command_line(
    gallery: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (gallery / "other").mkdir()
    (gallery / "other" / "about.toml").write_text(ABOUT.replace("MNIST", "Other"))
    write_gallery([gallery], None, json_output=False)
    assert capsys.readouterr().out.endswith("README.md: 1 tables\nstill to be run: other\n")
    text = (gallery / "README.md").read_text()
    assert "| Other | `benchmarks/a.toml` | `other` | to be run |" in text
    assert "Still to be run." in text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / "about.toml").write_text(ABOUT.replace("A = 91.5", "AA = 91.5")),
         r"about.toml tells a published figure of 'AA', which table.json does not have .*it has A, B"),
        (lambda place: (place / "about.toml").write_text(ABOUT.replace('"recalled"', '"sure"')),
         "about.toml: published.0.confidence: Input should be 'read' or 'recalled'"),
        (lambda place: (place / "about.toml").write_text("a ="), "mnist: Invalid value"),
        (lambda place: (place / "table.json").write_text('{"version": 9}'), "mnist: table.json is of version 9"),
        (lambda place: (place / "about.toml").unlink(), "no folder in it holds an about.toml"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(gallery: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(gallery / "mnist")
    with pytest.raises(UserError, match=message):
        read_gallery(gallery)


def test_it_takes_one_directory(gallery: Path) -> None:
    with pytest.raises(UserError, match="--gallery takes one DIR"):
        write_gallery([gallery, gallery], None, json_output=False)
