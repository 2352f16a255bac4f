"""Features once: what a frozen body computes is stored, and a run has the bits that it has without the file."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fl_sim.data.kept import cache_root
from fl_sim.experiment import job as jobs
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.frozen_body import BATCH, FrozenBody, body_of
from fl_sim.experiment.job import Job, job_of
from fl_sim.experiment.node_job import own_job, public_facts
from fl_sim.models import resnet
from fl_sim.simulation.forecast import features_work
from fl_sim.simulation.run import run
from fl_sim.token_models import TOKEN_MODELS, trimmed
from fl_sim.trained_part import TrainedPart
from fl_sim.training import loop, trainer
from fl_sim.types import Dataset, Examples
from strategies.fedavg import FedAvg

HERE = __name__
BASE = {
    "data": "digits", "partition": "iid", "clients": 3, "rounds": 2, "engine": "inprocess",
    "local": {"batch_size": 64, "learning_rate": 0.1}, "model": {"name": "dafl-cnn", "trainable": "head"},
}  # fmt: skip


def changed(*settings: str) -> Any:
    return experiment_from(with_overrides(BASE, list(settings)))


class Counted(nn.Module):
    """A body with a factor that a test changes, as an edit of the code does, and a count of its records."""

    factor: ClassVar[float] = 1.0
    records: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.draws_random_numbers = False
        self.linear = nn.Linear(64, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Counted.records += len(inputs)
        return torch.relu(self.linear(inputs.flatten(1))) * Counted.factor


class Dependent(nn.Module):
    """A body whose features of a record depend on the other records."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.linear(inputs.flatten(1))
        return features - features.mean(0)


def _of(body: nn.Module) -> Callable[..., nn.Module]:
    body.requires_grad_(requires_grad=False)
    return lambda classes: nn.Sequential(body, nn.Linear(32, classes))


def counted(shape: tuple[int, ...], classes: int) -> nn.Module:
    del shape
    return _of(Counted())(classes)


def dependent(shape: tuple[int, ...], classes: int) -> nn.Module:
    del shape
    return _of(Dependent())(classes)


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    del shape
    return _of(nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.1)))(classes)


def scaled(shape: tuple[int, ...], classes: int) -> nn.Module:
    del shape
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, classes), nn.Softplus())


def narrow(shape: tuple[int, ...], classes: int) -> nn.Module:
    del shape
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, classes))


class Own(FedAvg):
    """An algorithm from outside of fl-sim."""


class Trims(nn.Module):
    """A body of texts that sees how long the longest text of a batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.table(trimmed(inputs.long()))
        return states.mean(1)


TABLE = nn.Sequential(
    nn.Linear(20, 33), nn.LayerNorm(33), nn.GELU(), nn.BatchNorm1d(33), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 5)
)
MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "resnet": (resnet((3, 16, 16), 10), (3, 16, 16)),
    "table": (TABLE, (20,)),
    "trims": (nn.Sequential(Trims(), nn.Linear(8, 4)), (40,)),
    **{name: (TOKEN_MODELS[name](50, 40, 4), (40,)) for name in ("gru", "lstm", "transformer")},
}


@pytest.mark.parametrize("name", MODELS)
def test_no_record_changes_the_bits_of_another_one(name: str) -> None:
    """Convolutions, norms, embeddings, attention, recurrent and linear layers."""
    model, shape = MODELS[name]
    TrainedPart("head")(model)
    generator = np.random.default_rng(0)
    values = generator.normal(size=(100, *shape)).astype(np.float32)
    if is_text := len(shape) == 1 and name != "table":
        lengths = generator.choice([1, 3, 17, 40], (100, 1))
        lengths[:2] = 40
        values = (generator.integers(1, 50, (100, 40)) * (np.arange(40) < lengths)).astype(np.float32)
    examples = Examples(values, np.zeros(100, dtype=np.int64))
    constants = (0.0,) * (shape[0] if len(shape) == 3 else 1), (1.0,) * (shape[0] if len(shape) == 3 else 1)
    dataset = Dataset(name, examples, examples, 4, *constants, vocabulary=50 * is_text)
    body = body_of(model, torch.from_numpy(values[:2]), torch.device("cpu"), "")
    assert isinstance(body, FrozenBody)
    found, order = body.features_of(examples, dataset), generator.permutation(100)
    assert np.array_equal(body.features_of(examples.take(order), dataset), found[order])
    alone = np.concatenate([body.features_of(examples.take(np.array([row])), dataset) for row in range(0, 100, 25)])
    assert np.array_equal(alone, found[::25])
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(values))
        if name != "trims":
            assert torch.allclose(body.head(torch.from_numpy(found)), logits, atol=1e-5)


def test_where_a_large_batch_has_no_such_arithmetic_records_are_alone() -> None:
    body = job_of(changed(f"model={HERE}:narrow", "model.trainable=head")).body
    assert isinstance(body, FrozenBody)
    assert body.batch in {1, BATCH}


def saved(out: Path, *settings: str) -> Mapping[str, torch.Tensor]:
    run(changed(*settings), out)
    return load_file(out / "model.safetensors")


def is_same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


PRIVATE = ("local.privacy=dp-sgd", "local.privacy.noise=seeded", "local.privacy.noise_multiplier=1", "local.momentum=0")


@pytest.mark.usefixtures("quick_accounting")
@pytest.mark.parametrize("more", [(), PRIVATE], ids=["plain", "private"])
def test_the_file_only_saves_time(more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "cache"))
    made = saved(tmp_path / "made", *more)
    assert len(list(cache_root().glob("digits-body-*"))) == 1
    read = saved(tmp_path / "read", *more)
    shutil.rmtree(cache_root())
    (once,) = {is_same(made, one) for one in (read, saved(tmp_path / "again", *more))}
    assert once
    monkeypatch.setattr(jobs, "body_of", lambda *_: "")  # every step computes the body
    if not more:
        through = saved(tmp_path / "through", *more)
        assert all(torch.allclose(value, made[name], atol=1e-4) for name, value in through.items())


def test_a_round_computes_no_body_and_an_edited_body_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "cache"))
    settings, counts = [f"model={HERE}:counted", "model.trainable=all"], []
    for number, rounds in enumerate((1, 1, 6)):
        before = Counted.records
        saved(tmp_path / str(number), *settings, f"rounds={rounds}")
        counts.append(Counted.records - before)
    assert counts[0] > 1797
    assert counts[1] == counts[2] < 10 * BATCH
    monkeypatch.setattr(Counted, "factor", 2.0)
    capfd.readouterr()
    features = job_of(changed(*settings)).records.train.inputs
    assert "cannot be used" in capfd.readouterr().err
    monkeypatch.setattr(Counted, "factor", 1.0)
    assert np.array_equal(features, 2 * job_of(changed(*settings)).records.train.inputs)


def test_other_records_and_other_weights_have_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "cache"))
    job = job_of(changed())
    assert isinstance(job.body, FrozenBody)
    same, other = job_of(changed("partition_seed=3", "rounds=9")), job_of(changed("seed=1"))
    files = {one.body.place(one.dataset)[0] for one in (job, same, other) if isinstance(one.body, FrozenBody)}
    assert len(files) == 2
    backwards = replace(job.dataset, train=job.dataset.train.take(np.arange(len(job.dataset.train))[::-1]))
    assert job.body.place(backwards)[0] not in files
    assert not cache_root().exists()


def _own(tmp_path: Path) -> str:
    digits = job_of(changed()).dataset
    inputs, labels = digits.train.inputs[:90, 0], digits.train.labels[:90]
    np.savez(tmp_path / "own.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    return f"npz:{tmp_path}/own.npz"


def test_a_node_computes_features_of_its_own_records_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "cache"))
    server = job_of(changed())
    node = own_job(server.experiment, _own(tmp_path), 1, public_facts(server.dataset))
    assert isinstance(server.body, FrozenBody)
    start = server.dataset.train.take(np.arange(90))
    assert np.array_equal(node.records.train.inputs, server.body.features_of(start, server.dataset))
    (kept,) = cache_root().glob("*-body-*")
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["local.augment=crop"], "local.augment=crop changes the records"),
        (["partition=feature-noise"], "partition feature-noise changes the records"),
        (["algorithm=fedmix"], "algorithm fedmix may read the records"),
        ([f"algorithm={HERE}:Own"], "algorithm .*Own may read the records"),
        (["evaluate.metrics=fl_sim.models:resnet"], "evaluate.metrics may read the records"),
        ([f"model={HERE}:dropping", "model.trainable=all"], "it draws random numbers in training, as dropout does"),
        ([f"model={HERE}:dependent"], "a record's features depend on the other records of its batch"),
        ([f"model={HERE}:scaled", "model.trainable=head"], "its head does not compute the logits from features"),
        (["model.trainable=lora,head"], "^$"),
        (["model.trainable=last:2"], "^$"),
        (["model=logistic"], "^$"),
        (["model=mlp", "model.trainable=all"], "^$"),
    ],
    ids=str,
)
def test_where_the_features_are_no_function_of_the_record_every_step_computes_them_and_the_run_says_why(
    settings: list[str], reason: str
) -> None:
    job = job_of(changed(*settings))
    assert isinstance(job.body, str)
    assert re.search(reason, job.body)
    assert job.records is job.dataset
    assert any("every step computes" in line for line in job.model_in_words) == bool(job.body)


def test_a_trained_head_sees_the_features_of_evaluation_from_a_body_with_dropout() -> None:
    job = job_of(changed(f"model={HERE}:dropping", "model.trainable=head"))
    assert isinstance(job.body, FrozenBody)
    model = job.whole_model().train()
    inputs = job.two_records
    assert torch.equal(model(inputs), model.eval()(inputs))
    alone = dropping((1, 8, 8), 10)
    TrainedPart("all")(alone)
    assert not torch.equal(alone.train()(inputs), alone.eval()(inputs))  # nothing changes for a body frozen by hand


def test_a_plan_counts_the_features_and_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "cache"))
    job = job_of(changed())
    assert isinstance(job.body, FrozenBody)
    work = features_work(job, job.body)
    assert work.pieces == -(-1797 // BATCH)
    assert work.ready is not None
    work.ready(BATCH, 2)()
    assert not cache_root().exists()
    assert job.records.input_shape == job.input_shape
    assert features_work(job, job.body).pieces == 0


def test_models_of_clients_share_the_frozen_parameters() -> None:
    job: Job = job_of(changed("model.trainable=lora"))
    first, second = (dict(job.model().named_parameters()) for _ in range(2))
    shared = {name for name, weight in first.items() if weight.data_ptr() == second[name].data_ptr()}
    assert shared == {name for name, weight in first.items() if not weight.requires_grad}
    assert shared


def by_pytorch(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a model that the compiled trainer does not support."""
    del input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 37), nn.Tanh(), nn.Linear(37, num_classes))


def test_a_hundred_clients_train_adapters_beside_one_copy_of_the_frozen_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used: list[dict[str, int]] = []

    def train(model: nn.Module, *rest: Any) -> Any:
        used.append({name: weight.data_ptr() for name, weight in model.named_parameters() if not weight.requires_grad})
        return loop.train(model, *rest)

    monkeypatch.setattr(trainer, "train", train)
    settings = ["clients=100", "rounds=1", "local.epochs=0", "local.steps=1", f"model={HERE}:by_pytorch"]
    run(changed(*settings, "model.trainable=lora", "engine.workers=2"), out=tmp_path / "run")
    assert len(used) == 100
    assert all(one == used[0] for one in used)
    assert {"1.weight", "3.weight"} <= used[0].keys()
