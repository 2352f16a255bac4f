"""What a run will take is what it takes: bytes and steps exactly, seconds by steps that are timed."""

from pathlib import Path
from typing import Any

import pytest

from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.privacy.bill import bills
from fl_sim.simulation import pace
from fl_sim.simulation.estimate import estimate_of
from fl_sim.simulation.pace import Pace, kind_of_work, num_steps, pace_of
from fl_sim.simulation.planned_bill import planned
from fl_sim.simulation.run import run
from fl_sim.store.run_directory import read_rounds
from fl_sim.training.evaluation import Scores
from fl_sim.training.trainer import Trainer
from fl_sim.types import Trained

QUICK = {"model": "logistic", "rounds": 3, "engine": {"kind": "inprocess", "workers": 1}, "local": {"batch_size": 32}}


def quick(**changes: object) -> Experiment:
    return experiment_from({**QUICK, **changes})


def estimated(known: Pace | None = None, **changes: object) -> Any:
    return estimate_of(job_of(quick(**changes)), known, has_pool=False)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedadam"])
def test_the_bytes_are_those_of_the_run(tmp_path: Path, algorithm: str) -> None:
    settings = {"algorithm": algorithm, "sampler": "fixed-size:3"}
    run(quick(**settings), tmp_path / "run")
    records, expected = read_rounds(tmp_path / "run"), estimated(**settings).traffic
    assert (expected.down, expected.up) == (
        sum(one.bytes_down or 0 for one in records), sum(one.bytes_up or 0 for one in records),
    )  # fmt: skip


@pytest.mark.parametrize(("buffer", "concurrency"), [(3, 5), (5, 3), (10, 10)])
def test_the_bytes_of_updates_as_they_come_are_those_of_the_run_but_for_turns_that_have_begun(
    tmp_path: Path, buffer: int, concurrency: int
) -> None:
    server = {"kind": "fedbuff", "buffer": buffer, "concurrency": concurrency}
    settings: dict[str, Any] = {"devices": "log-normal", "server": server}
    run(quick(**settings), tmp_path / "run")
    records, expected = read_rounds(tmp_path / "run"), estimated(**settings).traffic
    each = expected.up // (3 * buffer)
    assert expected.up == sum(one.bytes_up or 0 for one in records)
    assert abs(sum(one.bytes_down or 0 for one in records) - expected.down) < concurrency * each
    assert num_steps(job_of(quick(**settings))) == pytest.approx(3 * buffer * 5)  # 144 records each, batches of 32


def test_the_steps_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    train_all = Trainer.train_all

    def counted(self: Trainer, jobs: Any) -> Any:
        trained = train_all(self, jobs)
        taken.extend(one.num_steps for one in trained)
        return trained

    experiment = quick(partition="quantity:0.5", local={"epochs": 2, "batch_size": 32})
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_all", counted)
        run(experiment, tmp_path / "run")
    assert num_steps(job_of(experiment)) == sum(taken)


def test_seconds_are_those_of_steps_and_of_records_that_are_measured() -> None:
    """Digits over ten clients: 50 steps a round (144 records each or fewer, batches of 32), 360 test records."""
    assert estimated(Pace(step=2.0, record=0.0)).seconds == 2 * 150
    assert estimated(Pace(step=0.0, record=1.0)).seconds == 3 * 360
    assert estimated(Pace(step=0.0, record=1.0), evaluate_every=2).seconds == 2 * 360
    assert estimated(Pace(step=0.0, record=1.0), evaluate={"test": "last"}).seconds == 360
    two = {"kind": "inprocess", "workers": 2}
    assert estimated(Pace(step=2.0, record=0.0), engine=two).seconds == pytest.approx(300 / 1.9)
    assert estimated().seconds is None


def test_a_pace_is_that_of_eight_steps_and_of_their_records_by_the_jobs_own_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked: list[object] = []
    monkeypatch.setattr(pace, "_seconds", lambda _, work: worked.append(work()) or 32.0)
    assert pace_of(job_of(quick(local={"batch_size": 4}))) == Pace(step=32.0 / 8, record=32.0 / 32)
    [trained], scores = worked
    assert isinstance(trained, Trained)
    assert trained.num_steps == 8
    assert isinstance(scores, Scores)
    assert len(scores.labels) == 32
    stacked = quick(engine={"kind": "inprocess", "stack": 3}, local={"batch_size": 4})
    assert pace_of(job_of(stacked)).step == 32.0 / (3 * 8)


def test_work_that_takes_as_long_has_one_name() -> None:
    assert kind_of_work(quick()) == kind_of_work(quick(rounds=9, seed=3, partition="iid", sampler="fixed-size:2"))
    assert kind_of_work(quick()) != kind_of_work(quick(algorithm="scaffold"))
    assert kind_of_work(quick()) != kind_of_work(quick(local={"batch_size": 2}))
    assert kind_of_work(quick()) != kind_of_work(quick(local={"label_smoothing": 0.1}))  # PyTorch trains then


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    "settings",
    [
        {"aggregator": {"kind": "global-dp", "noise": "seeded"}, "sampler": "poisson:0.5"},
        {"algorithm": {"kind": "pate", "queries": 5, "labelling": {"noise": "seeded"},
                       "student": {"kind": "supervised", "steps": 1}}, "clients": 5},
        {"calibrate": {"kind": "ccvr", "epsilon": 3.0, "samples_per_class": 2, "epochs": 1}},
        {},
    ],
    ids=["global-dp", "pate", "ccvr", "nothing"],
)  # fmt: skip
def test_the_bill_beforehand_is_what_the_run_states(tmp_path: Path, settings: dict[str, Any]) -> None:
    experiment = quick(**settings)
    paid = planned(job_of(experiment))
    stated = run(experiment, tmp_path / "run")["privacy"]
    assert paid.payments is not None
    assert [(one.unit, one.epsilon, one.delta, str(one.adjacency)) for one in paid.payments] == [
        (one["unit"], one["epsilon"], one["delta"], one["adjacency"]) for one in stated
    ]


def test_a_pool_is_paid_for_once_however_many_runs_use_it_and_within_its_budget() -> None:
    da_fl = {"kind": "da-fl", "epsilon": 2.0, "generator": "mean-embedding"}
    runs = [planned(job_of(quick(preprocess=da_fl, algorithm=kind))) for kind in ("fedavg", "scaffold")]
    [bill] = bills(runs)
    assert [(total.releases, total.plain) for total in bill.totals] == [(1, (2.0, 1e-5))]
    assert bill.epsilon is None  # both train on raw records as well
