"""The page for those who come from elsewhere: its method keeps the laws, its script converts a folder of PFLlib's."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fl_sim.data import load
from fl_sim.errors import UserError
from fl_sim.experiment.experiment import experiment_from
from fl_sim.own_code import load_object
from fl_sim.simulation.run import run
from fl_sim.testing import check

PAGE = Path(__file__).parents[2] / "docs/porting.md"


def write_block(name: str, folder: Path) -> Path:
    [text] = re.findall(rf"^```python\n(# {re.escape(name)}\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (folder / name).write_text(text)
    return folder / name


def write_pfllib(folder: Path) -> dict[str, np.ndarray]:
    """Write clients 0, 2 and 10 as PFLlib does, and 1 without records; return the bytes that their images were."""
    rng = np.random.default_rng(0)
    images = {}
    for part, size in (("train", 6), ("test", 3)):
        (folder / part).mkdir(parents=True)
        images[part] = rng.integers(0, 256, (3 * size, 1, 4, 5), dtype=np.uint8)
        for place, number in enumerate((0, 2, 10)):
            rows = slice(place * size, (place + 1) * size)
            x = (images[part][rows] / 255 - 0.5).astype(np.float32) / np.float32(0.5)
            np.savez_compressed(folder / part / f"{number}.npz", data={"x": x, "y": np.arange(size) % 3})
        np.savez_compressed(folder / part / "1.npz", data={"x": np.array([]), "y": np.array([])})
    return images


def test_the_script_makes_one_file_without_pickles_of_the_folders_of_pfllib(tmp_path: Path) -> None:
    images = write_pfllib(tmp_path / "MNIST")
    with pytest.raises(UserError, match=r"docs/porting\.md"):
        load(f"npz:{tmp_path}/MNIST/train/0.npz")
    script = write_block("pfllib_to_npz.py", tmp_path)
    subprocess.run([sys.executable, script, tmp_path / "MNIST"], check=True, timeout=60)
    made = load(f"npz:{tmp_path}/MNIST/all.npz:values=-1..1")
    np.testing.assert_array_equal(made.train.inputs, images["train"])
    np.testing.assert_array_equal(made.test.inputs, images["test"])
    assert made.train.groups is not None
    assert made.test.groups is not None
    assert made.train.groups.tolist() == [0] * 6 + [2] * 6 + [10] * 6
    assert made.test.groups.tolist() == [0] * 3 + [2] * 3 + [10] * 3
    experiment = {
        "data": f"npz:{tmp_path}/MNIST/all.npz:values=-1..1",
        "partition": "natural",
        "clients": 3,
        "rounds": 1,
    }
    facts = run(experiment_from({**experiment, "model": "logistic", "engine": "inprocess"}), tmp_path / "run")
    assert facts["rounds"] == 1


def write_flbench(folder: Path, clients: list[dict[str, np.ndarray]]) -> None:
    """Write a partition as FL-bench's generate_data.py does."""
    folder.mkdir()
    everyone = list(range(len(clients)))
    separation = {"train": everyone, "val": everyone, "test": everyone, "total": len(clients)}
    (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": clients}))


def test_the_script_makes_one_file_of_a_partition_of_flbench(tmp_path: Path) -> None:
    digits = load("digits")
    inputs, labels = (
        np.concatenate([getattr(part, name) for part in (digits.train, digits.test)]) for name in ("inputs", "labels")
    )
    rows = np.random.default_rng(0).permutation(len(labels)).astype(np.int32)
    clients = [
        {"train": some[20:], "val": np.array([], dtype=np.int64), "test": some[:20]} for some in np.array_split(rows, 3)
    ]
    write_flbench(tmp_path / "digits", clients)
    script = write_block("flbench_to_npz.py", tmp_path)
    subprocess.run([sys.executable, script, tmp_path / "digits", "digits"], check=True, timeout=60)
    made = load(f"npz:{tmp_path}/digits/all.npz")
    for part, examples in (("train", made.train), ("test", made.test)):
        wanted = np.concatenate([client[part] for client in clients])
        np.testing.assert_array_equal(examples.inputs, inputs[wanted])
        np.testing.assert_array_equal(examples.labels, labels[wanted])
        assert examples.groups is not None
        assert examples.groups.tolist() == [number for number, one in enumerate(clients) for _ in one[part]]


def test_the_script_takes_the_arrays_that_flbench_wrote_beside_the_partition(tmp_path: Path) -> None:
    clients = [{"train": [0, 1, 4], "val": [2], "test": [3]}, {"train": [5, 6], "val": [], "test": [7]}]
    write_flbench(tmp_path / "synthetic", clients)
    records = np.random.default_rng(0).random((8, 5)).astype(np.float32)
    np.save(tmp_path / "synthetic" / "data", records)
    np.save(tmp_path / "synthetic" / "targets", np.arange(8) % 2)
    script = write_block("flbench_to_npz.py", tmp_path)
    subprocess.run([sys.executable, script, tmp_path / "synthetic", "synthetic"], check=True, timeout=60)
    made = load(f"npz:{tmp_path}/synthetic/all.npz")
    np.testing.assert_array_equal(made.train.inputs, records[[0, 1, 4, 5, 6]])
    assert made.validation is not None
    np.testing.assert_array_equal(made.validation.inputs, records[[2]])


def test_the_method_of_the_page_keeps_the_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_block("ported.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    check(load_object("ported:Ported", "algorithm")(server_lr=0.5))
