"""A job: what an experiment needs to run, found once, and what data, split and device must be for that."""

import numpy as np
import pytest
import torch
from torch import nn

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.experiment.job import job_of, resolved
from fl_sim.training.loop import to_tensors


def _made(*overrides):
    return experiment_from(with_overrides({}, list(overrides)))


def test_resolved_fills_in_the_model_that_fits_and_keeps_one_that_was_named():
    assert resolved(_made(), None).model.name == "dafl-cnn"
    assert resolved(_made("model=logistic"), None).model.name == "logistic"


def test_centralized_training_is_one_client_with_everything():
    made = _made("algorithm=centralized", "partition=label-1")
    (shard,) = job_of(made).shards
    assert made.num_clients == 1
    assert shard.tolist() == list(range(len(load("digits", None).train)))


def test_the_model_starts_from_the_seed():
    first, again, other = (job_of(_made(f"seed={seed}")).model() for seed in (0, 0, 1))
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


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
