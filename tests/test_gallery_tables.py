"""The gallery: its page is made from its files, and every cell of its tables can be run, as it was published."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fl_sim.experiment.experiment import Experiment
from fl_sim.report.gallery import PAGE, leaderboard_text, read_gallery, read_leaderboard
from fl_sim.tables.labels import data_label, label
from fl_sim.tables.plan import TableSettings, as_run, experiment_at, points, read_settings
from fl_sim.tables.tuning_space import Tune

ROOT = Path(__file__).parent.parent
BENCHMARKS, GALLERY = ROOT / "benchmarks", ROOT / "docs" / "results"
NIID = {
    "mnist": 20, "mnist_labels": 45, "mnist_mu": 21, "fashion_mnist": 35, "cifar10": 20, "adult": 25, "partial": 15,
}  # fmt: skip


def experiments(settings: TableSettings) -> list[Experiment]:
    """Return the experiment of every cell, without a look at data or splits."""
    given = [one for grid in settings.grids for one in points(settings.base, grid, centralized=settings.centralized)]
    return [experiment_at(settings.base, as_run(one)) for one in given]


@pytest.mark.parametrize(("name", "num_cells"), NIID.items())
def test_every_cell_of_niid_bench_is_trained_as_published(name: str, num_cells: int) -> None:
    cells = experiments(read_settings(BENCHMARKS / "niid" / f"{name}.toml", []))
    assert len(cells) == num_cells
    for cell in cells:
        local = cell.local
        assert (local.epochs, local.batch_size, local.learning_rate, local.weight_decay) == (10, 64, 0.01, 1e-5)
        assert cell.normalise == "none", "NIID-Bench leaves images in [0, 1]"
        without = cell.algorithm.kind == "scaffold" and cell.algorithm.variant == "paper"
        assert local.momentum == (0.0 if without else 0.9)
        assert getattr(cell.partition, "balanced", True), "NIID-Bench's Dirichlet split is the balanced one"
        assert getattr(cell.partition, "variant", "niid-bench") == "niid-bench"


def test_every_other_table_file_holds_experiments_that_go_together() -> None:
    files = [*BENCHMARKS.glob("*.toml"), *(BENCHMARKS / "dafl").glob("*.toml"), *(BENCHMARKS / "pate").glob("*.toml")]
    files += (BENCHMARKS / "fine_tune").glob("*.toml")
    assert len(files) >= 16
    for file in files:
        assert experiments(read_settings(file, [])), file
    large = [*(BENCHMARKS / "robustness").glob("*.toml")]
    assert large
    for file in large:
        assert experiments(read_settings(file, ["seed=0", "partition=iid"])), file


def test_the_page_is_what_its_files_make() -> None:
    leaderboard = read_leaderboard(GALLERY)
    assert leaderboard is not None
    made = leaderboard_text(leaderboard, read_gallery(GALLERY))
    assert (GALLERY / PAGE).read_text() == made, "run: fl-sim report --gallery docs/results"
    assert len(made.split()) <= 2000
    for question in leaderboard.questions:
        table = json.loads((GALLERY / question.folder / "table.json").read_text())
        caption, labels = " ".join(table["caption"]), table.get("labels", {})
        for row, text in question.rows.items():
            for epsilon in re.findall(r"epsilon ([\d.]+)", text):
                spent, budget = f"{row} epsilon {epsilon}" in caption, f"a budget of epsilon = {epsilon} " in caption
                joint = rf"{re.escape(labels.get(row, row))} epsilon [\d.]+ \(the whole run {re.escape(epsilon)} "
                is_told = spent or budget or f"epsilon={epsilon}" in row or re.search(joint, caption)
                assert is_told, (question.title, text)


def test_every_published_figure_stands_beside_a_cell_of_its_table() -> None:
    for entry in (one for one in read_gallery(GALLERY) if one.about.published):
        cells = experiments(read_settings(ROOT / entry.about.file, []))
        rows = {label(cell.algorithm) for cell in cells}
        columns = {f"{data_label(cell.data)} {label(cell.partition)}" for cell in cells}
        for column, accuracies in (
            (column, some) for one in entry.about.published for column, some in one.accuracies.items()
        ):
            assert column in columns, entry.name
            assert all(f"{row}, ".startswith(tuple(f"{known}, " for known in rows)) for row in accuracies), entry.name


def test_a_published_copy_has_the_whole_table_but_for_measures(
    load_benchmark: Callable[[str], ModuleType],
) -> None:
    publish, whole = load_benchmark("publish"), json.loads((GALLERY / "label-skew-hard" / "table.json").read_text())
    copy = json.loads(publish.as_text(publish.smaller(whole, {"macro_f1_percent"})))
    assert all(list(cell["measures"]) == ["macro_f1_percent"] for cell in copy["cells"])
    for table in (copy, whole):
        for cell in table["cells"]:
            del cell["measures"]
    assert copy == whole
    with pytest.raises(ValueError, match="no run has the measure nothing: give some of"):
        publish.smaller(json.loads((GALLERY / "pate-mnist" / "table.json").read_text()), {"nothing"})


def test_every_table_of_the_gallery_was_made_from_its_file_as_it_is_now() -> None:
    made = [entry for entry in read_gallery(GALLERY) if entry.table is not None]
    assert made
    for entry in made:
        settings = json.loads((GALLERY / entry.name / "table.json").read_text())["settings"]
        now = json.loads(read_settings(ROOT / entry.about.file, []).model_dump_json())
        if settings.get("tune"):  # settings of a search that are newer than the table have their defaults
            settings["tune"] = json.loads(Tune.model_validate(settings["tune"]).model_dump_json())
        for part in ("base", "grid", "tune"):
            assert settings.get(part) == now.get(part), f"{entry.name}: run it again: {entry.about.command}"
