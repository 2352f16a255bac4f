"""The benchmark of trainers that agree: it measures each of them, and a small part stays within the stated bounds."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def agreement(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("agreement")


@pytest.fixture(scope="module")
def folder(agreement: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("agreement")
    agreement.write_records(made)
    return made


@pytest.mark.parametrize(
    ("algorithm", "model"), [("fedcm", "logistic"), ("scaffold", "mlp"), ("fedmix", "dafl-cnn"), ("fedavg", "resnet")]
)
def test_trainers_end_within_the_bound(agreement: ModuleType, folder: Path, algorithm: str, model: str) -> None:
    row = agreement.measured(algorithm, model, folder, rounds=1, ray=False)
    assert 0 < row.apart <= agreement.BOUNDS[model]
    assert min(row.compiled_and_loop, row.stack_and_loop, row.compiled_and_stack) > 0  # 0: one trainer twice
    assert row.moved > 1e-4
    assert row.by_ray is None


@pytest.mark.cluster
def test_ray_ends_in_the_bits_of_one_process_on_every_model(
    agreement: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some methods, as every run starts a worker anew, for seconds."""
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # they would lack the import path that actors get
    runs = [("feddyn", "logistic"), ("moon", "niid-cnn"), ("fedmix", "niid-cnn"), ("fedvls", "resnet")]
    with agreement.one_ray():
        assert [agreement.ray_and_process(*one, folder) for one in runs] == [0.0] * len(runs)


def test_the_greatest_difference_of_a_model_ends_the_table(agreement: ModuleType) -> None:
    rows = [agreement.Row("fedavg", "mlp", one, 2e-8, None, 0.0, 1e-8, 0.1) for one in (3e-8, 5e-8, None)]
    last = agreement.table(rows).splitlines()[-1]
    assert last == "| greatest, of moved | mlp | 5.0e-07 | 2.0e-07 | - | 1.0e-07 | 1.0e+00 | |"
    assert "| 3.0e-08 | 2.0e-08 | - | 1.0e-08 | 1.0e-01 | yes |" in agreement.table(rows)


def test_a_weight_that_is_no_number_is_no_agreement(agreement: ModuleType) -> None:
    assert math.isnan(agreement.difference({"w": torch.tensor([math.nan, 1.0])}, {"w": torch.ones(2)}))
    assert agreement.difference({"w": torch.tensor([3.0, 1.0])}, {"w": torch.ones(2)}) == 2.0
