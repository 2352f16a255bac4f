"""The gallery's page in literal text, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_sim.cli.report import write_gallery
from fl_sim.errors import UserError
from fl_sim.report.gallery import gallery_text, read_gallery
from fl_sim.report.table import SeedResult, Status, Table
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
        "More than 3 of our standard deviations from Li et al. 2022, table 3: B, x: 51.0 and 60.",
        "",
    ]
    assert "Other random numbers." in section
    assert "- What it is." in section
    assert "| MNIST | `benchmarks/a.toml` | `mnist` | 12 |" in text


def test_hours_of_private_runs_are_told_as_what_they_are_at_most(gallery: Path) -> None:
    csv = gallery / "mnist" / "table.csv"
    head, *lines = csv.read_text().splitlines()
    csv.write_text("\n".join([f"{head},epsilon.record", *(f"{line}," for line in lines)]) + "\n")
    assert "Hours: 3.0, all runs" in gallery_text(read_gallery(gallery), "..")
    csv.write_text("\n".join([f"{head},epsilon.record", *(f"{line}," for line in lines[1:]), f"{lines[0]},9.9"]) + "\n")
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


def one_table(folder: Path, published: str, **accuracies: tuple[float, ...]) -> str:
    """Return the page of a table of one column with these accuracies of each row, one a seed; best rounds are 80 %."""
    results = [
        SeedResult(row, "x", seed, "finished", f"cells/{row}{seed}", last, 0.8)
        for row, some in accuracies.items()
        for seed, last in enumerate(some)
    ]
    (folder / "one").mkdir()
    head, _, _ = ABOUT.partition("[published.")
    (folder / "one" / "about.toml").write_text(f"{head}{published}")
    write_table(folder / "one", Table(tuple(accuracies), ("x",), frozenset(), tuple(results)))
    return gallery_text(read_gallery(folder), "..")


def far_from(text: str) -> list[str]:
    return [line for line in text.splitlines() if "ore than 3 " in line]


def test_a_single_seed_is_far_from_what_was_published_by_more_than_three_points_either_way(tmp_path: Path) -> None:
    published = "[published.accuracies.x]\nA = 53.0\nB = 53.1\nC = 46.9\nD = 47.0\n"
    text = one_table(tmp_path, published, **dict.fromkeys("ABCD", (0.5,)))
    (told,) = far_from(text)
    assert told.startswith(
        "One seed, and more than 3 percentage points from Li et al. 2022, table 3: B, x: 50.0 and 53.1;"
    )
    assert told.endswith("; C, x: 50.0 and 46.9.")


def test_several_seeds_are_far_by_more_than_three_of_their_own_deviations_and_equal_ones_by_anything(
    tmp_path: Path,
) -> None:
    published = "[published.accuracies.x]\nA = 52.9\nB = 53.1\nC = 50.5\nD = 56.0\nE = 46.9\n"
    near, equal, wide = (0.49, 0.50, 0.51), (0.5,) * 3, (0.46, 0.50, 0.54)
    text = one_table(tmp_path, published, A=near, B=near, C=equal, D=wide, E=near)
    (told,) = far_from(text)
    assert told == (
        "More than 3 of our standard deviations from Li et al. 2022, table 3: B, x: 50.0 and 53.1; C, x: 50.0 and "
        "50.5; E, x: 50.0 and 46.9."
    )


def test_what_was_published_is_held_against_our_accuracy_in_the_same_column(gallery: Path) -> None:
    (gallery / "mnist" / "about.toml").write_text(f'{ABOUT}[published.accuracies."y"]\nA = 60.0\nB = 22.0\n')
    assert far_from(gallery_text(read_gallery(gallery), "..")) == [
        "More than 3 of our standard deviations from Li et al. 2022, table 3: B, x: 51.0 and 60; A, y: 21.0 and 60."
    ]


def test_published_best_rounds_are_held_against_our_best_rounds_and_each_source_against_its_own(
    tmp_path: Path,
) -> None:
    published = (
        'measure = "best"\n[published.accuracies.x]\nA = 81.0\nB = 50.0\n'
        '[[published]]\nsource = "Another"\nconfidence = "read"\nnote = "ten seeds."\n'
        "[published.accuracies.x]\nB = 51.0\nA = 70.0\n"
    )
    text = one_table(tmp_path, published, A=(0.5,), B=(0.5,), C=(0.5,))
    assert far_from(text) == [
        "One seed, and more than 3 percentage points from Li et al. 2022, table 3: B, x: 80.0 and 50.",
        "One seed, and more than 3 percentage points from Another: A, x: 50.0 and 70.",
    ]
    rows = [line for line in text.splitlines() if line.startswith(("| A", "| B", "| C", "| *"))]
    assert rows == [
        "| A | 50.0 |", "| *Another, read* | *70* |",
        "| A, best round | 80.0 |", "| *Li et al. 2022, table 3, recalled* | *81* |",
        "| B | 50.0 |", "| *Another, read* | *51* |",
        "| B, best round | 80.0 |", "| *Li et al. 2022, table 3, recalled* | *50* |",
        "| C | 50.0 |", "| C, best round | 80.0 |",
    ]  # fmt: skip
    assert "Another (read): ten seeds.\n" in text


def test_runs_are_counted_once_whatever_columns_show_them_and_failed_ones_apart(tmp_path: Path) -> None:
    states: tuple[tuple[str, Status], ...] = (
        *[("A", "finished")] * 3, *[("B", "failed")] * 2, ("B", "missing"), ("C", "missing"),
    )  # fmt: skip
    results = [
        SeedResult(row, column, seed, state, f"cells/{seed}", *((0.5, 0.6) if state == "finished" else ()))
        for column in "xy"
        for seed, (row, state) in enumerate(states)
    ]
    for name in ("b", "c", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "about.toml").write_text(ABOUT.replace("MNIST", name))
        write_table(tmp_path / name, Table(("A", "B", "C"), ("x", "y"), frozenset(), tuple(results)))
    contents = [
        line for line in gallery_text(read_gallery(tmp_path), "..").splitlines() if "benchmarks/a.toml` |" in line
    ]
    assert contents == [f"| {name} | `benchmarks/a.toml` | `{name}` | 3 of 7, 2 failed |" for name in "abc"]


@pytest.mark.parametrize(
    ("hours", "told"), [("hours = 7.26", "7.3, all runs"), ("hours = 0", "0.0, all runs"), ("", "not recorded")]
)
def test_hours_are_those_that_are_written_by_hand_else_of_all_finished_runs_if_each_says_its_own(
    gallery: Path, hours: str, told: str
) -> None:
    about, csv = gallery / "mnist" / "about.toml", gallery / "mnist" / "table.csv"
    head, *lines = csv.read_text().splitlines()
    at = {name: head.split(",").index(name) for name in ("status", "seconds.total", "seconds.train")}

    def without(line: str, status: str) -> str:
        cells = line.split(",")
        cells[at["status"]], cells[at["seconds.total"]], cells[at["seconds.train"]] = status, "", ""
        return ",".join(cells)

    csv.write_text("\n".join([head, without(lines[0], "failed"), *lines[1:]]) + "\n")
    assert "Hours: 2.8, all runs" in gallery_text(read_gallery(gallery), "..")
    csv.write_text("\n".join([head, *(without(line, "failed") for line in lines)]) + "\n")
    assert "Hours: not recorded" in gallery_text(read_gallery(gallery), "..")
    about.write_text(f"{hours}\n{ABOUT}")
    csv.write_text("\n".join([head, without(lines[0], "finished"), *lines[1:]]) + "\n")
    assert f"Hours: {told}" in gallery_text(read_gallery(gallery), "..")


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
         r"about.toml has a published accuracy for 'AA', which is not in table.json.*table.json has A, B"),
        (lambda place: (place / "about.toml").write_text(ABOUT.replace('"recalled"', '"sure"')),
         "about.toml: published.0.confidence: Input should be 'read' or 'recalled'"),
        (lambda place: (place / "about.toml").write_text(ABOUT + ABOUT[ABOUT.index("[[pub") :].replace("B =", "CC =")),
         "accuracy for 'CC'"),
        (lambda place: (place / "about.toml").write_text(ABOUT.replace("B = 60.0", "BB = 60.0")), "accuracy for 'BB'"),
        (lambda place: (place / "about.toml").write_text(ABOUT.replace('"x"', '"z"')), "accuracy for 'z'.*has x, y"),
        (lambda place: (place / "about.toml").write_text(ABOUT.replace("60.0", "100.1")), "less than or equal to 100"),
        (lambda place: (place / "about.toml").write_text(ABOUT.replace("60.0", "-0.1")), "greater than or equal to 0"),
        (lambda place: (place / "about.toml").write_text("hours = -1\n" + ABOUT.replace('"recalled"', '"sure"')),
         "about.toml: hours: Input"),
        (lambda place: (place / "about.toml").write_text("hours = -1\n" + ABOUT), "hours: Input should be greater"),
        (lambda place: (place / "about.toml").write_text("a ="), "mnist.about.toml: Invalid value"),
        (lambda place: (place / "table.json").write_text('{"version": 9}'), "mnist: table.json has format version 9"),
        (lambda place: (place / "about.toml").unlink(), "none of its folders has a file about.toml"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(gallery: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(gallery / "mnist")
    with pytest.raises(UserError, match=message):
        read_gallery(gallery)


def test_it_takes_one_directory(gallery: Path) -> None:
    with pytest.raises(UserError, match="--gallery takes one DIR"):
        write_gallery([gallery, gallery], None, json_output=False)
