"""LEAF's JSON: users are clients, in both parts, and what is no classification data is refused with file and user."""

import json
from pathlib import Path

import numpy as np
import pytest

from fl_sim.data import leaf, load
from fl_sim.data.naming import from_table
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.simulation.run import run


def users(rows: dict[str, tuple[list, list]]) -> dict:
    """Return the content of one file: {user: (x, y)}."""
    return {
        "users": [*rows],
        "num_samples": [len(y) for _, y in rows.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in rows.items()},
    }


def written(folder: Path, train: dict, test: dict, more: dict | None = None) -> Path:
    for part, content in (("train/a.json", train), ("test/a.json", test), ("train/b.json", more)):
        if content is not None:
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            (folder / part).write_text(json.dumps(content))
    return folder


def image(byte: int) -> list[float]:
    return [byte / 255] * 783 + [0.0]


def femnist(folder: Path) -> Path:
    train = users({"f1": ([image(3), image(200)], [61, 5]), "f0": ([image(7)], [5])})
    return written(
        folder, train, users({"f0": ([image(1)], [61]), "new": ([image(2)], [5])}), users({"f2": ([image(9)], [61])})
    )


def test_femnist_becomes_images_with_users_as_clients_in_both_parts(tmp_path):
    found = load(f"leaf:{femnist(tmp_path)}")
    assert found.train.inputs.shape == (4, 1, 28, 28)
    assert found.train.inputs[:, 0, 0, 0].tolist() == [3, 200, 7, 9]
    assert (found.train.labels.tolist(), found.classes) == ([1, 0, 0, 1], ("5", "61"))
    assert found.train.groups.tolist() == [1, 1, 0, 2]
    assert found.test.groups.tolist() == [0, 3]
    assert found.sources == tuple(sorted(found.sources))
    assert len(found.sources) == 4
    assert found.mean == (0.5,)
    assert found.note == "LEAF, images of 28x28, as bytes; 3 clients by user"
    assert found.counted == ("1 clients have only test records",)


def test_every_writer_trains_as_a_client_and_is_tested_on_its_own_records(tmp_path):
    (tmp_path / "data").mkdir()
    settings = {"data": f"leaf:{femnist(tmp_path / 'data')}", "partition": "natural", "clients": 3, "rounds": 1,
                "model": "logistic", "engine": "inprocess"}  # fmt: skip
    told = run(experiment_from(settings), tmp_path / "run")["measures"]["client_accuracy_is"]
    assert told.startswith("accuracy on each client's own test records; 2 of 3 clients have none")


def test_other_numbers_stay_as_they_are(tmp_path):
    part = users({"a": ([[0.5, -3], [1, 2]], [0, 1])})
    found = load(f"leaf:{written(tmp_path, part, part)}")
    assert found.train.inputs.tolist() == [[0.5, -3], [1, 2]]
    assert found.train.inputs.dtype == np.float32


GOOD = users({"a": ([[1.0], [2.0]], [0, 1])})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            users({"a": (["the", "cat"], ["s", "."])}),
            "have 1 numbers, but records of 'a' have 3; they must be equally long",
        ),
        (users({"a": ([[1.0], [2.0]], [[0, 1], [1, 1]])}), "needs one label per record, a whole number"),
        (users({"a": ([[1.0], [2.0]], [0.5, 1])}), "needs one label per record, a whole number"),
        (users({"a": ([[1.0], [2.0, 3]], [0, 1])}), "inputs that are no numbers, or of different lengths"),
        (users({"a": ([1.0, 2.0], [0, 1])}), "inputs that are no rows of finite numbers"),
        (users({"a": ([[1.0], [2.0]], [0, 1]), "b": ([[1.0, 2.0]], [0])}), "2 numbers, but records of 'a' have 1"),
        ({**GOOD, "num_samples": [3]}, "user 'a' must have 3 entries in x and in y"),
        ({**GOOD, "user_data": {}}, "user 'a' has no records"),
        ({"users": []}, "is not LEAF's JSON: it needs the lists users and num_samples"),
        ([1, 2], "is not LEAF's JSON"),
        (users({}), "holds no records of any user"),
        (users({"a": ([[1.0]], [0])}), "class 1 occurs only in the test part"),
    ],
)
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path, train, message):
    with pytest.raises(UserError, match=message) as caught:
        load(f"leaf:{written(tmp_path, train, GOOD)}")
    assert "\n" not in str(caught.value)


def test_damaged_missing_and_huge_files_are_refused_by_name(tmp_path, monkeypatch):
    written(tmp_path, GOOD, GOOD)
    (tmp_path / "test/a.json").write_text('{"users": [')
    with pytest.raises(UserError, match=r"test/a\.json cannot be read as JSON"):
        load(f"leaf:{tmp_path}")
    (tmp_path / "test/a.json").unlink()
    with pytest.raises(UserError, match=r"test holds no \*\.json; LEAF's files must be in"):
        load(f"leaf:{tmp_path}")
    written(tmp_path, GOOD, GOOD, GOOD)
    with pytest.raises(UserError, match=r"train/b\.json: user 'a' .*train/a\.json.* remove one"):
        load(f"leaf:{tmp_path}")
    monkeypatch.setattr(leaf, "most_bytes", lambda: 100)
    with pytest.raises(UserError, match=r"a\.json has .* bytes, too many"):
        load(f"leaf:{tmp_path}")


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    folder = written(tmp_path, users({"a": ([[1], [2]], [0, 1])}), users({"a": ([[1]], [0])}))
    text = (folder / "train/a.json").read_text()
    (folder / "train/a.json").write_text(
        text.replace('"user_data": {', '"user_data": {"a": {"x": [[7], [8]], "y": [1, 0]}, ')
    )
    with pytest.raises(UserError, match=r"train/a.json has the key 'a' twice in one object"):
        load(f"leaf:{folder}")


def test_another_alphabet_is_a_setting(tmp_path):
    names = "\n :=%+\u00e9ab"
    train = users({"u": (["a\u00e9b", "b:="], ["%", "\n"]), "U": (["ab"], ["a"])})
    folder = written(tmp_path, train, users({"u": (["+a"], ["\u00e9"])}))
    line = from_table({"kind": "leaf", "place": str(folder), "alphabet": names})
    assert "\n" not in line
    found = load(line)
    assert (found.num_classes, found.vocabulary) == (9, 10)
    assert found.train.inputs.tolist() == [[8, 7, 9], [9, 3, 4], [8, 9, 0]]
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([4, 0, 7], [6])
    assert found.classes[6] == repr("\u00e9")
    assert "1 users have several spellings" in "; ".join(found.counted)
    meaning = "each of the 9 characters of data.alphabet is a class and a token; tokens are numbered from 1"
    assert found.inferred[0] == meaning
    with pytest.raises(UserError, match="names the character 'a' twice"):
        load(f"leaf:{folder}:alphabet=aba")
    numbers = written(tmp_path / "n", users({"a": ([[1], [2]], [0, 1])}), users({"a": ([[1]], [0])}))
    with pytest.raises(UserError, match=r"data\.alphabet is for texts"):
        load(f"leaf:{numbers}:alphabet=ab")
