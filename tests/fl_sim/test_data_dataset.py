"""Public classes by ``data.classes``, and what readers say of those that were read off the records."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_sim.data import load
from fl_sim.data.dataset import CLASSES_READ_OFF, COLOUR_READ_OFF, SIZE_READ_OFF, card_of
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from, with_overrides
from fl_sim.types import Dataset, Examples

TABLE = "x,label,split\n1,ill,train\n2,well,train\n3,ill,test\n4,well,test\n"


def csv(folder: Path, text: str = TABLE) -> str:
    (folder / "a.csv").write_text(text)
    return f"csv:{folder / 'a.csv'}"


def npz(folder: Path, labels: list[int], name: str = "a.npz") -> str:
    x = np.arange(len(labels), dtype=np.float64)[:, np.newaxis]
    np.savez(folder / name, x_train=x, y_train=np.array(labels), x_test=x, y_test=np.array(labels))
    return f"npz:{folder / name}"


def medmnist(folder: Path, labels: list[int]) -> str:
    images, classes = np.zeros((len(labels), 4, 4), np.uint8), np.array(labels)[:, np.newaxis]
    parts = {f"{part}_{what}": array for part in ("train", "val", "test") for what, array in
             (("images", images), ("labels", classes))}  # fmt: skip
    np.savez(folder / "m.npz", **parts)
    return f"medmnist:{folder / 'm.npz'}"


def images(folder: Path, *classes: str) -> str:
    for part in ("train", "test"):
        for shade, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            Image.new("L", (4, 4), shade).save(folder / part / name / "0.png")
    return f"folder:{folder}"


def leaf(folder: Path, labels: list[int]) -> str:
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        data = {"ann": {"x": [[2.0, float(label)] for label in labels], "y": labels}}
        said = {"users": ["ann"], "num_samples": [len(labels)], "user_data": data}
        (folder / part / "a.json").write_text(json.dumps(said))
    return f"leaf:{folder}"


def test_listed_classes_are_the_labels_in_their_order_and_nothing_is_read_off(tmp_path):
    found = load(f"{csv(tmp_path)}:classes=well+rare+ill")
    assert (found.num_classes, found.classes) == (3, ("well", "rare", "ill"))
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([2, 0], [2, 0])
    assert found.read_off == ()
    assert "label label: well, rare, ill;" in found.note


def test_commas_separate_classes_unless_a_plus_sign_does(tmp_path):
    assert load(f"{csv(tmp_path)}:classes=well,rare, ill").classes == ("well", "rare", "ill")
    settings = with_overrides({}, [f"data={csv(tmp_path)}", "data.classes=well,ill"])
    assert load(experiment_from(settings).data).classes == ("well", "ill")
    with pytest.raises(UserError, match=r"a class that data\.classes does not list"):
        load(f"{csv(tmp_path)}:classes=well,rare+ill")


def test_classes_that_are_not_listed_show_their_number_and_no_name(tmp_path):
    found = load(csv(tmp_path))
    assert found.read_off == (CLASSES_READ_OFF,)
    assert "label label: 2 classes;" in found.note
    assert "ill" not in found.note


@pytest.mark.parametrize("make", [npz, medmnist, leaf])
def test_a_number_of_classes_stands_for_their_numbers(make, tmp_path):
    name = make(tmp_path, [1, 0, 2])
    assert (load(name).num_classes, load(name).read_off) == (3, (CLASSES_READ_OFF,))
    found = load(f"{name}:classes=5")
    assert (found.num_classes, found.classes) == (5, ("0", "1", "2", "3", "4"))
    assert found.train.labels.tolist() == [1, 0, 2]
    assert found.read_off == ()


@pytest.mark.parametrize("make", [npz, medmnist, leaf])
def test_a_record_of_another_class_is_refused_and_not_quoted(make, tmp_path):
    for first_beyond in (2, 3):
        (folder := tmp_path / str(first_beyond)).mkdir()
        with pytest.raises(UserError, match=r"a class that data\.classes does not list"):
            load(f"{make(folder, [*range(first_beyond + 1)])}:classes={first_beyond}")
    with pytest.raises(UserError, match=r"some records have a class that data\.classes does not list") as refused:
        load(f"{make(tmp_path, [1, 0, 77])}:classes=2")
    assert "77" not in str(refused.value).replace(str(tmp_path), "")


def test_a_row_of_another_class_is_refused_and_not_quoted_or_left_out_uncounted(tmp_path):
    name = f"{csv(tmp_path, TABLE + '5,rare-syndrome,train' + chr(10))}:classes=ill+well"
    with pytest.raises(UserError, match=r"column 'label'.*does not list.*data\.missing=drop") as refused:
        load(name)
    assert "rare" not in str(refused.value)
    found = load(f"{name}:missing=drop")
    assert found.train.inputs.ravel().tolist() == [1, 2]
    assert "records with an empty cell or a class that is not listed are left out" in found.note
    assert not any(letter.isdigit() for letter in found.note)
    assert found.counted == ("1 records with an empty cell or a class that is not listed are left out",)


def test_the_note_of_a_table_is_the_same_whatever_is_left_out(tmp_path):
    full = load(f"{csv(tmp_path, TABLE + '5,ill,train' + chr(10))}:missing=drop")
    (tmp_path / "b").mkdir()
    less = load(f"{csv(tmp_path / 'b', TABLE + ',ill,train' + chr(10))}:missing=drop")
    assert full.note == less.note
    assert (full.counted, less.counted) == ((), ("1 records with an empty cell are left out",))


def test_folders_of_classes_may_be_listed(tmp_path):
    name = images(tmp_path, "cat", "dog")
    assert load(name).read_off == (CLASSES_READ_OFF, SIZE_READ_OFF, COLOUR_READ_OFF)
    found = load(f"{name}:classes=dog+horse+cat:size=4x4")
    assert (found.num_classes, found.train.labels.tolist()) == (3, [0, 2])
    assert found.train.inputs[:, 0, 0, 0].tolist() == [1, 0]
    assert found.read_off == (COLOUR_READ_OFF,)
    with pytest.raises(UserError, match=r"a class that data\.classes does not list") as refused:
        load(f"{name}:classes=cat+horse")
    assert "dog" not in str(refused.value).replace(str(tmp_path), "")


def test_features_of_images_keep_what_was_read_off_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FL_SIM_FEATURES", str(tmp_path / "features"))
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("L", (28, 28), 9).save(tmp_path / part / name / "0.png")
            (tmp_path / part / name / "notes.txt").write_text("")
    found = load(f"folder:{tmp_path}", features="scattering")
    assert found.read_off == (CLASSES_READ_OFF, SIZE_READ_OFF, COLOUR_READ_OFF)
    assert found.counted == ("4 files without an image suffix are not used",)


@pytest.mark.parametrize("given", ["ill", "ill+ill", "ill+", "1", "1001", "ill,ill", "ill,"])
def test_what_lists_no_two_classes_is_refused(given, tmp_path):
    with pytest.raises(UserError, match=r"data\.classes = .*two classes or more.* \+ or , between"):
        load(f"{csv(tmp_path)}:classes={given}")


@pytest.mark.parametrize(("given", "message"), [("a+b", "LEAF's labels are whole numbers"), ("2", "does not list")])
def test_labels_of_leaf_are_whole_numbers(given, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load(f"{leaf(tmp_path, [3, 5])}:classes={given}")


def test_labels_of_leaf_are_numbered_by_size(tmp_path):
    found = load(f"{leaf(tmp_path, [5, 3])}:classes=5+4+3")
    assert (found.classes, found.train.labels.tolist()) == (("3", "4", "5"), [2, 0])


def test_clients_with_test_records_of_their_own_are_those_that_train_and_no_strangers():
    groups, tested = np.array([1, 1, 1, 2, 4, 4, 4, 4, 4]), np.array([4, 4, 7, 8, 9, 1])
    train = Examples(np.zeros((9, 2), np.float32), np.arange(9) % 2, groups)
    test = Examples(np.zeros((6, 2), np.float32), np.arange(6) % 2, tested)
    clients = card_of(Dataset("d", train, test, 2, (0.0,), (1.0,)), with_records=False)["clients"]
    assert (clients["count"], clients["with_test_records"], clients["with_one_record"]) == (3, 2, 1)
    assert (clients["smallest"], clients["median"], clients["largest"]) == (1, 3.0, 5)
