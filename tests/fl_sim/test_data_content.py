"""One content for the same records, whoever spells or reads them how, and another for other records."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fl_sim.data import content_of, sealed_content

LINES = ["age,sex,visits,ill"] + [f"{20 + row},{'fm'[row % 2]},{row % 5},{row % 2}" for row in range(40)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "plain.csv"
    path.write_text("\n".join(LINES) + "\n")
    return path


def of(name: str) -> str:
    return content_of(name, None)


def test_a_table_is_one_content_whoever_reads_it_how(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.csv").symlink_to(table)
    shutil.copy(table, tmp_path / "copy.csv")
    (tmp_path / "sorted.csv").write_text("\r\n".join([LINES[0], *sorted(LINES[1:], reverse=True)]))
    monkeypatch.chdir(tmp_path)
    names = [
        f"csv:{table}", "csv:plain.csv", "csv:./plain.csv", f"csv:{tmp_path}/../{tmp_path.name}/plain.csv",
        "csv:link.csv", "csv:copy.csv", "csv:sorted.csv", "csv:plain.csv:label=ill", "csv:plain.csv:label=sex",
        "csv:plain.csv:range.age=0..100:test=0.2", "csv:plain.csv:range.age=0..101:test=0.2:test_seed=3",
        "csv:plain.csv:drop=sex:missing=drop:delimiter=comma:client=sex",
    ]  # fmt: skip
    assert len({of(name) for name in names}) == 1


def test_other_records_are_other_content_even_under_the_same_name(table: Path, tmp_path: Path) -> None:
    before = of(f"csv:{table}")
    table.write_text("\n".join([*LINES[:-1], LINES[1]]) + "\n")
    assert of(f"csv:{table}") != before
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
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, told = f"csv:{table}", []
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
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FL_SIM_LEDGERS", str(tmp_path / "file" / "below"))
    assert sealed_content(f"csv:{table}", None) == ""
