"""What one process can do with a job at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from clients.dafl import mean_embedding
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.capacity import fixed_threads
from fl_sim.simulation.engine_choice import seconds_beforehand
from fl_sim.simulation.run import run

DA_FL = {
    "model": "logistic", "rounds": 1, "clients": 2, "partition": "iid", "engine": {"kind": "inprocess", "workers": 1},
    "preprocess": {"kind": "da-fl", "epsilon": "inf", "noise": "seeded",
                   "generator": {"kind": "mean-embedding", "frequencies": 5}},
}  # fmt: skip


def blas_threads() -> set[int]:
    """Return the threads of every library of numpy's linear algebra."""
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


def test_threads_of_torch_and_of_linear_algebra_are_fixed_and_put_back() -> None:
    before = torch.get_num_threads()
    with threadpool_limits(2, user_api="blas"):
        with fixed_threads(1):
            assert torch.get_num_threads() == 1
            assert blas_threads() == {1}
        assert blas_threads() == {2}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("at_work", [run, lambda experiment, _: seconds_beforehand(job_of(experiment))])
def test_generators_compute_in_one_thread_each_in_a_run_and_where_they_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: Callable[..., Any]
) -> None:
    seen = []

    def noted(mean: Any, root: Any, clamp: Any) -> tuple[Any, Any]:
        del clamp
        seen.append(blas_threads())
        return mean, root

    monkeypatch.setattr(mean_embedding, "before_clamping", noted)
    with threadpool_limits(2, user_api="blas"):
        at_work(experiment_from(DA_FL), tmp_path / "run")
    assert seen
    assert all(one == {1} for one in seen)
