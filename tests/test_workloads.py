"""Published workloads and the cost model: what is measured is the job, and what is fitted is what was measured."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.native.kernel import load_kernel
from fl_sim.simulation.engine_choice import trains_natively


@pytest.fixture
def workloads(load_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return load_benchmark("workloads")


def small(path: Path, side: int = 28) -> str:
    labels = np.arange(120) % 10
    images = np.random.default_rng(0).integers(0, 99, (120, side, side, 1), dtype=np.uint8)
    images[np.arange(120), labels] += 150
    np.savez(path, x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    return f"npz:{path}"


@pytest.mark.cluster
def test_ours_a_plain_loop_and_flower_do_the_same_job_in_turn(workloads: ModuleType, tmp_path: Path) -> None:
    work = workloads.Workload("small", "mnist", "logistic", 6, 3, 9, 2, 2, 10, 0.03, 0.0)
    data = small(tmp_path / "small.npz")
    workloads.data_of = lambda *_: data
    rows = workloads.measure(work, 2, {}, tmp_path)
    everybody = ["ours", "plain loop, 1 thread", f"Flower {version('flwr')}"]
    assert [(row.what, row.rounds) for row in rows] == [(what, 2) for what in everybody]
    assert all(row.wall_seconds > 0 for row in rows)
    assert rows[1].published_minutes == pytest.approx(rows[1].wall_seconds * 9 / 60)
    assert "| small | ours |" in workloads.table(rows)


def test_the_published_networks_are_as_large_as_published_and_trained_by_compiled_code(
    workloads: ModuleType, load_benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    networks = load_benchmark("peers/networks").NETWORKS
    sizes = {
        name: sum(weights.numel() for weights in networks[name](shape, 10).parameters())
        for name, shape in (("logistic", (1, 28, 28)), ("niid_cnn", (1, 28, 28)), ("dropout_cnn", (3, 32, 32)))
    }
    assert sizes == {"logistic": 7_850, "niid_cnn": 44_426, "dropout_cnn": 1_626_442}
    assert set(networks) == {work.network for work in workloads.WORKLOADS.values()}
    for work in workloads.WORKLOADS.values():
        settings: dict[str, Any] = workloads.settings_of(work, small(tmp_path / "small.npz"))
        job = job_of(experiment_from({**settings, "clients": 10, "sampler": "full", "partition": "iid"}))
        assert trains_natively(job) is (load_kernel()[0] is not None)


def test_the_made_up_writers_of_femnist_are_as_many_as_leafs(
    workloads: ModuleType, load_benchmark: Callable[[str], ModuleType]
) -> None:
    work = workloads.WORKLOADS["femnist"]
    labels, writers = load_benchmark("natural_split").made_up()
    assert len(np.unique(writers)) == work.clients
    assert (len(labels), len(np.unique(labels))) == (800_000, 62)
    assert "made-up" in work.note


@pytest.fixture
def cost_model(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("cost_model")


def test_the_cost_model_finds_the_costs_that_runs_were_made_of(cost_model: ModuleType) -> None:
    def costs(size: Any) -> dict[str, float]:
        return {
            "clients": 0.01 + 1e-3 * size.cohort + 2e-8 * size.cohort * size.parameters,
            "server": 0.02 + 3e-8 * size.population + 1e-4 * size.cohort,
            "start": 2 + 2e-6 * size.population,
            "memory": 6e8 + 500 * size.population + 8 * size.cohort * size.parameters,
        }

    made = {
        name: [cost_model.Measured(size, wall=1.0, **costs(size)) for size in getattr(cost_model, name)]
        for name in ("FITTED", "HELD_OUT")
    }
    fits = {measure: cost_model.Fit.of(measure, made["FITTED"]) for measure in cost_model.TERMS}
    assert fits["clients"].coefficients == pytest.approx((0.01, 1e-3, 2e-8))
    assert fits["memory"].coefficients == pytest.approx((6e8, 500, 8))
    for run in made["HELD_OUT"]:
        assert all(abs(cost_model.error(fit, run)) < 1e-6 for fit in fits.values())
    assert "| median of their sizes | 0 % | 0 % | 0 % | 0 % |" in cost_model.report(fits, made["HELD_OUT"])
    assert len(cost_model.far(fits)) == 3


def test_a_run_is_told_apart_into_clients_and_server(
    cost_model: ModuleType, load_benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    data = load_benchmark("scale").numbers_of(tmp_path, 60)
    found = cost_model.run_one(cost_model.Size(60, 5, "logistic"), data, tmp_path)
    assert found.clients > 0
    assert found.server > 0
    assert found.start > 0
    assert found.memory > 1e8
