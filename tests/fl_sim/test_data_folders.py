"""Folders with a folder for each domain: whose records are whose, and what a domain may lack."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_sim.data import content_of, fingerprint, load
from fl_sim.errors import UserError
from fl_sim.types import Dataset, Examples

DOMAINS = {"art": 10, "photo": 100, "sketch": 200}
"""{domain: the lowest grey value of its images}"""


def write(folder: Path, value: int, count: int, size: tuple[int, int] = (5, 4)) -> None:
    folder.mkdir(parents=True)
    for index in range(count):
        Image.new("L", size, value + index).save(folder / f"{index}.png")


def write_shared(root: Path) -> None:
    """Write PATH/DOMAIN/CLASS with eight cats and four dogs in each domain."""
    for domain, value in DOMAINS.items():
        write(root / domain / "cat", value, 8)
        write(root / domain / "dog", value + 50, 4)


def write_parts(root: Path) -> None:
    """Write PATH/DOMAIN/PART/CLASS with two training images and one test image for each class."""
    for domain, value in DOMAINS.items():
        for part, count in (("train", 2), ("test", 1)):
            write(root / domain / part / "cat", value, count)
            write(root / domain / part / "dog", value + 50, count)


def values_of(part: Examples, domain: int) -> set[int]:
    assert part.groups is not None
    return set(part.inputs[part.groups == domain, 0, 0, 0].tolist())


def groups_of(dataset: Dataset) -> tuple[list[int], list[int]]:
    assert dataset.train.groups is not None
    assert dataset.test.groups is not None
    return dataset.train.groups.tolist(), dataset.test.groups.tolist()


def test_a_share_of_every_class_of_every_domain_is_for_testing(tmp_path: Path) -> None:
    write_shared(tmp_path)
    found = load(f"folder:{tmp_path}:domains=true:test=0.25")
    assert (found.classes, found.sources) == (("cat", "dog"), tuple(DOMAINS))
    assert np.bincount(2 * np.array(groups_of(found)[0]) + found.train.labels).tolist() == [6, 3] * 3
    assert np.bincount(2 * np.array(groups_of(found)[1]) + found.test.labels).tolist() == [2, 1] * 3
    for number, value in enumerate(DOMAINS.values()):
        own = {*range(value, value + 8), *range(value + 50, value + 54)}
        assert values_of(found.train, number) | values_of(found.test, number) == own
        assert values_of(found.train, number).isdisjoint(values_of(found.test, number))
    assert found.note == "0.25 of every class of every domain is for testing, drawn by test_seed 0"
    assert found.inferred[0] == (
        f"3 domains, by the folders of {tmp_path.name} in alphabetical order: 0 art (9 training, 3 test records), 1 "
        "photo (9 training, 3 test records), 2 sketch (9 training, 3 test records)"
    )
    assert "2 classes, by the folders of all domains in alphabetical order" in found.inferred


def test_test_records_of_a_domain_are_in_its_folder(tmp_path: Path) -> None:
    write_parts(tmp_path)
    found = load(f"folder:{tmp_path}:domains=true")
    assert groups_of(found) == ([0] * 4 + [1] * 4 + [2] * 4, [0, 0, 1, 1, 2, 2])
    for number, value in enumerate(DOMAINS.values()):
        assert values_of(found.test, number) == {value, value + 50}
    assert (found.note, found.counted) == ("", ())


def test_domains_are_a_way_of_reading_the_same_files(tmp_path: Path) -> None:
    write_parts(tmp_path)
    name = f"folder:{tmp_path}:domains=true"
    assert content_of(name, None) == content_of(f"folder:{tmp_path}", None)
    before = fingerprint(name, None)
    (tmp_path / "art").rename(tmp_path / "zebra")  # the same images in the same classes, of domains in another order
    assert fingerprint(name, None) != before


def test_a_domain_may_lack_classes_and_test_images_and_that_is_said(tmp_path: Path) -> None:
    write_shared(tmp_path)
    for file in (tmp_path / "art/dog").iterdir():
        file.unlink()
    (tmp_path / "art/dog").rmdir()
    write(tmp_path / "Photo/cat", 1, 1)
    found = load(f"folder:{tmp_path}:domains=true:test=0.25")
    assert np.bincount(groups_of(found)[0]).tolist() == [1, 6, 9, 9]  # Photo, art, photo, sketch
    assert found.counted == (
        "domain Photo has no training images of dog",
        "domain art has no training images of dog",
        "domains without test images: Photo",
        "domains that differ only in case or spaces count as different: 'Photo' and 'photo'",
    )


def lose_test(root: Path) -> None:
    (root / "sketch/test").rename(root / "sketch/other")


def lose_test_images(root: Path) -> None:
    for file in (root / "sketch/test").rglob("*.png"):
        file.unlink()


def keep_one(root: Path) -> None:
    for domain in ("photo", "sketch"):
        (root / domain).rename(root / f".{domain}")


def add_part(root: Path) -> None:
    (root / "art").rename(root / "train")


def add_stranger(root: Path) -> None:
    write(root / "art/test/wolf", 5, 1)


def resize_one(root: Path) -> None:
    Image.new("L", (9, 9)).save(root / "sketch/train/cat/0.png")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_test, r"there is no folder .*/sketch/test; put images into .*/sketch/train/CLASS"),
        (lose_test_images, r"/sketch/test holds no images"),
        (keep_one, r"data\.domains=true finds only one domain in .*, 'art': add another one, or .* data=folder:.*/art"),
        (add_part, r"'train' is the name of a part: put images into .*/DOMAIN/train/CLASS, or leave data\.domains out"),
        (add_stranger, r"test has class 'wolf', but train has only cat, dog"),
        (resize_one, r"sketch/train/cat/0\.png has 9x9 pixels, but .*art/train/cat/0\.png has 5x4"),
    ],
)
def test_domains_with_something_wrong_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_parts(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load(f"folder:{tmp_path}:domains=true")


@pytest.mark.parametrize("settings", ["", ":test=0.25"])
@pytest.mark.parametrize("layout", [write_shared, write_parts])
def test_a_folder_that_looks_like_domains_names_the_setting(
    tmp_path: Path, layout: Callable[[Path], None], settings: str
) -> None:
    layout(tmp_path)
    with pytest.raises(UserError, match=r"look like domains with classes in each: if they are, set data\.domains=true"):
        load(f"folder:{tmp_path}{settings}")


def test_other_values_of_the_setting_are_refused(tmp_path: Path) -> None:
    write_shared(tmp_path)
    with pytest.raises(UserError, match=r"data\.domains = 'yes': write true if .* contains DOMAIN/CLASS"):
        load(f"folder:{tmp_path}:domains=yes:test=0.25")
    with pytest.raises(UserError, match=r"set data\.domains=true"):
        load(f"folder:{tmp_path}:domains=false:test=0.25")
