"""A job: what an experiment needs to run, found once, and what data, split and device must be for that."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment import job as job_module
from fl_sim.experiment.experiment import Experiment, experiment_from, with_overrides
from fl_sim.experiment.job import device_of, job_of, precision_of, resolved
from fl_sim.native.kernel import Kernel
from fl_sim.training.loop import to_tensors
from fl_sim.types import Dataset
from strategies.algorithm import Split
from strategies.fedavg import FedAvg


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def test_resolved_fills_in_the_model_that_fits_and_keeps_one_that_was_named():
    assert resolved(_made(), None).model.name == "dafl-cnn"
    assert resolved(_made("model=logistic"), None).model.name == "logistic"


def test_shards_are_disjoint_cover_all_records_and_follow_the_seed():
    shards = job_of(_made("partition=dirichlet:0.5")).shards
    total = len(load("digits", None).train)
    assert len(shards) == 10
    assert sorted(np.concatenate(shards).tolist()) == list(range(total))
    again = job_of(_made("partition=dirichlet:0.5", "algorithm=scaffold", "rounds=3")).shards
    other = job_of(_made("partition=dirichlet:0.5", "seed=1")).shards
    assert all(np.array_equal(*pair) for pair in zip(shards, again, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(shards, other, strict=True))


def test_centralized_training_is_one_client_with_everything():
    made = _made("algorithm=centralized", "partition=label-1")
    (shard,) = job_of(made).shards
    assert made.num_clients == 1
    assert shard.tolist() == list(range(len(load("digits", None).train)))


def test_an_impossible_split_is_the_users_mistake():
    with pytest.raises(UserError, match=r"partition label-k of digits over 10 clients: .*11"):
        job_of(_made("partition=label-11"))


def test_the_model_starts_from_the_seed():
    first, again, other = (job_of(_made(f"seed={seed}")).model() for seed in (0, 0, 1))
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_the_device_is_the_one_asked_for(monkeypatch):
    assert device_of(_made("device=cpu")).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(_made()).type == "cpu"
    with pytest.raises(UserError, match=r"device=cuda, but .*no CUDA device.*: set device=cpu"):
        device_of(_made("device=cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(_made()).type == "cuda"


def test_a_precision_is_refused_where_it_would_change_nothing(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    stacked = ("engine=inprocess", "engine.stack=4")
    assert precision_of(_made(), cpu) == "float32"
    assert precision_of(_made("local.precision=bfloat16", *stacked), cpu) == "bfloat16"
    for overrides in (["local.precision=tf32"], ["local.precision=tf32", *stacked]):
        with pytest.raises(UserError, match="has no effect on a CPU"):
            precision_of(_made(*overrides), cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert precision_of(_made("local.precision=tf32"), gpu) == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match=r"local\.precision=tf32 has no effect on a GPU older than"):
        precision_of(_made("local.precision=tf32"), gpu)
    with pytest.raises(UserError, match="bfloat16"):
        _made("local.precision=float16")


def test_bfloat16_on_a_cpu_needs_a_compiled_trainer_and_a_processor_that_have_it(monkeypatch):
    cpu, asked = torch.device("cpu"), _made("local.precision=bfloat16")
    for kernel, why_not in (
        (Kernel(ctypes.CDLL(None), 16, has_bfloat16=False), "this processor has no avx512_bf16; leave it out"),
        (None, "no native trainer is here: it was not compiled"),
    ):
        monkeypatch.setattr(job_module, "load_kernel", lambda found=kernel: (found, "it was not compiled"))
        with pytest.raises(UserError, match=f"local.precision=bfloat16 needs the native trainer.*, and {why_not}"):
            precision_of(asked, cpu)
    kernel = Kernel(ctypes.CDLL(None), 16, has_bfloat16=True)
    monkeypatch.setattr(job_module, "load_kernel", lambda: (kernel, ""))
    assert precision_of(asked, cpu) == "bfloat16"


@dataclass(frozen=True)
class Given:
    """A scheme that deals out what it is told to, right or wrong."""

    parts: tuple[tuple[float, ...], ...] = ()

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> list[Any]:
        return [np.array(part) if part else np.array([]) for part in self.parts]


def test_inputs_are_scaled_as_asked_for_and_only_images_are_moved(tmp_path):
    ranges = {}
    for normalise in ("published", "none", "unit"):
        job = job_of(experiment_from({"normalise": normalise}))
        inputs, _ = to_tensors(job.dataset.train, job.dataset)
        ranges[normalise] = (float(inputs.min()), float(inputs.max()))
    dataset = load("digits", None)
    assert ranges["none"] == (0.0, 1.0)
    assert ranges["unit"] == (-1.0, 1.0)
    assert ranges["published"] == pytest.approx([(end - dataset.mean[0]) / dataset.std[0] for end in (0.0, 1.0)])
    rows = {"x_train": np.eye(4, dtype=np.float32) * 7, "y_train": np.arange(4) % 2}
    np.savez(tmp_path / "table.npz", **rows, x_test=rows["x_train"], y_test=rows["y_train"])
    table = {"data": f"npz:{tmp_path / 'table.npz'}", "clients": 2, "partition": "iid", "model": "mlp"}
    job = job_of(experiment_from({**table, "normalise": "none"}))
    assert float(to_tensors(job.dataset.train, job.dataset)[0].max()) == 7
    with pytest.raises(UserError, match=r"normalise=unit .* normalise=published"):
        job_of(experiment_from({**table, "normalise": "unit"}))
    with pytest.raises(UserError, match=r"local\.augment=flip .* npz:.* leave it out"):
        job_of(experiment_from({**table, "local": {"augment": "flip"}}))


def test_an_own_scheme_may_leave_clients_empty():
    first, second = job_of(Experiment(partition=Given(((5, 3), ())), clients=2)).shards
    assert (first.tolist(), second.tolist(), second.dtype) == ([5, 3], [], np.int64)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((1,), (2,), (3,)), "Given gave 3 shards for 2 clients: it must give one for each"),
        (((1,), (2, 1)), "Given gave record 1 to several clients: shards must be disjoint"),
        (((1,), (0.5,)), "Given gave shards that are not arrays of record indices from 0 to 1436"),
        (((1,), (-1,)), "not arrays of record indices from 0 to 1436"),
        (((1437,), (2,)), "not arrays of record indices from 0 to 1436"),
    ],
)
def test_parts_that_are_none_are_refused_with_the_name_of_who_gave_them(parts, message):
    with pytest.raises(UserError, match=message):
        job_of(Experiment(partition=Given(parts), clients=2))


@dataclass(frozen=True)
class Answering:
    """A scheme that answers with what is no list of arrays, or fails."""

    kind: str = "dict"

    def split(self, labels: NDArray[np.int64], num_partitions: int, rng: np.random.Generator) -> Any:
        if self.kind == "fails":
            return labels.no_such_thing
        parts = [np.arange(3), np.arange(3, 5)]
        empty = [np.zeros(0, np.int64)] * 2
        return {"dict": dict(enumerate(parts)), "generator": iter(parts), "none": None, "text": "ab",
                "numbers": np.arange(2), "ragged": [[[1], [2, 3]], [4]], "nobody": empty}[self.kind]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "dict",
            r"Answering gave dict; it must give a list of arrays .* one for each client: return list\(parts.values",
        ),
        ("generator", "Answering gave list_iterator; it must give a list of arrays"),
        ("none", "Answering gave NoneType; it must give a list of arrays"),
        ("text", "Answering gave str; it must give a list of arrays of record indices, one for each client$"),
        ("numbers", "Answering gave shards that cannot be arrays of indices .*; it must give a list of arrays"),
        ("ragged", "Answering gave shards that cannot be arrays of indices .*; it must give a list of arrays"),
        ("nobody", "Answering gave no record to any of 2 clients: give records to at least one client"),
        ("fails", "Answering failed with AttributeError: .*no_such_thing"),
    ],
)
def test_what_is_no_list_of_parts_is_refused_in_one_line(kind, message):
    with pytest.raises(UserError, match=message) as refused:
        job_of(Experiment(partition=Answering(kind), clients=2))
    assert "\n" not in str(refused.value)


class Dealer(FedAvg):
    """Has a mistake in its ``deal``."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        raise KeyError("groups")


def test_an_error_in_an_own_deal_names_the_algorithm():
    with pytest.raises(UserError, match=r"algorithm .*Dealer: deal failed with KeyError: 'groups'"):
        job_of(Experiment(algorithm=Dealer()))


class OfIds(nn.Module):
    """Embeds the ids in the first column, which run from 0 to 9."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4 + shape[0] - 1, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.table(inputs[:, 0].long()), inputs[:, 1:]], 1))


def test_an_own_model_is_tried_on_records_of_the_data_and_takes_ids(tmp_path):
    x = np.column_stack([np.arange(12) % 10, np.linspace(-3, 3, 12)]).astype(np.float32)
    labels = np.arange(12) % 2
    np.savez(tmp_path / "ids.npz", x_train=x, y_train=labels, x_test=x[8:], y_test=labels[8:])
    settings = {"data": f"npz:{tmp_path / 'ids.npz'}", "partition": "iid", "clients": 2, "rounds": 1}
    job = job_of(experiment_from({**settings, "model": f"{__name__}:OfIds"}))
    assert job.two_records.tolist() == x[8:10].tolist()
    assert job.model().head.in_features == 5
    beyond = {"x_train": x + np.array([100, 0], np.float32), "x_test": x + np.array([100, 0], np.float32)}
    np.savez(tmp_path / "beyond.npz", **beyond, y_train=labels, y_test=labels)
    settings["data"] = f"npz:{tmp_path / 'beyond.npz'}"
    with pytest.raises(UserError, match=r"OfIds' cannot take records of shape \(2,\): IndexError"):
        job_of(experiment_from({**settings, "model": f"{__name__}:OfIds"})).model()


class Hoarding(FedAvg):
    """Client 0 gets the last record of everybody else's part as well; it ends after 3 rounds."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        parts = split(np.arange(len(dataset.train)))
        taken = np.array([part[-1] for part in parts[1:]])
        return [np.concatenate([parts[0], taken]), *(part[:-1] for part in parts[1:])]

    def bound_rounds(self, rounds: int, dataset: Dataset) -> int:
        return min(rounds, 3)


class ByLabels(FedAvg):
    """Takes labels for records."""

    def deal(self, dataset: Dataset, split: Split, seed: int) -> Sequence[NDArray[np.int64]]:
        return split(dataset.train.labels)


def test_an_own_algorithm_splits_records_and_not_their_labels():
    with pytest.raises(UserError, match=r"ByLabels: .* pass each index at most once"):
        job_of(Experiment(algorithm=ByLabels()))


def test_an_own_algorithm_may_deal_the_records_and_end_by_itself():
    plain = job_of(Experiment(partition="iid", clients=4))
    made = job_of(Experiment(partition="iid", clients=4, algorithm=Hoarding(), rounds=8))
    assert [len(shard) for shard in made.shards] == [
        len(plain.shards[0]) + 3,
        *(len(one) - 1 for one in plain.shards[1:]),
    ]
    assert (plain.experiment.rounds, made.experiment.rounds) == (20, 3)
