"""The user's own data set by import path: taken as it is, or refused in one line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_sim.data import fingerprint, load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.experiment.job import job_of
from fl_sim.simulation.run import run
from fl_sim.types import Dataset, Examples

HERE = __name__


def table(data_root: Path | None) -> Dataset:
    """Two classes of features that a line separates."""
    labels = np.arange(80) % 2
    inputs = np.stack([labels * 2.0 - 1, np.linspace(-1, 1, 80)], axis=1).astype(np.float32)
    train, test = (Examples(inputs[part], labels[part]) for part in (slice(0, 60), slice(60, 80)))
    return Dataset(str(data_root), train, test, 2, (0.0,), (1.0,), note="made up for a test")


def images(data_root: Path | None) -> Dataset:
    assert data_root == Path("/data/root")
    part = Examples(np.zeros((4, 3, 8, 8), np.uint8), np.array([0, 1, 2, 0]))
    return Dataset("any", part, part, 3, (0.5,) * 3, (0.5,) * 3)


def failing(data_root: Path | None) -> Dataset:
    raise KeyError("hospital 3\nof 5")


def empty(data_root: Path | None) -> Any:
    return None


def changed(**changes: Any) -> Callable[[Path | None], Dataset]:
    return lambda root: replace(table(root), **changes)


def with_train(inputs: Any = None, labels: Any = None) -> Callable[[Path | None], Dataset]:
    part = table(None).train
    return changed(train=Examples(part.inputs if inputs is None else inputs, part.labels if labels is None else labels))


def of_three_hospitals(data_root: Path | None) -> Dataset:
    made = table(data_root)
    return replace(made, train=replace(made.train, groups=np.arange(60) % 3 * 10))


number = 7
strange_tokens = changed(
    train=Examples(np.ones((60, 2), np.float32), np.arange(60) % 2),
    test=Examples(np.ones((20, 2), np.float32), np.arange(20) % 2),
    validation=Examples(np.full((5, 2), 9, np.float32), np.zeros(5, np.int64)),
    vocabulary=3,
)
few_groups = changed(train=replace(table(None).train, groups=np.zeros(59, np.int64)))
wide = with_train(inputs=np.zeros((60, 3), np.float32))
doubles = with_train(inputs=np.zeros((60, 2)))
short = with_train(labels=np.zeros(59, np.int64))
beyond = with_train(labels=np.full(60, 2))
broken = with_train(inputs=np.full((60, 2), np.nan, np.float32))
lists = with_train(labels=[0] * 60)
flat = changed(std=(0.0,))
channels = changed(mean=(0.0, 0.0))


def channels_last(shape: tuple[int, ...]) -> Dataset:
    part = Examples(np.zeros((4, *shape), np.uint8), np.arange(4) % 2)
    return Dataset("", part, part, 2, (0.5,) * shape[0], (0.5,) * shape[0])


def last_of_three(_: Path | None) -> Dataset:
    return channels_last((20, 30, 3))


def last_of_thirteen(_: Path | None) -> Dataset:
    return channels_last((20, 20, 13))


def few_pixels(_: Path | None) -> Dataset:
    return channels_last((8, 4, 4))


def test_a_function_in_a_module_is_a_data_set_that_trains(tmp_path: Path) -> None:
    settings = {"data": f"{HERE}:table", "model": "logistic", "partition": "iid", "clients": 3, "rounds": 5,
                "local": {"learning_rate": 0.5}, "engine": "inprocess"}  # fmt: skip
    result = run(experiment_from(settings), tmp_path)
    assert result["data"] == f"{HERE}:table"
    assert result["data_note"] == "made up for a test"
    assert result["final_accuracy"] == 1.0


def test_the_function_is_given_the_data_root() -> None:
    assert load(f"{HERE}:images", Path("/data/root")).input_shape == (3, 8, 8)
    assert load(f"{HERE}:table").name == f"{HERE}:table"


def test_what_a_ledger_is_named_by_are_the_records() -> None:
    assert fingerprint(f"{HERE}:table", None) == fingerprint(f"{HERE}:table", Path("/elsewhere"))


def test_small_images_of_many_channels_are_taken() -> None:
    assert load(f"{HERE}:few_pixels").input_shape == (8, 4, 4)


def test_where_records_come_from_may_be_the_split(tmp_path: Path) -> None:
    settings = {"data": f"{HERE}:of_three_hospitals", "model": "logistic", "partition": "natural", "clients": 3,
                "rounds": 1, "engine": "inprocess"}  # fmt: skip
    assert [shard.tolist() for shard in job_of(experiment_from(settings)).shards] == [
        list(range(first, 60, 3)) for first in range(3)
    ]
    assert run(experiment_from(settings), tmp_path)["partition"] == "natural"
    with pytest.raises(UserError, match=r"partition natural of .* over 4 clients: .* from 3 groups; use at most 3"):
        job_of(experiment_from({**settings, "clients": 4}))
    with pytest.raises(UserError, match=r"partition natural of digits .*does not say where its records come from"):
        job_of(experiment_from({**settings, "data": "digits", "model": ""}))


def test_teachers_hold_whole_groups_of_what_is_not_public() -> None:
    votes = {"kind": "pate", "public": "train", "public_records": 12, "student": "supervised"}
    settings = {"data": f"{HERE}:of_three_hospitals", "model": "logistic", "partition": "natural", "clients": 3,
                "algorithm": votes, "evaluate": {"test_is_public": True}}  # fmt: skip
    shards = job_of(experiment_from(settings)).shards
    assert sum(map(len, shards)) == 48
    assert [set((shard % 3).tolist()) for shard in shards] == [{0}, {1}, {2}]


def test_who_owns_records_is_a_part_of_what_they_are() -> None:
    assert fingerprint(f"{HERE}:table", None) != fingerprint(f"{HERE}:of_three_hospitals", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("failing", "failed with KeyError: 'hospital 3.*of 5'"),
        ("empty", r"returned NoneType, not a fl_sim\.types\.Dataset"),
        ("number", "is int, not a function of the data root"),
        ("nothing_of_this_name", "has no 'nothing_of_this_name'"),
        ("wide", "training and test records differ in shape"),
        ("doubles", r"inputs are float64 of shape \(60, 2\); wanted are uint8 images"),
        ("short", r"labels are int64 of shape \(59,\); wanted is int64, one for each of 60"),
        ("beyond", "labels run from 2 to 2, wanted are 0 to 1"),
        ("broken", "60 records are not finite"),
        ("lists", "must be NumPy arrays"),
        ("flat", r"std is \(0.0,\), wanted are 1 finite numbers, std above 0"),
        ("channels", "mean is"),
        ("last_of_three", r"images of shape \(4, 20, 30, 3\) look like channels last; .*transpose"),
        ("last_of_thirteen", r"images of shape \(4, 20, 20, 13\) look like channels last"),
        ("few_groups", r"groups are int64 of shape \(59,\); wanted is int64, one for each of 60 records"),
        ("strange_tokens", "validation.*with vocabulary 3"),
    ],
)
def test_what_is_no_data_set_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(f"{HERE}:{name}")
    assert "\n" not in str(caught.value)
