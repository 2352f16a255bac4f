"""The picture of a pool: which samples are shown, in unblurred pixels, and that it never costs a run."""

import io
import math

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

from fl_sim.report.figures import samples as module
from fl_sim.report.figures.samples import BOTTOM, draw, figure_of, images, mosaic, noise, read_samples, write_samples

DA_FL = {
    "kind": "da-fl", "epsilon": 10.0, "delta": 1e-5, "gamma": 0.05, "client_gammas": [], "noise": "secret",
    "generator": {"kind": "dp-cgan"},
}  # fmt: skip


def settings(**changes):
    return {"data": "digits", "clients": 3, "preprocess": {**DA_FL, **changes}}


@pytest.fixture
def pool(tmp_path):
    """A pool of images of one grey each, 10 * client + number within its client and class."""

    def make(counts, shape=(1, 8, 8)):
        grey = [10 * client + number for client, own in enumerate(counts) for n in own for number in range(n)]
        labels = [label for own in counts for label, n in enumerate(own) for _ in range(n)]
        inputs = np.array(grey, dtype=np.uint8).reshape(-1, *[1] * len(shape)) * np.ones(shape, dtype=np.uint8)
        path = tmp_path / "synthetic.safetensors"
        save_file({"inputs": inputs, "labels": np.array(labels, dtype=np.int64)}, path)
        return path

    return make


def greys(tiles):
    return [int(tile[0, 0, 0]) for tile in tiles]


def test_a_class_is_taken_from_all_clients_in_turn(pool):
    counts = [[3, 0], [1, 2], [5, 1]]
    taken = read_samples(pool(counts), counts)
    assert greys(taken.some(0, 6)) == [0, 10, 20, 1, 21, 2]
    assert greys(taken.some(0, 100)) == [0, 10, 20, 1, 21, 2, 22, 23, 24]
    assert greys(taken.some(1, 2)) == [10, 20]


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 96, 64)])
def test_every_shape_of_image_is_written_pixel_by_pixel(tmp_path, pool, shape):
    counts = [[1, 0, 2], [0, 0, 12]]
    assert write_samples(tmp_path, pool(counts, shape), counts, settings()) == []
    with Image.open(tmp_path / "samples.png") as image:
        shown = np.asarray(image.convert("RGB"))
    assert 900 <= shown.shape[1] <= 1500
    left = module._LEFT
    factor = max(1, round(52 / max(shape[1:])))
    first = shown[-(3 * (factor * shape[1] + 4) - 4) - BOTTOM :][: factor * shape[1], left:][:, : factor * shape[2]]
    np.testing.assert_array_equal(first, 0)  # client 0's first image of class 0 is black, up to the last pixel


def test_an_image_is_enlarged_by_repeating_its_pixels():
    one = np.arange(64, dtype=np.uint8).reshape(1, 1, 8, 8)
    (tile,) = images(one)
    assert tile.shape == (48, 48, 3)
    np.testing.assert_array_equal(tile[::6, ::6, 1], one[0, 0])
    np.testing.assert_array_equal(tile[5::6, 5::6, 2], one[0, 0])
    with pytest.raises(ValueError, match="are not images"):
        images(np.zeros((3, 7), dtype=np.uint8))


def test_a_figure_shows_every_pixel_of_its_sheet():
    tile = np.random.default_rng(0).integers(0, 256, (48, 48, 3)).astype(np.uint8)
    sheet = mosaic([[tile, None], [tile[::-1], tile]], 3)
    figure, _ = figure_of(sheet, ["a title"], left=20, above=30, right=40, narrowest=0)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    with Image.open(buffer) as image:
        np.testing.assert_array_equal(np.asarray(image.convert("RGB"))[-BOTTOM - 99 : -BOTTOM, 20:-40], sheet)


def words_of(figure):
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_the_caption_names_data_generator_privacy_gamma_and_that_nothing_is_real(pool):
    counts = [[1, 0], [0, 0], [3, 0]]
    taken = read_samples(pool(counts), counts)
    told = words_of(draw(taken, settings(), "a subset"))
    for fact in (
        "digits: SYNTHETIC", "dp-cgan", "no record is real", "epsilon at most 10 at delta 1e-05 for every record",
        "gamma 0.05", "4 records from 2 of 3 clients", "data: a subset",
    ):  # fmt: skip
        assert fact in told
    assert "simulation" not in told
    told = words_of(draw(taken, settings(noise="seeded", client_gammas=[0.1, 0.5, 0.1])))
    assert "noise from the seed: a simulation only" in told
    assert "gamma 0.1 to 0.5, by client" in told
    told = words_of(draw(taken, settings(epsilon=math.inf)))
    assert "epsilon inf: made without noise, so with no privacy guarantee" in told


def test_a_class_without_samples_is_shown_as_empty(pool):
    counts = [[1, 0, 11]]
    (axes,) = draw(read_samples(pool(counts), counts), settings()).axes
    told = [text.get_text() for text in axes.texts]
    assert [text for text in told if "class" in text] == [
        "class 0", "class 1", "the pool holds no sample of this class", "class 2"
    ]  # fmt: skip
    assert [text for text in told if text.endswith("in the pool")] == [
        "1 in the pool",
        "0 in the pool",
        "11 in the pool",
    ]


def test_more_classes_than_fit_are_told(pool):
    counts = [[1] * 150]
    figure = draw(read_samples(pool(counts), counts), settings())
    assert "the first 100 of 150 classes" in words_of(figure)
    assert figure.get_size_inches()[1] * 150 < 6000


def test_a_pool_without_records_has_no_picture_and_no_warning(tmp_path, pool):
    assert write_samples(tmp_path, pool([[0, 0]]), [[0, 0]], settings()) == []
    assert not (tmp_path / "samples.png").exists()


@pytest.mark.parametrize(
    ("counts", "shape", "message"),
    [([[5, 1]], (1, 8, 8), "does not contain the records"), ([[2, 1]], (7,), "are not images")],
)
def test_a_picture_that_fails_is_a_warning(tmp_path, pool, counts, shape, message):
    (warning,) = write_samples(tmp_path, pool([[2, 1]], shape), counts, settings())
    assert warning.startswith("samples.png could not be drawn: ValueError")
    assert message in warning
    (warning,) = write_samples(tmp_path, tmp_path / "gone", counts, settings())
    assert "FileNotFoundError" in warning


def test_images_of_noise_are_framed_and_counted_and_real_digits_are_not(tmp_path):
    real = (load_digits().images[:7] * 15).astype(np.uint8)[:, None]
    flat = np.full((1, 1, 8, 8), 100, dtype=np.uint8)
    assert not noise(np.concatenate([real, flat])).any()
    made = np.random.default_rng(0).integers(0, 256, size=(3, 1, 8, 8), dtype=np.uint8)
    save_file(
        {"inputs": np.concatenate([real, made]), "labels": np.repeat(np.int64([0, 1]), [6, 4])},
        tmp_path / "pool.safetensors",
    )
    figure = draw(read_samples(tmp_path / "pool.safetensors", [[6, 4]]), settings())
    (axes,) = figure.axes
    assert [patch.get_xy() for patch in axes.patches] == [(column * 52 - 1, 51) for column in (1, 2, 3)]
    assert "3 of 10 images look like noise (orange frames)" in words_of(figure)
    save_file({"inputs": real, "labels": np.zeros(7, dtype=np.int64)}, tmp_path / "pool.safetensors")
    assert "noise (orange" not in words_of(draw(read_samples(tmp_path / "pool.safetensors", [[7, 0]]), settings()))
