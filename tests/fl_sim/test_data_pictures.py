"""Folders of images: sizes and depths other than expected are scaled when asked for, and refused by file otherwise."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from fl_sim.data import load, pictures
from fl_sim.errors import UserError


def write_folder(root, mode="L", size=(5, 4)):
    for split, number in (("train", 2), ("test", 1)):
        for value, name in ((10, "cat"), (200, "dog")):
            (root / split / name).mkdir(parents=True)
            for index in range(number):
                colour = value + index if mode == "L" else (value + index, 0, 7)
                Image.new(mode, size, colour).save(root / split / name / f"{index}.png")


def test_a_folder_of_images_numbers_its_classes_by_name(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train/cat/notes.txt").write_text("no image")
    (tmp_path / "train/cat/.hidden.png").write_text("no image")
    dataset = load(f"folder:{tmp_path}")
    assert dataset.input_shape == (1, 4, 5)
    assert dataset.train.labels.tolist() == [0, 0, 1, 1]
    assert dataset.train.inputs[:, 0, 0, 0].tolist() == [10, 11, 200, 201]
    assert dataset.mean == dataset.std == (0.5,)
    assert (dataset.classes, dataset.note) == (("cat", "dog"), "")
    assert dataset.counted == ("1 files without an image suffix are not used",)


def test_one_colour_image_makes_the_folder_colour(tmp_path):
    write_folder(tmp_path)
    Image.new("RGB", (5, 4), (1, 2, 3)).save(tmp_path / "test/dog/0.png")
    dataset = load(f"folder:{tmp_path}")
    assert dataset.train.inputs[0, :, 0, 0].tolist() == [10, 10, 10]
    assert dataset.test.inputs[1, :, 0, 0].tolist() == [1, 2, 3]


def test_opaque_images_with_an_alpha_channel_are_colour(tmp_path):
    write_folder(tmp_path)
    Image.new("RGBA", (5, 4), (1, 2, 3, 255)).save(tmp_path / "test/dog/0.png")
    assert load(f"folder:{tmp_path}").test.inputs[1, :, 0, 0].tolist() == [1, 2, 3]


def damage_size(root):
    Image.new("L", (6, 4)).save(root / "test/dog/0.png")


def damage_truncate(root):
    file = root / "train/dog/1.png"
    file.write_bytes(file.read_bytes()[:40])


def damage_depth(root):
    Image.new("I;16", (5, 4)).save(root / "train/dog/1.png")


def damage_deep_colour(root):
    rows = b"".join(b"\0" + bytes(5 * 6) for _ in range(4))
    head = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts]
    (root / "train/dog/1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def damage_transparent(root):
    Image.new("RGBA", (5, 4), (9, 9, 9, 254)).save(root / "train/dog/1.png")


def damage_pages(root):
    page = Image.new("L", (5, 4))
    page.save(root / "train/dog/2.tif", save_all=True, append_images=[page, page])


def damage_mode(root):
    Image.new("LA", (5, 4)).save(root / "train/dog/1.png")


def damage_stranger(root):
    (root / "test/wolf").mkdir()


def damage_no_images(root):
    for file in (root / "test").rglob("*.png"):
        file.unlink()


def damage_no_test(root):
    (root / "test").rename(root / "validation")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_size, r"test/dog/0.png has 6x4 pixels, but .*train/cat/0.png has 5x4; .* data\.size=5x4"),
        (damage_truncate, "train/dog/1.png cannot be read as an image"),
        (damage_deep_colour, "train/dog/1.png: colour with 16 bits per channel is not supported"),
        (damage_transparent, "train/dog/1.png has transparent pixels, which have no colour"),
        (damage_pages, "train/dog/2.tif holds 3 pages or frames"),
        (damage_mode, "train/dog/1.png: pixels of mode 'LA' are not supported"),
        (damage_depth, r"train/dog/1.png has 16 bits per pixel: .* data\.values=0\.\.65535"),
        (damage_stranger, "test has class 'wolf', but train has only cat, dog"),
        (damage_no_images, "test holds no images; its class folders must contain .bmp, .jpeg, .jpg, .png"),
        (damage_no_test, r"there is no folder .*/test; put images into .* data\.test=0\.2"),
    ],
)
def test_folders_with_something_wrong_are_refused_by_file(tmp_path, damage, message):
    write_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load(f"folder:{tmp_path}")


def write_classes(root):
    for value, name, number in ((10, "cat", 8), (200, "dog", 4), (90, "elk", 1)):
        (root / name).mkdir(parents=True)
        for index in range(number):
            Image.new("L", (5, 4), value + index).save(root / name / f"{index}.png")


@pytest.mark.parametrize("below", ["", "train"])
def test_a_share_of_every_class_is_for_testing_where_there_is_no_test_folder(tmp_path, below):
    write_classes(tmp_path / below)
    found = load(f"folder:{tmp_path}:test=0.25")
    assert np.bincount(found.train.labels).tolist() == [6, 3, 1]
    assert np.bincount(found.test.labels, minlength=3).tolist() == [2, 1, 0]
    values = {part: set(getattr(found, part).inputs[:, 0, 0, 0].tolist()) for part in ("train", "test")}
    assert values["train"] | values["test"] == {*range(10, 18), *range(200, 204), 90}
    assert values["train"].isdisjoint(values["test"])
    assert found.note == "0.25 of every class is for testing, drawn by test_seed 0"
    other = load(f"folder:{tmp_path}:test=0.25:test_seed=1")
    assert set(other.test.inputs[:, 0, 0, 0].tolist()) != values["test"]


def test_a_test_folder_and_a_test_share_together_are_refused(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(UserError, match=r"data\.test is set, and the folder .*/test also exists: remove one"):
        load(f"folder:{tmp_path}:test=0.2")
    with pytest.raises(UserError, match=r"data\.test = '2': it must be a share"):
        load(f"folder:{tmp_path}:test=2")
    write_classes(tmp_path / "own")
    for name in ("cat", "dog"):
        for file in sorted((tmp_path / "own" / name).iterdir())[1:]:
            file.unlink()
    with pytest.raises(UserError, match=r"only one image per class, so data\.test finds none"):
        load(f"folder:{tmp_path}/own:test=0.2")


def test_images_of_any_size_are_scaled_to_the_one_that_is_asked_for(tmp_path):
    write_folder(tmp_path)
    Image.new("L", (50, 41), 200).save(tmp_path / "test/dog/0.png")
    found = load(f"folder:{tmp_path}:size=7x6")
    assert found.input_shape == (1, 6, 7)
    assert found.test.inputs[1].min() == found.test.inputs[1].max() == 200
    assert found.note == "images scaled to 7x6"


def test_scaling_down_looks_at_all_pixels(tmp_path):
    write_folder(tmp_path)
    stripes = np.tile(np.array([[0, 200]], dtype=np.uint8), (80, 50))
    Image.fromarray(stripes).save(tmp_path / "test/dog/0.png")
    found = load(f"folder:{tmp_path}:size=5x4").test.inputs[1].astype(int)
    assert abs(found - 100).max() <= 5


def test_sixteen_bits_become_eight_by_the_range_that_is_set(tmp_path):
    write_folder(tmp_path)
    deep = np.full((4, 5), 2048, dtype=np.uint16)
    deep[0] = 4095, 0, 5000, 1024, 16
    Image.fromarray(deep).save(tmp_path / "test/dog/0.png")
    Image.fromarray(deep).save(tmp_path / "test/cat/0.tif")
    (tmp_path / "test/cat/0.png").unlink()
    found = load(f"folder:{tmp_path}:values=0..4095")
    for image in found.test.inputs[:, 0]:
        assert image[0].tolist() == [255, 0, 255, 64, 1]
        assert image[1, 0] == 128
    assert found.note == "values 0..4095 of 16 bits became 0..255"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("size=32", r"data\.size = '32': write WIDTHxHEIGHT in pixels, such as 32x32"),
        ("size=0x3", r"data\.size = '0x3'"),
        ("values=9..3", r"data\.values = '9\.\.3': write LOW\.\.HIGH"),
        ("sise=3x3", r"unknown setting data\.sise of folder data \(did you mean 'size'\?\)"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, setting, message):
    write_folder(tmp_path)
    with pytest.raises(UserError, match=message):
        load(f"folder:{tmp_path}:{setting}")


def test_images_that_would_fill_the_memory_are_refused_after_the_first(tmp_path, monkeypatch):
    write_folder(tmp_path)
    monkeypatch.setattr(pictures, "most_bytes", lambda: 100)
    with pytest.raises(UserError, match=r"6 images of 5x4 pixels .*; scale"):
        load(f"folder:{tmp_path}")


UPRIGHT = np.arange(0, 240, 12, dtype=np.uint8).reshape(4, 5)
STORED = {
    1: UPRIGHT, 2: UPRIGHT[:, ::-1], 3: UPRIGHT[::-1, ::-1], 4: UPRIGHT[::-1], 5: UPRIGHT.T, 6: np.rot90(UPRIGHT),
    7: np.rot90(UPRIGHT, 2).T, 8: np.rot90(UPRIGHT, -1),
}  # fmt: skip
"""{EXIF orientation: how a camera stores what is UPRIGHT}"""


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_images_are_turned_as_their_exif_orientation_says(tmp_path, suffix):
    write_folder(tmp_path)
    for orientation, stored in STORED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / f"test/dog/{orientation}.{suffix}", exif=exif)
    found = load(f"folder:{tmp_path}")
    turned = found.test.inputs[2:, 0]
    assert len(turned) == 8
    assert all(np.array_equal(image, UPRIGHT) for image in turned)
    assert "rotated or mirrored as their EXIF orientation says: 7 of 14 images" in found.inferred


@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0", b"nonsense", b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12"],
)
def test_a_damaged_exif_leaves_an_image_as_it_is(tmp_path, exif):
    write_folder(tmp_path)
    Image.new("L", (5, 4), 7).save(tmp_path / "test/dog/0.jpg", exif=exif)
    found = load(f"folder:{tmp_path}")
    assert found.test.inputs[1, 0].tolist() == [[7] * 5] * 4
    assert "rotated or mirrored as their EXIF orientation says: 0 of 7 images" in found.inferred


@pytest.mark.parametrize(
    ("mode", "colour", "transparent", "opaque"),
    [
        ("P", 3, 3, 2), ("P", 3, bytes([255] * 3 + [9]), bytes([9] * 3)), ("L", 9, 9, 8),
        ("RGB", (1, 2, 3), (1, 2, 3), (4, 2, 3)),
    ],
)  # fmt: skip
def test_transparency_is_refused_however_it_is_said(tmp_path, mode, colour, transparent, opaque):
    image = Image.new(mode, (5, 4), colour)
    if mode == "P":
        image.putpalette([10, 20, 30] * 4)
    for number, said in enumerate(({}, {"transparency": opaque}, {"transparency": transparent})):
        write_folder(tmp_path / str(number))
        image.save(tmp_path / str(number) / "test/dog/0.png", **said)
    for number in (0, 1):  # a colour that no pixel has may be transparent
        assert load(f"folder:{tmp_path}/{number}").test.inputs.shape[2:] == (4, 5)
    with pytest.raises(UserError, match=r"dog/0.png has transparent pixels"):
        load(f"folder:{tmp_path}/2")


def test_classes_are_matched_by_name_whatever_unicode_spells(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train/dog").rename(tmp_path / "train/Z\u00fcrich")
    (tmp_path / "test/dog").rename(tmp_path / "test/Zu\u0308rich")
    (tmp_path / "train/cat").rename(tmp_path / "train/z\u00fcrich")
    (tmp_path / "test/cat").rename(tmp_path / "test/z\u00fcrich")
    found = load(f"folder:{tmp_path}")
    assert found.classes == ("Z\u00fcrich", "z\u00fcrich")
    assert found.test.inputs[:, 0, 0, 0].tolist() == [200, 10]
    assert "classes that differ only in case or spaces" in "; ".join(found.counted)
    write_folder(tmp_path / "twice")
    for name in ("Zu\u0308rich", "Z\u00fcrich"):
        (tmp_path / "twice/train" / name).mkdir()
    with pytest.raises(UserError, match="has two folders called"):
        load(f"folder:{tmp_path}/twice")


def test_a_class_of_the_test_part_alone_is_refused_with_both_lists(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "test/wolf").mkdir()
    with pytest.raises(UserError, match="'wolf', but train has only cat, dog; test has cat, dog, wolf; use"):
        load(f"folder:{tmp_path}")
