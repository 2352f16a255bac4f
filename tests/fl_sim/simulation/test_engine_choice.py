"""Which trainer is said to take an experiment, and what is timed for it: all that its clients' plans ask for."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path

import pytest

import fl_sim.experiment.job
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.groups import Local
from fl_sim.experiment.job import job_of
from fl_sim.local_plan import LocalPlan
from fl_sim.native.kernel import Kernel, load_kernel
from fl_sim.simulation.engine_choice import (
    batching_of,
    check_trainer,
    estimated_seconds,
    trainer_line,
    trains_natively,
)
from fl_sim.simulation.rounds import procedure_of
from fl_sim.tables.forecast import forecast
from fl_sim.tables.plan import job_at
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import Trained


@pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")
@pytest.mark.parametrize(
    ("algorithm", "model", "native"),
    [("fedavg", "resnet", True), ("scaffold", "resnet", True), ("naivemix", "resnet", True),
     ("fedmix", "resnet", False),  # its second derivatives do not go through GroupNorm
     ("fedmix", "dafl-cnn", True), ("pate", "dafl-cnn", True)],
)  # fmt: skip
def test_the_native_trainer_is_named_where_it_takes_the_plans(algorithm: str, model: str, *, native: bool) -> None:
    job = job_of(experiment_from({"data": "digits", "device": "cpu", "algorithm": algorithm, "model": model}))
    assert trains_natively(job) is native
    assert trainer_line(job, 2) == ("native trainer, 2 threads" if native else "PyTorch trains, 2 threads")
    if native:
        local = {"local": Local(label_smoothing=0.1)}
        told = "PyTorch trains, 2 threads: the native trainer does not support local.label_smoothing=0.1"
        assert trainer_line(replace(job, experiment=job.experiment.model_copy(update=local)), 2) == told


@pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")
@pytest.mark.parametrize(
    ("model", "told"), [("logistic", "native trainer, 1 thread"), ("resnet", "PyTorch trains, 1 thread")]
)
def test_the_trainer_of_private_steps_is_named(model: str, told: str) -> None:
    privacy = {"kind": "dp-sgd", "noise_multiplier": 1.0}
    job = job_of(experiment_from({"data": "digits", "device": "cpu", "model": model, "local": {"privacy": privacy}}))
    assert trainer_line(job, 1) == told


MOVED_AND_CONTRASTED = "the native trainer does not support local.augment=flip together with contrast"


@pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")
@pytest.mark.parametrize(
    ("algorithm", "told"),
    [("fedavg", "native trainer, 2 threads"),
     ("moon", f"PyTorch trains, 2 threads: {MOVED_AND_CONTRASTED}")],
)  # fmt: skip
def test_moved_images_are_trained_natively_but_beside_what_compares_them(algorithm: str, told: str) -> None:
    job = job_of(experiment_from({"device": "cpu", "algorithm": algorithm, "local": {"augment": "flip"}}))
    assert trainer_line(job, 2) == told


@pytest.mark.skipif(load_kernel()[0] is None, reason=f"no native trainer: {load_kernel()[1]}")
@pytest.mark.parametrize(
    ("asked", "refused"),
    [({}, False), ({"model": "resnet"}, False), ({"algorithm": "fedmix", "model": "resnet"}, True),
     ({"engine": {"kind": "inprocess", "stack": 2}, "algorithm": "fedmix", "model": "resnet"}, False)],
)  # fmt: skip
def test_bfloat16_on_a_cpu_is_refused_before_a_run_where_pytorch_would_train(
    asked: dict[str, object], *, refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As on a processor that has it: nothing is trained here.
    monkeypatch.setattr(fl_sim.experiment.job, "load_kernel", lambda: (Kernel(CDLL(None), 16, has_bfloat16=True), ""))
    settings = {"data": "digits", "device": "cpu", "local": {"precision": "bfloat16"}, **asked}
    told = r"local\.precision=bfloat16 is for the native trainer and for GPUs, and here PyTorch trains; leave it out"
    for check in (
        lambda: check_trainer(job_of(experiment_from(settings))),
        lambda: forecast({"one": experiment_from(settings)}, tmp_path, None, None),
        lambda: job_at(settings, {}, None),
    ):
        with pytest.raises(UserError, match=told) if refused else nullcontext():
            check()


@pytest.mark.parametrize("algorithm", ["fedmix", "scaffold", "fedavg"])
def test_what_is_timed_is_training_by_the_algorithms_own_plan(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[LocalPlan] = []
    prepare = Trainer.prepare

    def watched(self: Trainer, jobs: Sequence[LocalJob]) -> Callable[[], list[Trained]]:
        timed.extend(job.plan for job in jobs)
        return prepare(self, jobs)

    monkeypatch.setattr(Trainer, "prepare", watched)
    made = experiment_from({"device": "cpu", "algorithm": algorithm, "model": "logistic"})
    assert estimated_seconds(job_of(made)) > 0
    plan, *again = timed
    assert all(one is plan for one in again)
    assert (plan.mix is not None, plan.gradient_offset is not None) == (algorithm == "fedmix", algorithm == "scaffold")


@pytest.mark.skipif(load_kernel()[0] is None, reason="clients are trained one by one without the compiled trainer")
def test_of_a_smaller_model_more_steps_are_work_enough_for_another_thread():
    jobs = [job_of(experiment_from({"model": model})) for model in ("logistic", "2nn")]
    small, large = (batching_of(job, lambda *_: procedure_of(jobs[0]).runtime(), 1) for job in jobs)
    assert small is not None
    assert large is not None
    assert small.least_steps > 100
    assert 0 < large.least_steps < 10
    assert small.most_clients > large.most_clients > 16


@pytest.mark.skipif(load_kernel()[0] is None, reason="clients are trained one by one without the compiled trainer")
@pytest.mark.parametrize(
    ("sampler", "workers", "share"), [("full", 1, 1.0), ("full", 2, 0.5), ("fixed-size:4", 1, 0.4)]
)
def test_each_worker_makes_the_single_steps_of_all_its_clients_together(sampler: str, workers: int, share: float):
    """Each step of APFL is a call of the trainer, and of FedAvg a client's whole training is."""
    base = {
        "model": "mlp",
        "local": {"batch_size": 4},
        "partition": "iid",
        "engine": {"kind": "inprocess", "workers": workers},
        "sampler": sampler,
    }
    job, plain = (job_of(experiment_from({**base, "algorithm": algorithm})) for algorithm in ("apfl", "fedavg"))
    together, alone = (batching_of(one, lambda *_: procedure_of(job).runtime(), 1) for one in (job, plain))
    assert together is not None
    assert alone is not None
    assert together.least_steps == pytest.approx(share * sum(together.steps), abs=1)
    assert alone.steps.tolist() == together.steps.tolist()  # type: ignore[union-attr]


@pytest.mark.skipif(load_kernel()[0] is None, reason="clients are trained one by one without the compiled trainer")
def test_no_more_models_make_single_steps_together_than_fit_into_the_cache():
    """Of this model with 100,110 parameters, ten."""
    base = {"model": "mlp", "local": {"batch_size": 4}, "partition": "iid", "algorithm": "apfl", "clients": 100}
    job = job_of(experiment_from({**base, "engine": {"kind": "inprocess", "workers": 1}}))
    together = batching_of(job, lambda *_: procedure_of(job).runtime(), 1)
    assert together is not None
    assert together.least_steps == pytest.approx(0.105 * sum(together.steps), rel=0.02)
