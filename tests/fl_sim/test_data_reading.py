"""The user's own data set by import path: taken as it is, or refused in one line."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_sim.data import content_of, fingerprint, load, sealed_content
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
few_names = changed(train=replace(table(None).train, groups=np.arange(60) % 3), sources=("north", "south"))
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
    with pytest.raises(UserError, match=r"partition natural of .* over 4 clients: .* from 3 sources; use at most 3"):
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
        ("empty", r"returned NoneType; it must return a fl_sim\.types\.Dataset"),
        ("number", "is int; it must be a function of the data root"),
        ("nothing_of_this_name", "has no 'nothing_of_this_name'"),
        ("wide", "training and test records differ in shape"),
        ("doubles", r"inputs are float64 of shape \(60, 2\); they must be uint8 images"),
        ("short", r"labels are int64 of shape \(59,\); they must be int64, one for each of 60"),
        ("beyond", "labels run from 2 to 2; they must be from 0 to 1"),
        ("broken", "60 records are not finite"),
        ("lists", "must be NumPy arrays"),
        ("flat", r"std is \(0.0,\); it must be 1 finite numbers, std above 0"),
        ("channels", "mean is"),
        ("last_of_three", r"images of shape \(4, 20, 30, 3\) look like channels last; .*transpose"),
        ("last_of_thirteen", r"images of shape \(4, 20, 20, 13\) look like channels last"),
        ("few_groups", r"groups are int64 of shape \(59,\); they must be int64, one for each of 60 records"),
        ("few_names", "sources are 2 names, and the groups of training records are 0 to 2"),
        ("strange_tokens", "validation.*with vocabulary 3"),
    ],
)
def test_what_is_no_data_set_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(f"{HERE}:{name}")
    assert "\n" not in str(caught.value)


LINES = ["age,sex,visits,ill"] + [f"{20 + row},{'fm'[row % 2]},{row % 5},{row % 2}" for row in range(40)]


@pytest.fixture
def csv_table(tmp_path: Path) -> Path:
    path = tmp_path / "plain.csv"
    path.write_text("\n".join(LINES) + "\n")
    return path


def of(name: str) -> str:
    return content_of(name, None)


def test_a_table_is_one_content_whoever_reads_it_how(
    csv_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.csv").symlink_to(csv_table)
    shutil.copy(csv_table, tmp_path / "copy.csv")
    (tmp_path / "sorted.csv").write_text("\r\n".join([LINES[0], *sorted(LINES[1:], reverse=True)]))
    monkeypatch.chdir(tmp_path)
    names = [
        f"csv:{csv_table}", "csv:plain.csv", "csv:./plain.csv", f"csv:{tmp_path}/../{tmp_path.name}/plain.csv",
        "csv:link.csv", "csv:copy.csv", "csv:sorted.csv", "csv:plain.csv:label=ill", "csv:plain.csv:label=sex",
        "csv:plain.csv:range.age=0..100:test=0.2", "csv:plain.csv:range.age=0..101:test=0.2:test_seed=3",
        "csv:plain.csv:drop=sex:missing=drop:delimiter=comma:client=sex",
    ]  # fmt: skip
    assert len({of(name) for name in names}) == 1


def test_other_records_are_other_content_even_under_the_same_name(csv_table: Path, tmp_path: Path) -> None:
    before = of(f"csv:{csv_table}")
    csv_table.write_text("\n".join([*LINES[:-1], LINES[1]]) + "\n")
    assert of(f"csv:{csv_table}") != before
    more = tmp_path / "more.csv"
    more.write_text("\n".join([*LINES, LINES[1]]))
    assert of(f"csv:{more}") != before, "a record that occurs twice counts twice"


def test_arrays_are_one_content_in_any_file_and_order_and_under_any_labels(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).integers(0, 256, (20, 4, 4), dtype=np.uint8)
    classes = np.arange(20) % 2

    def saved(name: str, order: np.ndarray, save=np.savez, **more: np.ndarray) -> str:  # type: ignore[no-untyped-def]
        arrays = {"x_train": inputs[order], "y_train": classes[order], "x_test": inputs[:4], "y_test": classes[:4]}
        save(tmp_path / name, **arrays | more)
        return f"npz:{tmp_path / name}"

    plain = np.arange(20)
    same = [
        saved("a.npz", plain), saved("b.npz", plain, np.savez_compressed), saved("c.npz", plain[::-1]),
        saved("d.npz", plain, y_train=1 - classes), saved("e.npz", plain, client_train=classes),
    ]  # fmt: skip
    assert len({of(name) for name in same}) == 1
    part = saved("f.npz", plain[:19])
    assert of(part) != of(same[0])


def test_merged_classes_are_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, classes = np.zeros((100, 32, 32, 3), np.uint8), np.arange(100)
    images[:, 0, 0, 0] = classes
    np.savez(tmp_path / "cifar100.npz", x_train=images, y_train=classes, x_test=images, y_test=classes)
    monkeypatch.setenv("FL_SIM_DATA", str(tmp_path))
    assert of("cifar100") == of("cifar100-coarse") == of(f"npz:{tmp_path}/cifar100.npz")


def test_a_folder_of_images_is_one_content_wherever_it_lies_and_whatever_its_classes_are_called(
    tmp_path: Path,
) -> None:
    image = pytest.importorskip("PIL.Image")
    for place in ("first", "second"):
        for number, (part, kind) in enumerate([("train", "cat"), ("train", "dog"), ("test", "cat")]):
            folder = tmp_path / place / part / (kind if place == "first" else kind.upper())
            folder.mkdir(parents=True)
            image.new("L", (4, 4), 40 * number).save(folder / "0.png")
    first, second = (f"folder:{tmp_path / place}" for place in ("first", "second"))
    assert of(first) == of(second) == of(f"{first}:size=8")
    image.new("L", (4, 4), 99).save(tmp_path / "second" / "train" / "CAT" / "1.png")
    assert of(first) != of(second)


def test_what_is_told_in_results_is_of_no_use_without_this_machines_key(
    csv_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, told = f"csv:{csv_table}", []
    for place in ("one", "one", "other"):
        monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / place))
        told.append(sealed_content(name, None))
    assert told[0] == told[1]
    assert told[0].partition(":")[0] != told[2].partition(":")[0]
    assert told[0].partition(":")[2] != told[2].partition(":")[2]
    assert of(name)[:16] not in "".join(told)
    key = tmp_path / "one" / "key"
    assert (key.stat().st_mode & 0o777, len(key.read_bytes())) == (0o600, 32)
    assert [one.name for one in key.parent.iterdir()] == ["key"]


def test_without_a_place_for_the_key_nothing_is_told(
    csv_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / "file" / "below"))
    assert sealed_content(f"csv:{csv_table}", None) == ""
