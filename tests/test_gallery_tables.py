"""The tables of the gallery: every cell of their files is an experiment that can be run, as it was published."""

from pathlib import Path

import pytest

from fl_sim.tables.plan import experiments, read_settings

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NIID = {
    "mnist": 20, "mnist_labels": 45, "mnist_mu": 21, "fashion_mnist": 35, "cifar10": 20, "adult": 25, "partial": 15,
}  # fmt: skip


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
    assert len(files) >= 12
    for file in files:
        assert experiments(read_settings(file, [])), file
