"""What a round of a personal method costs: its steps are counted, by the trainer that computes them."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fl_sim.native.kernel import load_kernel


@pytest.fixture
def costs(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("personal/costs")


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ("fedper", 1),
        ("ditto", 2),
        ("apfl", 2),
        ("per-fedavg", 2),
        ("fedrep, 1 epoch of the head", 2),
        ("pfedme, 5 steps", 5),
        ("fedala", 1.8),
        ("ifca, 2 models", 1 + 2 / 3),
        ("cfl, 8 clusters", 1),
    ],
)
def test_no_method_computes_more_than_the_steps_of_its_paper(
    costs: ModuleType, tmp_path: Path, method: str, steps: float
) -> None:
    """FedALA trains its weights on 80 % of the records; IFCA predicts with two models on all of them."""
    data = costs.write_records(tmp_path / "records.npz", 50)
    plain, own = (costs.experiment_of(one, "niid-mlp", data, 10) for one in ("fedavg", costs.METHODS[method]))
    trainer = "compiled" if load_kernel()[0] else "PyTorch"
    base, found = costs.counted(plain), costs.counted(own)
    assert base[1] == found[1] == trainer
    assert found[0] / base[0] == pytest.approx(steps, rel=0.03)
