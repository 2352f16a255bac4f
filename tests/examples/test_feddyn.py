"""FedDyn as an algorithm from outside the package: it is ours bit for bit, on every engine, in table and report."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.kinds import kind_of
from fl_sim.report.groups import group
from fl_sim.report.runs import find
from fl_sim.simulation.run import run
from fl_sim.tables.plan import TableSettings, plan_table
from fl_sim.testing import check

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS: dict[str, Any] = {
    "algorithm": {"kind": "feddyn:FedDyn", "alpha": 0.1}, "model": "logistic", "clients": 4, "rounds": 3,
    "partition": "dirichlet:0.3", "local": {"learning_rate": 0.1, "batch_size": 16},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _found() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


def fed_dyn(alpha: float) -> Any:
    return experiment_from({"algorithm": {"kind": "feddyn:FedDyn", "alpha": alpha}}).algorithm


def test_it_keeps_the_laws() -> None:
    check(fed_dyn(0.1))


def test_from_python_and_by_path_it_is_the_same_and_not_fedavg(tmp_path: Path) -> None:
    algorithm = fed_dyn(0.1)
    assert kind_of(algorithm) == "feddyn:FedDyn"
    by_path = run(experiment_from({**SETTINGS, "engine": "inprocess"}), tmp_path / "path")
    run(Experiment(**{**SETTINGS, "algorithm": algorithm, "engine": "inprocess"}), tmp_path / "object")
    run(experiment_from({**SETTINGS, "algorithm": "feddyn:0.1", "engine": "inprocess"}), tmp_path / "ours")
    run(experiment_from({**SETTINGS, "algorithm": "fedavg", "engine": "inprocess"}), tmp_path / "fedavg")
    own, object_, ours, fedavg = (
        load_file(tmp_path / name / "model.safetensors") for name in ("path", "object", "ours", "fedavg")
    )
    assert by_path["algorithm"] == "feddyn:FedDyn"
    assert all(torch.equal(own[name], object_[name]) and torch.equal(own[name], ours[name]) for name in own)
    assert not any(torch.equal(own[name], fedavg[name]) for name in own)


@pytest.mark.cluster
def test_on_ray_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("fl_sim.engines.ray_start")
    for engine in ("inprocess", "ray:1"):
        assert run(experiment_from({**SETTINGS, "engine": engine}), tmp_path / engine)["status"] == "finished"
    own, other = (load_file(tmp_path / engine / "model.safetensors") for engine in ("inprocess", "ray:1"))
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_table_and_report_call_it_by_its_title(tmp_path: Path) -> None:
    base = {**SETTINGS, "engine": "inprocess"}
    plan = plan_table(TableSettings(base=base, grid={"algorithm": ["feddyn:FedDyn:0.1", "fedavg"]}, centralized=False))
    assert plan.rows == ("FedDyn (alpha=0.1)", "FedAvg")
    for name, experiment in plan.runs.items():
        run(experiment, tmp_path / name)
    assert {one.method for one in group(find([tmp_path]).runs)[0]} == {"FedDyn", "FedAvg"}
