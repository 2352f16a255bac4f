"""What a run will take is what it takes: bytes and steps exactly, seconds by steps that are timed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_sim.engines import arrays, wire
from fl_sim.experiment.experiment import Experiment, experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.privacy.bill import bills
from fl_sim.simulation.forecast import estimate_of
from fl_sim.simulation.rounds import planned_bill, procedure_of
from fl_sim.simulation.run import run
from fl_sim.simulation.timing import Stopwatch, Timing, Work
from fl_sim.store.run_directory import read_rounds
from fl_sim.training.trainer import Trainer
from fl_sim.types import Params, Traffic, Trained

QUICK = {"model": "logistic", "rounds": 3, "engine": {"kind": "inprocess", "workers": 1}, "local": {"batch_size": 32}}


def quick(**changes: object) -> Experiment:
    return experiment_from({**QUICK, **changes})


class Paced(Stopwatch):
    """A stopwatch by which a step and the measuring of a record take given seconds, and nothing else any."""

    def __init__(self, *, step: float = 0.0, record: float = 0.0) -> None:
        super().__init__()
        self._step, self._record = step, record

    def timing(self, work: Work) -> Timing:
        if work.makes or not work.ready:
            return Timing()
        return Timing(piece=self._record if work.what.startswith("measuring") else self._step)


def estimated(known: Stopwatch | None = None, **changes: object) -> Any:
    procedure = procedure_of(job_of(quick(**changes)))
    return estimate_of(procedure.work(), known, procedure.traffic())


def num_steps(job: Job) -> float:
    """Return how many steps all clients are expected to take in all rounds."""
    return procedure_of(job).work()[0].pieces


def steps_taken(monkeypatch: pytest.MonkeyPatch, experiment: Experiment, tmp_path: Path) -> int:
    """Run, and count the steps that clients took."""
    taken = []
    prepare = Trainer.prepare

    def counted(self: Trainer, jobs: Any) -> Any:
        train = prepare(self, jobs)

        def trained() -> Any:
            results = train()
            taken.extend(one.num_steps for one in results)
            return results

        return trained

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "prepare", counted)
        run(experiment, tmp_path / "run")
    return sum(taken)


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


NOISELESS: dict[str, Any] = {
    "kind": "da-fl", "epsilon": "inf", "gamma": 0.25, "noise": "seeded",
    "generator": {"kind": "mean-embedding", "frequencies": 5},
}  # fmt: skip


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "fedmix", "partition": "iid", "clients": 3},
        {"algorithm": {"kind": "naivemix", "records_per_average": 7}, "partition": "iid", "clients": 3},
        {"preprocess": NOISELESS},
        {"preprocess": {**NOISELESS, "client_gammas": [0, 0.5, *[0.125] * 8]}},
        {"preprocess": {**NOISELESS, "train_on": "synthetic"}, "algorithm": "tstr"},
        {"calibrate": {"kind": "ccvr", "samples_per_class": 2, "epochs": 1}},
        {"algorithm": {"kind": "pate", "queries": 5, "student": {"kind": "supervised", "steps": 1}}, "clients": 5},
        {},
    ],
    ids=["fedmix", "naivemix", "da-fl", "gammas", "tstr", "ccvr", "pate", "nothing"],
)
def test_what_travels_once_is_what_the_run_says(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = estimated(**settings)
    said = run(quick(**settings), tmp_path / "run")["bytes"]
    stated = {what: Traffic(**traffic) for what, traffic in {**said["before"], **said["after"]}.items()}
    assert found.once == stated
    in_rounds = Traffic(**said["rounds"]) if said["rounds"] else Traffic(0, 0)
    assert found.total == sum(stated.values(), in_rounds)


@pytest.mark.usefixtures("quick_accounting")
def test_what_a_private_start_sends_is_what_is_asked_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "aggregator": {"kind": "global-dp", "noise": "seeded"},
        "preprocess": {"kind": "private-start", "frequencies": 5, "images": 50, "server_epochs": 1},
        "sampler": "full",
        "rounds": 1,
    }
    asked, answered = [], []
    ask, read = wire.task_content, wire.read_sums

    def noted_question(order: wire.TaskConfig, params: Params, *rest: Any) -> Any:
        content = ask(order, params, *rest)
        asked.extend([arrays.num_bytes(content)] if "centre" in params else [])
        return content

    def noted_answer(content: Any, template: Params) -> Params:
        answered.append(arrays.num_bytes(content))
        return read(content, template)

    found = estimated(**settings).once["private_start"]
    monkeypatch.setattr(wire, "task_content", noted_question)
    monkeypatch.setattr(wire, "read_sums", noted_answer)
    run(quick(**settings), tmp_path / "run")
    assert (len(asked), len(answered)) == (3, 30)
    assert (found.down, found.up) == (10 * sum(asked), sum(answered))


@pytest.mark.parametrize("train_on", ["own-and-synthetic", "synthetic"])
def test_steps_on_synthetic_records_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_on: str) -> None:
    experiment = quick(preprocess={**NOISELESS, "train_on": train_on})
    taken = steps_taken(monkeypatch, experiment, tmp_path)
    assert num_steps(job_of(experiment)) == pytest.approx(taken, rel=0.05)
    assert taken > 1.2 * num_steps(job_of(quick()))


@pytest.mark.parametrize(
    ("settings", "server_steps"),
    [
        ({"preprocess": {**NOISELESS, "server_epochs": 7}}, 7 * 12),  # 359 records, batches of 32
        (
            {
                "preprocess": {"kind": "private-start", "images": 50, "server_epochs": 3},
                "aggregator": "global-dp",
                "sampler": "full",
            },
            3 * 2,
        ),
    ],
    ids=["da-fl", "private-start"],
)
def test_epochs_of_the_server_come_on_top_and_are_those_of_one_core(
    settings: dict[str, Any], server_steps: int
) -> None:
    at, two = Paced(step=2.0, record=0.0), {"kind": "inprocess", "workers": 2}
    job = job_of(quick(engine=two, partition="iid", **settings))
    found = estimate_of(procedure_of(job).work(), at, {})
    assert found.seconds == pytest.approx(2.0 * num_steps(job) / 1.9 + 2.0 * server_steps)


def test_the_steps_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = quick(partition="quantity:0.5", local={"epochs": 2, "batch_size": 32})
    assert num_steps(job_of(experiment)) == steps_taken(monkeypatch, experiment, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "ifca:3"},
        {"algorithm": "ifca:3", "sampler": "fixed-size:4", "partition": "iid"},
        {"algorithm": "ifca:1"},
        {"algorithm": "ditto"},
    ],
    ids=str,
)
@pytest.mark.parametrize("evaluate", [{}, {"clients": "class-shares", "personal_every": 2}], ids=["", "own models"])
def test_the_predictions_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], evaluate: dict[str, Any]
) -> None:
    """Also those of the clients of IFCA, which choose the best of three models in each round and each measurement."""
    settings = {**settings, "evaluate": evaluate}
    predicted, measure = list[int](), Trainer.evaluate

    def counted(self: Trainer, params: Params, inputs: Any, *rest: Any, **others: Any) -> Any:
        predicted.append(len(inputs))
        return measure(self, params, inputs, *rest, **others)

    monkeypatch.setattr(Trainer, "evaluate", counted)
    run(quick(**settings), tmp_path / "run")
    planned = [one.pieces for one in procedure_of(job_of(quick(**settings))).work() if one.what.startswith("measuring")]
    assert sum(planned) == pytest.approx(sum(predicted), rel=0.02)


@pytest.mark.parametrize(("every", "measured"), [(1, 11 + 3), (2, 2)])
def test_the_steps_before_local_training_are_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, measured: int
) -> None:
    """FedALA's clients train weights in the method start: 11 passes in the second round, one pass in later rounds.

    A measurement starts clients like the next round.
    """
    # with a large threshold, the weights converge after the smallest number of passes
    evaluate = {"clients": "class-shares", "personal_every": every}
    settings = {"algorithm": {"kind": "fedala", "threshold": 1e6}, "evaluate": evaluate, "partition": "dirichlet:0.5"}
    taken, train = list[int](), Trainer.train

    def counted(self: Trainer, job: Any) -> Any:
        taken.append(len(job.plan.trained or ()) == 2)
        return train(self, job)

    monkeypatch.setattr(Trainer, "train", counted)
    run(quick(**settings, rounds=4), tmp_path / "run")
    job = job_of(quick(**settings, rounds=4))
    planned = [one for one in procedure_of(job).work() if "at the start" in one.what]
    assert sum(one.pieces for one in planned) == sum(taken) > 0
    steps = -(-np.ceil(0.8 * job.shards.sizes) // 32)
    assert [one.pieces for one in planned] == [13 * steps.sum(), measured * steps.sum()]
    assert len(_trained(planned[0], 1)) == 1


def test_a_timed_step_trains_the_personal_model_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, *_ = procedure_of(job_of(quick(algorithm="ditto", local={"batch_size": 4}))).work()
    assert len(_trained(steps, 2)) == 2
    assert steps.kind != procedure_of(job_of(quick(local={"batch_size": 4}))).work()[0].kind


def test_seconds_are_those_of_steps_and_of_records_that_are_measured() -> None:
    """Digits over ten clients: 50 steps a round (144 records each or fewer, batches of 32), 360 test records."""
    assert estimated(Paced(step=2.0, record=0.0)).seconds == 2 * 150
    assert estimated(Paced(step=0.0, record=1.0)).seconds == 3 * 360
    assert estimated(Paced(step=0.0, record=1.0), evaluate_every=2).seconds == 2 * 360
    assert estimated(Paced(step=0.0, record=1.0), evaluate={"test": "last"}).seconds == 360
    two = {"kind": "inprocess", "workers": 2}
    assert estimated(Paced(step=2.0, record=0.0), engine=two).seconds == pytest.approx(300 / 1.9)
    assert estimated().seconds is None


def test_a_turn_that_is_timed_is_one_of_the_jobs_own_trainer_on_public_records() -> None:
    steps, _, measuring, *_ = procedure_of(job_of(quick(local={"batch_size": 4}))).work()
    assert steps.ready is not None
    assert measuring.ready is not None
    [trained] = _trained(steps, 3)
    assert (trained.num_steps, steps.records, steps.turns) == (3, 4, 3 * 10)
    scores: Any = measuring.ready(1, 32)()
    assert len(scores.labels) == 32
    stacked, *_ = procedure_of(job_of(quick(engine={"kind": "inprocess", "stack": 3}, local={"batch_size": 4}))).work()
    assert len(_trained(stacked, 2)) == 3
    assert stacked.pieces == steps.pieces / 3


def _trained(work: Work, steps: int) -> list[Trained]:
    assert work.ready is not None
    done: Any = work.ready(work.records, steps)()
    return list(done)


def test_a_step_has_no_more_records_than_a_client_has() -> None:
    steps, *_ = procedure_of(job_of(quick(clients=100, partition="iid", local={"batch_size": 32}))).work()
    assert (steps.records, steps.pieces) == (14, 300)


def test_work_that_takes_as_long_has_one_name() -> None:
    def kind_of_work(experiment: Experiment) -> str:
        return procedure_of(job_of(experiment)).work()[0].kind

    assert kind_of_work(quick()) == kind_of_work(quick(rounds=9, seed=3, partition="iid", sampler="fixed-size:2"))
    assert kind_of_work(quick()) == kind_of_work(quick(algorithm="fedadam"))  # differs at the server alone
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
    paid = planned_bill(job_of(experiment))
    stated = run(experiment, tmp_path / "run")["privacy"]
    assert paid.payments is not None
    assert [(one.unit, one.epsilon, one.delta, str(one.adjacency)) for one in paid.payments] == [
        (one["unit"], one["epsilon"], one["delta"], one["adjacency"]) for one in stated
    ]


def test_a_pool_is_paid_for_once_however_many_runs_use_it_and_within_its_budget() -> None:
    da_fl = {"kind": "da-fl", "epsilon": 2.0, "generator": "mean-embedding"}
    runs = [planned_bill(job_of(quick(preprocess=da_fl, algorithm=kind))) for kind in ("fedavg", "scaffold")]
    [bill] = bills(runs)
    assert [(total.releases, total.plain) for total in bill.totals] == [(1, (2.0, 1e-5))]
    assert bill.epsilon is None  # both train on raw records as well
