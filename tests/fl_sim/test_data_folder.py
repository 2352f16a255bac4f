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
    assert (dataset.classes, dataset.note) == (("cat", "dog"), "1 files that are no images by their names are left out")


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
        (damage_size, r"test/dog/0.png is 6x4 pixels, but .*train/cat/0.png is 5x4; .* data\.size=5x4"),
        (damage_truncate, "train/dog/1.png cannot be read as an image"),
        (damage_deep_colour, "train/dog/1.png: colour with 16 bits a channel is not supported"),
        (damage_transparent, "train/dog/1.png has transparent pixels, which have no colour"),
        (damage_pages, "train/dog/2.tif holds 3 pages or frames"),
        (damage_mode, "train/dog/1.png: pixels of mode 'LA' are not supported"),
        (damage_depth, r"train/dog/1.png has 16 bits a pixel: .* data\.values=0\.\.65535"),
        (damage_stranger, "test has class 'wolf', but train has only cat, dog"),
        (damage_no_images, "test holds no images; wanted are .bmp, .jpeg, .jpg, .png"),
        (damage_no_test, "there is no folder .*/test; wanted are"),
    ],
)
def test_folders_with_something_wrong_are_refused_by_file(tmp_path, damage, message):
    write_folder(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load(f"folder:{tmp_path}")


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
        ("size=32", r"data\.size = '32': it is WIDTHxHEIGHT in pixels, such as 32x32"),
        ("size=0x3", r"data\.size = '0x3'"),
        ("values=9..3", r"data\.values = '9\.\.3': it is LOW\.\.HIGH"),
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
    with pytest.raises(UserError, match=r"6 images of 5x4 pixels take more than half of this machine's memory; scale"):
        load(f"folder:{tmp_path}")
