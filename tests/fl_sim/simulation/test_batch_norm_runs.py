"""local.batch_norm: the global statistics are the mean of the clients' own, and personal layers stay theirs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import Job, job_of
from fl_sim.native.mean import weighted_mean
from fl_sim.params import detached, statistics_of, subtract
from fl_sim.seeding import rng
from fl_sim.simulation.client_runtime import evaluation_records, local_settings, runtime_for
from fl_sim.simulation.run import run
from fl_sim.simulation.run_log import Silent
from fl_sim.store.run_directory import RoundRecord
from fl_sim.store.tensors import load_state
from fl_sim.training.loop import train
from fl_sim.training.trainer import LocalJob, Trainer
from fl_sim.types import ClientUpdate, LocalTask, Params, ServerState, Trained
from strategies.fedavg import FedAvg

MODEL = """
from torch import nn

def normed(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, num_classes))
"""


class Sending(FedAvg):
    """Sends a number under a name that is taken."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        update = super().finish(task, trained)
        return replace(update, payloads={**update.payloads, "batch-norm": {"own": torch.zeros(1)}})


class Keeping(FedAvg):
    """Keeps one."""

    def finish(self, task: LocalTask, trained: Trained) -> ClientUpdate:
        return replace(super().finish(task, trained), state={"batch-norm": {"own": torch.zeros(1)}})


class Broadcasting(FedAvg):
    """Has the server send one."""

    def init(self, params: Params) -> ServerState:
        return ServerState(params, broadcast={"batch-norm": {"own": torch.zeros(1)}})


@pytest.mark.parametrize("algorithm", [Sending(), Keeping(), Broadcasting()])
def test_the_layers_name_is_nobody_elses(algorithm: FedAvg, tmp_path: Path) -> None:
    for others in ({}, {"model": "logistic", "local": {}}):
        experiment = experiment_from(table(**others)).model_copy(update={"algorithm": algorithm})
        with pytest.raises(UserError, match=r"the name 'batch-norm'.* give it another name"):
            run(experiment, tmp_path / "run")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    made = tmp_path_factory.mktemp("models")
    (made / "normed_models.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made)
        yield


def table(**others: Any) -> dict[str, Any]:
    return {
        "model": "normed_models:normed", "partition": "dirichlet:0.3", "clients": 4, "rounds": 1, "seed": 3,
        "local": {"batch_norm": "average", "batch_size": 32}, "engine": "inprocess", "device": "cpu", **others,
    }  # fmt: skip


def trained_by_hand(job: Job) -> list[tuple[Params, int]]:
    """Return every client's running statistics after a first round of plain SGD, and how many records it has."""
    runtime, model, found = runtime_for(job, FedAvg(), {}), job.model(), []
    for client in range(job.experiment.num_clients):
        inputs, labels = runtime.records(client, "").tensors()
        task = LocalTask(
            1, client, 4, len(labels), local_settings(job, job.experiment.local.learning_rate),
            detached(job.model().named_parameters()), statistics=statistics_of(job.model()),
        )  # fmt: skip
        plan = FedAvg().plan(task)
        trained = train(model, task, plan, inputs, labels, rng(job.experiment.seed, "batches", client, 1))
        found.append((trained.statistics, len(labels)))
    return found


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "fedadam", "fednova", "fedexp", "scaffold"])
def test_statistics_are_the_mean_of_the_clients_own_and_no_step_of_a_server_optimiser(
    algorithm: str, tmp_path: Path
) -> None:
    experiment = experiment_from(table(algorithm=algorithm))
    run(experiment, tmp_path / "run")
    own = trained_by_hand(job_of(experiment))
    uniform = algorithm in {"scaffold", "fedexp"}  # by which clients count alike
    expected = weighted_mean([statistics for statistics, _ in own], [1.0 if uniform else count for _, count in own])
    found = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in expected.items():
        assert torch.equal(found[name], value)
    assert len({tuple(statistics["2.running_mean"].tolist()) for statistics, _ in own}) == 4


def test_the_global_model_is_evaluated_with_the_averaged_statistics(tmp_path: Path) -> None:
    job = job_of(experiment_from(table()))
    result = run(job.experiment, tmp_path / "run")
    model, test = job.model(), evaluation_records(job)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    logits = model.eval()(test.inputs)
    assert result["final_accuracy"] == pytest.approx(float((logits.argmax(1) == test.labels).double().mean()))


def test_clients_that_are_equal_or_alone_keep_the_statistics_of_plain_training(tmp_path: Path) -> None:
    run(experiment_from(table(algorithm="centralized")), tmp_path / "run")
    [(expected, _)] = trained_by_hand(job_of(experiment_from(table(algorithm="centralized"))))
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    equal = weighted_mean([expected] * 3, [2, 5, 11])
    assert all(torch.equal(equal[name], value) for name, value in expected.items())


def test_personal_layers_go_on_from_round_to_round_whatever_others_do_and_their_mean_is_evaluated(
    tmp_path: Path,
) -> None:
    two_threads = {"kind": "inprocess", "workers": 2}
    local = {"batch_norm": "personal", "batch_size": 32}
    experiment = experiment_from(table(local=local, rounds=3, engine=two_threads))
    result = run(experiment, tmp_path / "run")
    job = job_of(experiment)
    runtime, model = runtime_for(job, FedAvg(), {}), job.model()
    shared, names = detached(job.model().named_parameters()), ("2.weight", "2.bias")
    sizes = [len(shard) for shard in job.shards]
    layers = [({name: shared[name] for name in names}, statistics_of(job.model())) for _ in sizes]
    for server_round in (1, 2, 3):
        found = []
        for client, (own, statistics) in enumerate(layers):
            task = LocalTask(
                server_round, client, 4, sizes[client], local_settings(job, 0.01), {**shared, **own},
                statistics=statistics,
            )  # fmt: skip
            plan, generator = FedAvg().plan(task), rng(3, "batches", client, server_round)
            found.append(train(model, task, plan, *runtime.records(client, "").tensors(), generator))
        moves = [subtract(one.params, shared) for one in found]
        shared = {name: shared[name] + value for name, value in weighted_mean(moves, sizes).items()}
        layers = [({name: one.params[name] for name in names}, one.statistics) for one in found]
    expected = {**shared, **weighted_mean([{**own, **statistics} for own, statistics in layers], sizes)}
    found_model = load_file(tmp_path / "run" / "model.safetensors")
    assert found_model.keys() == expected.keys()
    assert all(torch.equal(found_model[name], value) for name, value in expected.items())
    scores = job.trainer.evaluate(expected, evaluation_records(job).inputs, evaluation_records(job).labels)
    assert result["final_accuracy"] == scores.accuracy
    assert any(
        "the evaluated model has the mean BatchNorm layers of the last cohort, and no trained client uses" in said
        for said in result["warnings"]
    )


def test_control_variates_leave_personal_layers_alone(tmp_path: Path) -> None:
    class Break(Silent):
        def finished_round(self, record: RoundRecord) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    experiment = experiment_from(table(local={"batch_norm": "personal"}, rounds=3, algorithm="scaffold"))
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", observer=Break())
    kept = [load_state(tmp_path / "run" / "clients", client, 3) for client in range(4)]
    assert all(set(state) == {"control", "batch-norm"} for state in kept)
    for state in kept:
        assert not state["control"]["2.weight"].any()
        assert state["control"]["1.weight"].any()
    assert len({tuple(state["batch-norm"]["2.weight"].tolist()) for state in kept}) == 4


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"aggregator": "global-dp"}, "average cannot run under aggregator global-dp: running statistics are means"),
        ({"aggregator": "median"}, "average works only with aggregator mean: median compares the updates of"),
        ({"attack": "sign-flip"}, "average cannot run with attack sign-flip"),
        ({"algorithm": "pate"}, "pate cannot run with local.batch_norm=average, as it averages no models"),
        (
            {"algorithm": "fedcm", "local": {"batch_norm": "personal"}},
            r"fedcm adds the last round's mean update to 0\.1 of every gradient",
        ),
        ({"model": "mlp"}, "model 'mlp' has no BatchNorm layers: leave local.batch_norm=average out"),
        (
            {"local": {}},
            r"keeps running statistics \(2.running_mean\).* set local.batch_norm=average or personal, or use",
        ),
        ({"engine": {"kind": "inprocess", "stack": 2}}, "engine.stack=2: this model cannot be trained on many clients"),
    ],
)
def test_what_does_not_go_with_batch_norm_is_refused_before_anything_runs(
    others: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run(experiment_from(table(**others)), tmp_path / "run")


def test_statistics_go_on_from_the_servers_own_epochs_on_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_SIM_POOLS", str(tmp_path / "pools"))
    preprocess = {"kind": "da-fl", "generator": "mean-embedding", "noise": "seeded", "gamma": 0.2, "server_epochs": 2}
    preprocess["train_on"] = "synthetic"
    local = {"batch_norm": "personal", "batch_size": 32}
    result = run(experiment_from(table(preprocess=preprocess, local=local)), tmp_path / "run")
    batches = -(-result["preprocess"]["num_synthetic"] // 32)
    tracked = load_file(tmp_path / "run" / "model.safetensors")["2.num_batches_tracked"]
    assert float(tracked) == 2 * batches + batches  # the server's epochs, and each client's on the same pool


def test_moons_previous_model_is_all_that_the_client_trained_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[tuple[Params, Params]]] = {client: [] for client in range(4)}
    plainly = Trainer.train

    def watched(self: Trainer, job: LocalJob) -> Trained:
        trained = plainly(self, job)
        assert job.plan.contrast is not None
        seen[job.task.client].append((job.plan.contrast.previous, trained.params))
        return trained

    monkeypatch.setattr(Trainer, "train", watched)
    local = {"batch_norm": "personal", "batch_size": 32}
    run(experiment_from(table(algorithm="moon", rounds=2, local=local)), tmp_path / "run")
    for (received, wanted), (found, _) in seen.values():
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert not torch.equal(received["2.weight"], wanted["2.weight"])  # BatchNorm's
