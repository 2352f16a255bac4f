"""The picture of a split: a real image for any number of clients, and numbers that are the counts."""

import numpy as np
import pytest
from PIL import Image

from fl_sim.errors import UserError
from fl_sim.report.figures import partition as module
from fl_sim.report.figures.partition import _bubbles, _heat_map, draw_partition


@pytest.mark.parametrize("num_clients", [1, 10, 30, 31, 1000])
def test_the_picture_is_written_and_stays_of_a_sane_size(tmp_path, num_clients):
    counts = np.random.default_rng(0).integers(0, 50, (num_clients, 10))
    draw_partition(counts, tmp_path / "new" / "split.png", "a title")
    with Image.open(tmp_path / "new" / "split.png") as image:
        assert image.format == "PNG"
        assert 600 <= image.width <= 2300
        assert 600 <= image.height <= 1400
        assert np.asarray(image.convert("L")).min() < 120  # something dark was drawn


@pytest.mark.parametrize("kind", ["pdf", "svg"])
def test_the_same_split_has_the_same_bytes(tmp_path, kind):
    for name in ("one", "two"):
        draw_partition(np.ones((2, 2), dtype=np.int64), tmp_path / f"{name}.{kind}", "a title")
    written = (tmp_path / f"one.{kind}").read_bytes()
    assert written == (tmp_path / f"two.{kind}").read_bytes()
    assert b"CreationDate" not in written
    assert b"dc:date" not in written


def test_bubbles_carry_the_counts_and_sizes_and_their_area_is_the_count():
    counts = np.array([[40, 0], [10, 5]])
    (axes,) = _bubbles(counts, "a title").axes
    assert sorted(text.get_text() for text in axes.texts) == sorted(["40", "10", "5", "40", "15", "records"])
    (bubbles,) = axes.collections
    np.testing.assert_allclose(bubbles.get_sizes() / bubbles.get_sizes().max(), [1, 0.25, 0.125])


def test_the_heat_map_holds_every_count_and_leaves_zero_blank():
    counts = np.random.default_rng(0).integers(0, 3, (100, 4))
    figure = _heat_map(counts, "a title")
    shown = figure.axes[1].images[0].get_array()
    np.testing.assert_array_equal(shown.filled(0), counts.T)
    np.testing.assert_array_equal(shown.mask, counts.T == 0)


def test_a_file_type_that_is_no_picture_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"split.txt: give a file name that ends in .png, .svg, .pdf"):
        draw_partition(np.ones((2, 2), dtype=np.int64), tmp_path / "split.txt", "")


@pytest.mark.parametrize("shape", [(3, 2), (3, 10), (40, 10)])
def test_a_long_title_is_wrapped_and_lies_inside_the_picture_above_its_axes(tmp_path, monkeypatch, shape):
    figures = []
    monkeypatch.setattr(module, "save", lambda figure, path, kind: figures.append(figure))
    title = "npz:/home/somebody/projects/federated/data/a-long-folder/digits.npz, Dir(0.1), 3 clients, seed 0"
    draw_partition(np.ones(shape, dtype=np.int64), tmp_path / "a.png", title)
    (figure,) = figures
    figure.draw_without_rendering()
    box = figure._suptitle.get_window_extent()
    assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1
    inside = [figure.axes[0].get_window_extent(), *(text.get_window_extent() for text in figure.axes[0].texts)]
    assert max(one.y1 for one in inside) <= box.y0
